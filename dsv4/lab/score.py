"""Teacher-forced runs: logits of given ids, bits per byte of a text. The engine's path, without sampling."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dsv4 import disk
from dsv4.cache.layout import SPARE
from dsv4.engine.engine import Engine
from dsv4.engine.trial import Trial
from dsv4.errors import CheckpointError, ConfigError, RequestError
from dsv4.weights.reader import Reader

Progress = Callable[[int, int], None]  # tokens done, tokens in all


def read_ids(path: Path) -> list[int]:
    """The tensor `ids` [T] of a safetensors file."""
    with Reader(path) as reader:
        ids = _integers(reader, path, "ids", 1)
    if not len(ids):
        raise CheckpointError(f"{path}: ids is empty; there is nothing to score")
    return ids.tolist()


def _integers(reader: Reader, path: Path, name: str, dimensions: int) -> Tensor:
    if name not in reader.entries:
        raise CheckpointError(f"{path} has no tensor {name!r}; found {sorted(reader.entries)}")
    entry, shape = reader.entries[name], "[T]" if dimensions == 1 else "[A, B]"
    if len(entry.shape) != dimensions or entry.dtype not in ("I64", "I32"):
        raise CheckpointError(
            f"{path}: {name} is {entry.dtype} {list(entry.shape)}, expected I64 or I32 {shape}"
        )
    return reader.read(name).long()


@dataclass(frozen=True)
class Anchors:
    """Positions after which drafts are looked at, and for each the tokens that are taken for drafts."""

    positions: tuple[int, ...]
    forced: tuple[tuple[int, ...], ...] | None

    @classmethod
    def read(cls, path: Path) -> "Anchors":
        """The tensors `anchors` [A] and, where present, `forced_ids` [A, B] of a safetensors file."""
        with Reader(path) as reader:
            positions = _integers(reader, path, "anchors", 1)
            forced = _integers(reader, path, "forced_ids", 2) if "forced_ids" in reader.entries else None
        if forced is not None and len(forced) != len(positions):
            raise CheckpointError(
                f"{path}: forced_ids has {len(forced)} rows, expected {len(positions)}, one for each anchor"
            )
        return cls(tuple(positions.tolist()), None if forced is None else tuple(map(tuple, forced.tolist())))

    def check(self, engine: Engine, num_ids: int) -> None:
        """Refuse what cannot be drafted."""
        vocab, dspark = engine.model_config.vocab_size, engine.model_config.dspark
        if engine.drafter is None:
            raise RequestError(
                "no drafts are made here: the model has no drafter, or speculate is off, or it runs on a GPU"
            )
        if bad := [p for p in self.positions if not 0 <= p < num_ids - 1]:
            raise RequestError(f"anchor {bad[0]} has no token after it; expected 0 to {num_ids - 2}")
        width = len(self.forced[0]) if self.forced else 0
        if dspark and self.forced and width != dspark.block_size:
            raise RequestError(f"forced_ids has {width} tokens for each anchor, expected {dspark.block_size}")
        if width >= SPARE:
            raise RequestError(f"forced_ids has {width} tokens for each anchor, expected at most {SPARE - 1}")
        if bad := [id for row in self.forced or () for id in row if not 0 <= id < vocab]:
            raise RequestError(f"forced id {bad[0]} is outside the vocabulary of {vocab}")


def write_logits(path: Path, logits: dict[str, Tensor]) -> None:
    held = {name: value.cpu().contiguous() for name, value in logits.items()}
    with disk.result(path) as part:
        try:
            save_file(held, part)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from None


def score_ids(
    engine: Engine,
    ids: Sequence[int],
    prompt_len: int,
    mtp: bool = False,
    progress: Progress | None = None,
    anchors: Anchors | None = None,
    walk: Sequence[tuple[int, int]] = (),
) -> dict[str, Tensor]:
    """The first `prompt_len` ids as a prompt in chunks of the engine's `chunk`, the rest one at a time, or as
    verification steps: a step (A, K) of `walk` takes the next A ids for drafts that are accepted, and K - A
    wrong ones that are rolled back.

    -> prefill_logits [N, V], decode_logits [T-N, V] and, with mtp, mtp_logits [N, V], float32. With `anchors`
    what is drafted there: Drafter.look's tensors, stacked.
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
    if anchors is not None:
        anchors.check(engine, len(ids))
    prefill, decode, drafts = [], [], []
    places = {} if anchors is None else {p: row for row, p in enumerate(anchors.positions)}
    found: dict[int, dict[str, Tensor]] = {}
    # Rows that are rolled back lie beyond the last id.
    room = min(engine.settings.max_context, len(ids) + SPARE)

    def look(trial: Trial, start: int, stop: int) -> None:
        for p in sorted(p for p in places if start <= p < stop):
            forced = anchors.forced[places[p]] if anchors and anchors.forced else None
            found[p] = trial.look(p, ids[p + 1], forced)
        if progress:
            progress(stop, len(ids))

    with Trial(engine, room) as trial:
        for start, stop in _chunks(prompt_len, engine.settings.chunk, places):
            logits, drafted = trial.read(ids[start:stop], ids[start + 1 : stop + 1] if mtp else None)
            prefill.append(logits)
            drafts.append(drafted)
            look(trial, start, stop)
        steps = itertools.cycle(walk or [(0, 0)])
        while (start := trial.position) < len(ids):
            accepted, proposed = next(steps)
            if walk or anchors:
                taken = ids[start : start + 1 + accepted]
                wrong = [(id + 1) % vocab for id in (*ids[start + len(taken) :], *[0] * SPARE)]
                most = min(proposed - accepted, room - start - len(taken))
                decode.append(trial.verify(taken, wrong[:most]))
            else:
                decode.append(trial.token(ids[start]))
            look(trial, start, trial.position)
    empty = torch.empty(0, vocab)
    out = {"prefill_logits": torch.cat(prefill), "decode_logits": torch.cat(decode) if decode else empty}
    if mtp:
        out["mtp_logits"] = torch.cat([part for part in drafts if part is not None])
    if anchors is not None:
        rows = [found[p] for p in anchors.positions]
        out |= {name: torch.stack([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return out


def _chunks(prompt_len: int, chunk: int, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Of a prompt, cut also after each position that is to be looked at."""
    ends = sorted({*(cut + 1 for cut in cuts if cut < prompt_len), prompt_len})
    start = 0
    for end in ends:
        while start < end:
            stop = min(end, start + chunk)
            yield start, stop
            start = stop


def parse_walk(text: str) -> list[tuple[int, int]]:
    """`A/K,A/K`: drafts that are accepted, of those in a verification step."""
    steps = []
    for part in text.split(","):
        accepted, slash, proposed = part.strip().partition("/")
        if not (slash and accepted.isdecimal() and proposed.isdecimal()):
            raise ConfigError(f"--walk {text!r}: expected steps A/K, e.g. 0/3,2/5")
        if not int(accepted) <= int(proposed) < SPARE:
            raise ConfigError(f"--walk {part.strip()}: expected A up to K, and K up to {SPARE - 1}")
        steps.append((int(accepted), int(proposed)))
    return steps


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
