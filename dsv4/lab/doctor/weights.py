"""A checkpoint's contents: are scales numbers of a sensible size, are 4-bit codes in their order.

What cannot be seen: a checkpoint of random weights looks the same with its codes swapped, and a scale that is
wrong by less than the limits below passes. A run of the model (selftest.py) sees more.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.device import one_thread
from dsv4.lab.doctor.findings import Finding, first_of
from dsv4.quant.codec import decode, has_nan_scale
from dsv4.quant.formats import FP8_TILE, Format, QuantTensor
from dsv4.weights.detect import Source
from dsv4.weights.load import Checkpoint

Progress = Callable[[int, int], None]

# Values examined at most, unless asked for all: a few seconds of decoding.
BUDGET = 400_000_000
SAMPLED_ROWS = 2 * FP8_TILE
# How much a linear enlarges a random input, rms * sqrt(K). Training starts near 1 and ends near it; bytes of
# E8M0 taken for numbers (120 for 2^-7) make it thousands, numbers taken for bytes 2^-100. Experts that are
# never chosen may decay to almost nothing, so the lower limit is far off.
GAIN = (2.0**-20, 64.0)
# Standard deviations that a chance result would have to be off.
SIGMAS = 6.0
# Rows of a random head differ in length by 1/sqrt(2 D); those of a trained one by several times that.
TRAINED = 2.0

_AGAIN = "download the checkpoint again, or convert it again"
_SCALES = (
    "the scales are wrong numbers: E8M0 and E4M3 scales must be copied as bytes, weight_scale_2 must "
    "multiply, input_scale must not; convert the checkpoint again"
)
_SWAPPED = (
    "even columns belong in the low nibble: convert the checkpoint again with nibbles the other way round"
)


@dataclass
class _Seen:
    """What the pass over the tensors gathers."""

    tensors: int = 0
    values: int = 0
    damaged: list[str] = field(default_factory=list)  # NaN, infinity, a negative scale
    gains: dict[str, tuple[float, float]] = field(default_factory=dict)  # component -> smallest, largest
    implausible: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    rows: dict[str, Tensor] = field(default_factory=dict)  # log length of the rows a linear writes
    columns: dict[str, Tensor] = field(default_factory=dict)  # and of the columns a 4-bit one reads


def examine_weights(checkpoint: Checkpoint, full: bool, progress: Progress | None = None) -> list[Finding]:
    """Reads a sample of a large checkpoint, all of a small one."""
    sources = [source for source in checkpoint.inventory.sources if source.format is not None]
    total = sum(math.prod(source.param.shape) for source in sources)
    sampled = not full and total > BUDGET
    chosen = _sample(checkpoint, sources) if sampled else sources
    with one_thread():
        seen = _read(checkpoint, chosen, sampled, progress)
    share = (
        f"a sample of {seen.values / 1e6:,.0f} M of {total / 1e6:,.0f} M values" if sampled else "all values"
    )
    return [_finite(seen, share), _plausible(seen), *_order(seen), _tables(checkpoint)]


def _read(checkpoint: Checkpoint, chosen: list[Source], sampled: bool, progress: Progress | None) -> _Seen:
    seen = _Seen()
    with checkpoint.reader as reader:
        for source in checkpoint.inventory.sources:
            if source.param.kind == "plain":
                _look_plain(seen, source, source.read_plain(reader))
        for done, source in enumerate(chosen, 1):
            rows = min(source.param.shape[0], SAMPLED_ROWS) if sampled else source.param.shape[0]
            _look(seen, source, source.read_rows(reader, 0, rows))
            if progress:
                progress(done, len(chosen))
    return seen


def _sample(checkpoint: Checkpoint, sources: list[Source]) -> list[Source]:
    """Every linear but the experts', and of those a few per layer, evenly spread."""
    experts = [s for s in sources if s.param.expert is not None]
    others = [s for s in sources if s.param.expert is None]
    layers = checkpoint.config.num_layers + checkpoint.inventory.num_mtp_layers
    each = 3 * SAMPLED_ROWS * checkpoint.config.hidden_size
    count = max(2, BUDGET // 2 // (layers * each))
    step = max(1, checkpoint.config.num_experts // count)
    return others + [s for s in experts if (s.param.expert or 0) % step == 0]


def _look(seen: _Seen, source: Source, q: QuantTensor) -> None:
    name, is_4_bit = source.param.name, source.format in (Format.NVFP4, Format.MXFP4)
    seen.tensors, seen.values = seen.tensors + 1, seen.values + math.prod(q.shape)
    if has_nan_scale(q):
        seen.damaged.append(f"{name} has a scale that is no finite number")
        return
    if _has_negative_scale(q):
        seen.damaged.append(f"{name} has a negative scale")
        return
    values = decode(q)
    # In float64 no square of a finite value overflows, so one pass tells both.
    length = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    if not math.isfinite(length):
        seen.damaged.append(f"{name} holds NaN or infinity")
        return
    gain = length / math.sqrt(q.shape[0])
    if source.is_quantised:
        low, high = seen.gains.get(source.param.component, (gain, gain))
        seen.gains[source.param.component] = (min(low, gain), max(high, gain))
        if gain == 0:
            seen.zero.append(name)
        elif not GAIN[0] <= gain <= GAIN[1]:
            seen.implausible.append(f"{name} ({source.format}) enlarges its input {gain:.2g} times")
    if name.endswith((".w1", ".w3", ".wo_a", ".wq_a")):
        seen.rows[name] = _length(values, 1)
    if is_4_bit and name.endswith((".w2", ".wo_b", ".wq_b")):
        seen.columns[name] = _length(values, 0)


def _look_plain(seen: _Seen, source: Source, values: Tensor) -> None:
    seen.tensors += 1
    if not bool(torch.isfinite(values).all()):
        seen.damaged.append(f"{source.param.name} holds NaN or infinity")


def _has_negative_scale(q: QuantTensor) -> bool:
    if q.scale is None:
        return False
    if q.scale.dtype != torch.uint8:
        return bool((q.scale < 0).any())
    return q.format is Format.NVFP4 and (q.global_scale < 0 or bool((q.scale > 128).any()))


def _length(values: Tensor, dim: int) -> Tensor:
    return values.square().mean(dim).clamp(min=1e-30).log()


def _finite(seen: _Seen, share: str) -> Finding:
    if seen.damaged:
        return Finding("checkpoint", "values", "fail", first_of(seen.damaged), _AGAIN)
    text = f"finite in {seen.tensors:,} tensors ({share})"
    if seen.zero:
        return Finding(
            "checkpoint", "values", "note", f"{text}; {len(seen.zero)} are zero, first {seen.zero[0]}"
        )
    return Finding("checkpoint", "values", "ok", text)


def _plausible(seen: _Seen) -> Finding:
    if seen.implausible:
        text = f"{first_of(seen.implausible)}; expected {GAIN[0]:.0e} to {GAIN[1]:.0f} times"
        return Finding("checkpoint", "scales", "fail", text, _SCALES)
    if not seen.gains:
        return Finding("checkpoint", "scales", "ok", "there are none: nothing is quantised")
    low, high = min(low for low, _ in seen.gains.values()), max(high for _, high in seen.gains.values())
    return Finding("checkpoint", "scales", "ok", f"linears enlarge their input {low:.2g} to {high:.2g} times")


def _order(seen: _Seen) -> list[Finding]:
    """Whether 4-bit columns lie where the rows they read from say.

    A channel that training made strong is strong in both: the linear that writes it has a long row, the one
    that reads it a long column. Rows are not packed, columns are, two to a byte. So within each byte the
    longer column must stand where the longer row stands; swapped nibbles turn the relation round.
    """
    if not seen.columns:
        return []
    groups: dict[str, list[Tensor]] = {}
    for name, columns in seen.columns.items():
        rows = _writers(seen, name)
        if rows is None:
            continue
        count = min(len(rows), len(columns)) // 2 * 2
        a, b = (x[:count].view(-1, 2) for x in (rows, columns))
        block, last = name.rsplit(".", 1)
        where = block.split(".experts.")[0] + (".experts" if ".experts." in block else "")
        groups.setdefault(f"{where}.{last}", []).append((a[:, 0] - a[:, 1]) * (b[:, 0] - b[:, 1]))
    if not groups:
        return []  # what was written for them is damaged, which is another finding
    scores = {name: _sigmas(torch.cat(products)) for name, products in groups.items()}
    everything = _sigmas(torch.cat([product for group in groups.values() for product in group]))
    swapped = sorted(name for name, score in scores.items() if score < -SIGMAS)
    if swapped or everything < -SIGMAS:
        which = f"{len(swapped)} of {len(scores)} groups, first {swapped[0]}" if swapped else "all together"
        worst = min([everything, *scores.values()])
        text = f"neighbouring 4-bit columns look swapped in {which} ({worst:.0f} standard deviations)"
        return [Finding("checkpoint", "nibbles", "fail", text, _SWAPPED)]
    if everything > SIGMAS:
        return [Finding("checkpoint", "nibbles", "ok", f"in order ({everything:.0f} standard deviations)")]
    text = (
        f"their order cannot be seen in these weights ({everything:+.1f} standard deviations): random ones?"
    )
    return [Finding("checkpoint", "nibbles", "note", text)]


def _writers(seen: _Seen, name: str) -> Tensor | None:
    """Log length of the rows that write what the linear of that name reads."""
    block, last = name.rsplit(".", 1)
    names = {"w2": ("w1", "w3"), "wo_b": ("wo_a",), "wq_b": ("wq_a",)}[last]
    # The indexer's wq_b reads what the attention's wq_a writes.
    block = block.removesuffix(".indexer")
    found = [seen.rows[f"{block}.{n}"] for n in names if f"{block}.{n}" in seen.rows]
    return torch.stack(found).sum(0) if len(found) == len(names) else None


def _sigmas(products: Tensor) -> float:
    """Their sum, in standard deviations of what random signs would give."""
    scale = float(products.square().sum().sqrt())
    return float(products.sum()) / scale if scale else 0.0


def _tables(checkpoint: Checkpoint) -> Finding:
    count, experts = 0, checkpoint.config.num_experts
    with checkpoint.reader as reader:
        for source in checkpoint.inventory.sources:
            if source.param.kind != "table":
                continue
            count += 1
            table = source.read_plain(reader).long()
            if int(table.min()) < 0 or int(table.max()) >= experts:
                text = f"{source.weight.name} names experts {int(table.min())} to {int(table.max())}"
                return Finding(
                    "checkpoint", "hash tables", "fail", f"{text}, expected 0 to {experts - 1}", _AGAIN
                )
            ordered = table.sort(dim=1).values
            if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                text = f"{source.weight.name} names an expert twice for one token"
                return Finding("checkpoint", "hash tables", "fail", text, _AGAIN)
    return Finding("checkpoint", "hash tables", "ok", f"{count}, all ids in range")


def looks_trained(checkpoint: Checkpoint) -> bool:
    """Whether rows of the head differ in length by more than chance; the head is never packed in nibbles."""
    source = next(s for s in checkpoint.inventory.sources if s.param.name == "head")
    rows, cols = source.param.shape
    with checkpoint.reader as reader:
        parts = [decode(source.read_rows(reader, a, b)) for a, b in _spread(rows)]
    lengths = torch.cat(parts).square().mean(1).sqrt()
    spread = float(lengths.std() / lengths.mean().clamp(min=1e-30))
    return spread > TRAINED * (2 * cols) ** -0.5


def _spread(rows: int) -> Iterator[tuple[int, int]]:
    """Spans over the vocabulary: its first ids are special and its last ones unused. They start on a tile."""
    step = max(FP8_TILE, rows // 8 // FP8_TILE * FP8_TILE)
    for start in range(0, rows, step):
        yield start, min(rows, start + FP8_TILE)
