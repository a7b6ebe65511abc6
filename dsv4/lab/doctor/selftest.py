"""The whole engine on a built-in model, against logits recorded elsewhere; then on the user's model."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import EngineConfig, preset
from dsv4.engine.engine import Engine
from dsv4.engine.request import SamplingParams
from dsv4.errors import Dsv4Error
from dsv4.lab.doctor.findings import Finding
from dsv4.lab.doctor.golden import LOGITS, TOP
from dsv4.lab.init import make
from dsv4.lab.score import Anchors, score_ids

# A prompt that closes one block of 128 and many of 4, then single tokens.
IDS = [(37 * i + 11) % 512 for i in range(157)]
PROMPT = 150
ROWS = {"prefill": (0, 1, 5, 63, 64, 100, 127, 128, 140, 149), "decode": (0, 1, 6), "mtp": (0, 10, 100, 149)}
COLUMNS = (3, 77, 151, 225, 299, 373, 447, 511)
# Median relative error of a row's logits, share of equal top tokens. Few values sit on a rounding boundary.
MARKS = {torch.float32: (1e-3, 0.9), torch.bfloat16: (0.05, 0.8)}

TEXT = (
    "Once upon a time there was a little girl who lived in a small house near the forest. One day she went "
    "for a walk and found a red ball under a tree. She was very happy and ran home to show it to her mother. "
    "The two of them played with it in the garden until the sun went down."
)
# A trained model predicts this text far better than chance, and its drafter often agrees with it.
CHANCE = 0.9
LEAST_ACCEPTANCE = 0.05
DSPARK_STRIDE = 4


def observe(device: str) -> tuple[list[int], list[list[float]], torch.dtype]:
    """The built-in random model: top tokens and a few logits of chosen rows, and the type computed in."""
    with tempfile.TemporaryDirectory(prefix="dsv4-doctor-") as folder:
        for _ in make(Path(folder) / "model", preset("tiny"), "modelopt", seed=0):
            pass
        config = EngineConfig(device=device, max_batch=1, max_context=len(IDS), chunk=64)
        engine = Engine.load(Path(folder) / "model", config)
    logits = score_ids(engine, IDS, PROMPT, mtp=True)
    rows = torch.cat([logits[f"{kind}_logits"][list(at)].float().cpu() for kind, at in ROWS.items()])
    return rows.argmax(-1).tolist(), rows[:, list(COLUMNS)].tolist(), engine.settings.dtype


def examine_engine(device: str) -> Finding:
    name = f"golden vector on {device}"
    remedy = (
        "the engine computes something else here: run the tests (make test) and report the first that fails"
    )
    try:
        top, values, dtype = observe(device)
    except OSError as error:
        remedy = "the test writes a model of 7 MB: set TMPDIR to a folder with room for it"
        return Finding("engine", name, "fail", f"did not run: {error.strerror or error}", remedy)
    except Dsv4Error as error:
        return Finding("engine", name, "fail", f"did not run: {error}", "follow the message")
    except RuntimeError as error:
        return Finding("engine", name, "fail", f"did not run: {error}", remedy)
    got, want = torch.tensor(values).double(), torch.tensor(LOGITS).double()
    distance = float(((got - want).norm(dim=1) / want.norm(dim=1)).median())
    agree = sum(a == b for a, b in zip(top, TOP, strict=True)) / len(TOP)
    worst, least = MARKS[dtype]
    text = f"median relative error {distance:.1e}, top token equal in {agree:.0%} of {len(TOP)} rows"
    if not distance <= worst or agree < least:
        return Finding("engine", name, "fail", f"{text}; expected {worst:.0e} and {least:.0%}", remedy)
    return Finding("engine", name, "ok", text)


def behaviour(engine: Engine) -> tuple[float | None, float | None]:
    """How a model predicts a plain text or, without a tokenizer, what it writes itself: nats per token (None:
    its own text), and how often its drafter agrees with it (None: there is none). NaN shows as NaN."""
    tokenizer, vocab = engine.tokenizer, engine.model_config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size <= vocab:
        ids = [tokenizer.bos_id, *tokenizer.encode_text(TEXT)][: engine.settings.max_context]
    else:
        tokenizer = None
        start = [engine.model_config.bos_id]
        written = engine.generate([start], SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
        ids = [*start, *written[0].ids]
    # Of DSpark's blocks some: each is a pass of its own.
    looked = tuple(range(0, len(ids) - 2, DSPARK_STRIDE)) if engine.model.dspark and engine.drafter else ()
    anchors = Anchors(looked, None) if looked else None
    logits = score_ids(engine, ids, len(ids) - 1, mtp=bool(engine.model.mtp), anchors=anchors)
    trunk = logits["prefill_logits"].float().cpu()
    nats = _nats(trunk, ids[1:]) if tokenizer is not None else None
    # The draft made at i for token i+2, against the trunk's own choice one step later.
    chosen = trunk.argmax(-1)[1:]
    if looked:
        return nats, float((logits["draft_ids"][:, 0].cpu() == chosen[list(looked)]).float().mean())
    if "mtp_logits" not in logits:
        return nats, None
    draft = logits["mtp_logits"].argmax(-1).cpu()[:-1]
    return nats, float((draft == chosen).float().mean())


def _nats(logits: Tensor, targets: Sequence[int]) -> float:
    return -float(logits.double().log_softmax(-1).gather(1, torch.tensor(targets).unsqueeze(1)).mean())


def examine_behaviour(engine: Engine, is_trained: bool) -> list[Finding]:
    try:
        nats, acceptance = behaviour(engine)
    except (Dsv4Error, RuntimeError) as error:
        remedy = "the weights are damaged or overflow: download or convert the checkpoint again"
        return [Finding("model", "run", "fail", f"the model does not run: {error}", remedy)]
    out = []
    if nats is not None:
        chance = math.log(engine.model_config.vocab_size)
        text = f"{nats:.2f} nats per token of a plain text; chance is {chance:.2f}"
        if not math.isfinite(nats) or (is_trained and nats > CHANCE * chance):
            remedy = (
                "the head looks trained, so other weights or the tokenizer are wrong: see scales, nibbles "
                "and tokenizer above; convert the checkpoint again"
            )
            out.append(Finding("model", "prediction", "fail", text, remedy))
        elif not is_trained:
            out.append(Finding("model", "prediction", "note", f"{text}; the weights look random"))
        else:
            out.append(Finding("model", "prediction", "ok", text))
    if acceptance is not None:
        text = f"the drafter agrees with the model on {acceptance:.0%} of tokens"
        if is_trained and acceptance < LEAST_ACCEPTANCE:
            remedy = (
                "convert the drafter (mtp.*) again: its experts may be MXFP4 while the trunk's are "
                "NVFP4, and E8M0 scales must be copied as bytes"
            )
            out.append(Finding("model", "draft", "fail", text, remedy))
        else:
            level = "ok" if is_trained else "note"
            why = "" if is_trained else "; the weights look random"
            out.append(Finding("model", "draft", level, text + why))  # type: ignore[arg-type]
    return out
