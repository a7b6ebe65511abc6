"""Teacher-forced runs: logits of given ids, bits per byte of a text. The engine's path, without sampling."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dsv4 import disk
from dsv4.engine.engine import Engine
from dsv4.engine.trial import Trial
from dsv4.errors import CheckpointError, ConfigError, RequestError
from dsv4.weights.reader import Reader

Progress = Callable[[int, int], None]  # tokens done, tokens in all


def read_ids(path: Path) -> list[int]:
    """The tensor `ids` [T] of a safetensors file."""
    with Reader(path) as reader:
        if "ids" not in reader.entries:
            raise CheckpointError(f"{path} has no tensor 'ids'; found {sorted(reader.entries)}")
        entry = reader.entries["ids"]
        if len(entry.shape) != 1 or entry.dtype not in ("I64", "I32"):
            raise CheckpointError(
                f"{path}: ids is {entry.dtype} {list(entry.shape)}, expected I64 or I32 [T]"
            )
        if not entry.shape[0]:
            raise CheckpointError(f"{path}: ids is empty; there is nothing to score")
        return reader.read("ids").tolist()


def write_logits(path: Path, logits: dict[str, Tensor]) -> None:
    held = {name: value.cpu().contiguous() for name, value in logits.items()}
    with disk.result(path) as part:
        try:
            save_file(held, part)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from None


def score_ids(
    engine: Engine, ids: Sequence[int], prompt_len: int, mtp: bool = False, progress: Progress | None = None
) -> dict[str, Tensor]:
    """The first `prompt_len` ids as a prompt in chunks of the engine's `chunk`, the rest one at a time.

    -> prefill_logits [N, V], decode_logits [T-N, V] and, with mtp, mtp_logits [N, V], float32.
    """
    vocab = engine.model_config.vocab_size
    if not 1 <= prompt_len <= len(ids):
        raise RequestError(f"prompt-len is {prompt_len}, expected 1 to {len(ids)}, the number of ids")
    if len(ids) > engine.settings.max_context:
        raise RequestError(
            f"{len(ids)} ids exceed max_context {engine.settings.max_context}; raise it with --max-context"
        )
    if bad := [i for i in ids if not 0 <= i < vocab]:
        raise RequestError(f"id {bad[0]} is outside the vocabulary of {vocab}")
    if mtp and not engine.model.mtp:
        raise RequestError("the checkpoint has no draft block (mtp.*), so there are no MTP logits")
    if mtp and prompt_len >= len(ids):
        raise RequestError(
            f"MTP logits of {prompt_len} prompt positions need {prompt_len + 1} ids, found {len(ids)}; "
            "lower --prompt-len"
        )
    prefill, decode, drafts = [], [], []
    with Trial(engine, len(ids)) as trial:
        for start in range(0, prompt_len, engine.settings.chunk):
            stop = min(prompt_len, start + engine.settings.chunk)
            logits, drafted = trial.read(ids[start:stop], ids[start + 1 : stop + 1] if mtp else None)
            prefill.append(logits)
            drafts.append(drafted)
            if progress:
                progress(stop, len(ids))
        for position in range(prompt_len, len(ids)):
            decode.append(trial.token(ids[position]))
            if progress:
                progress(position + 1, len(ids))
    empty = torch.empty(0, vocab)
    out = {"prefill_logits": torch.cat(prefill), "decode_logits": torch.cat(decode) if decode else empty}
    return out | ({"mtp_logits": torch.cat([part for part in drafts if part is not None])} if mtp else {})


@dataclass(frozen=True)
class TextScore:
    tokens: int
    bytes: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    def as_dict(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def score_text(engine: Engine, text: str, progress: Progress | None = None) -> TextScore:
    """Every token of the text, predicted from BOS and those before it, in pieces of the context's length."""
    if engine.tokenizer is None:
        raise RequestError("the model folder has no tokenizer.json; score ids with --ids instead")
    ids = engine.tokenizer.encode_text(text)
    if not ids:
        raise RequestError("the text is empty; there is nothing to score")
    piece, nats, done = engine.settings.max_context, 0.0, 0
    for begin in range(0, len(ids), piece):
        targets = ids[begin : begin + piece]
        inputs = [engine.tokenizer.bos_id, *targets[:-1]]
        with Trial(engine, len(inputs)) as trial:
            for start in range(0, len(inputs), engine.settings.chunk):
                chunk = inputs[start : start + engine.settings.chunk]
                logits, _ = trial.read(chunk)
                want = torch.tensor(targets[start : start + len(chunk)], device=logits.device)
                nats -= float(logits.double().log_softmax(-1).gather(1, want.unsqueeze(1)).sum())
                done += len(chunk)
                if progress:
                    progress(done, len(ids))
    if not math.isfinite(nats):
        raise RequestError(f"the text's log-likelihood is {-nats}; the weights are damaged or overflow")
    return TextScore(len(ids), len(text.encode()), nats)
