"""Small inputs for every function of every op, the same on each machine. Knows signatures, not results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.sample.cpu import pack
from dsv4.quant.codec import encode_kv, encode_weight
from dsv4.quant.formats import Format, QuantTensor

# Relative errors that a sum in another order makes, and a value that falls to the other side of a rounding.
SUMS = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}
ROUNDINGS = {torch.float32: 1e-2, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Weight:
    """A parameter among the arguments: a backend may want it in a form of its own."""

    stored: QuantTensor


Hold = Callable[[QuantTensor, str], Any]  # a weight as stored, on the device named -> the backend's own form


@dataclass(frozen=True)
class Case:
    """`rounds`: the result is rounded to 8 or 4 bits, where noise makes jumps."""

    op: str
    function: str
    name: str
    arguments: tuple[Any, ...]
    rounds: bool = False

    def tolerance(self, dtype: torch.dtype) -> float:
        return (ROUNDINGS if self.rounds else SUMS)[dtype]


def to_device(value: Any, device: str, hold: Hold | None = None) -> Any:
    """Arguments of a case with every tensor moved, and weights as `hold` makes them."""
    if isinstance(value, Weight):
        stored = to_device(value.stored, device)
        return stored if hold is None else hold(stored, device)
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, QuantTensor):
        scale = None if value.scale is None else value.scale.to(device)
        moved = (value.format, value.data.to(device), value.shape, scale, value.global_scale, value.rope_dim)
        return QuantTensor(*moved)
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device, hold) for item in value)
    return value


class _Random:
    """Numbers that depend on their place alone: no random generator has to be the same everywhere."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *shape: int) -> Tensor:
        """Between -1 and 1, float32."""
        self.count += 1
        place = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + 7919 * self.count
        mixed = (place * 2654435761) % 4294967296
        mixed = ((mixed ^ (mixed >> 15)) * 2246822519) % 4294967296
        mixed = ((mixed ^ (mixed >> 13)) * 3266489917) % 4294967296
        return (mixed.double() / 2147483648 - 1).float().reshape(shape)


def make_cases(dtype: torch.dtype) -> list[Case]:
    """All of them, with activations of that type."""
    out: list[Case] = []
    for build in (_linear, _experts, _route, _norm, _mhc, _qkv, _compress, _index, _attend, _sample):
        out += build(_Random(), dtype)
    return out


def _weight(values: Tensor, format: Format) -> Weight:
    return Weight(encode_weight(values, format))


def _linear(r: _Random, dtype: torch.dtype) -> list[Case]:
    out = []
    for format in (Format.BF16, Format.FP8, Format.MXFP4, Format.NVFP4):
        weight = _weight(r(128, 256) * 0.1, format)
        for rows in (0, 1, 9):
            out.append(
                Case("linear", "linear", f"{format} {rows} rows", (r(rows, 256).to(dtype), weight, "a16"))
            )
        rounded = (r(3, 256).to(dtype), weight, "a8")
        out.append(Case("linear", "linear", f"{format} a8", rounded, rounds=True))
    groups = [_weight(r(64, 128) * 0.1, Format.BF16) for _ in range(2)]
    out.append(Case("linear", "grouped", "two groups", (r(5, 2, 128).to(dtype), groups)))
    table = encode_weight(r(50, 64), Format.BF16)  # rows to look up: no backend holds it otherwise
    out.append(Case("linear", "embed", "rows", (torch.tensor([0, 49, 7, 7]), table, dtype)))
    # NVFP4 on both sides, which some tensor cores multiply as it is.
    both = (r(9, 256).to(dtype), _weight(r(128, 256) * 0.1, Format.NVFP4), "a4")
    out.append(Case("linear", "linear", "nvfp4 a4", both, rounds=True))
    return out


def _expert(r: _Random, format: Format) -> tuple[Weight, ...]:
    shapes = ((64, 128), (64, 128), (128, 64))
    return tuple(_weight(r(*shape) * 0.3, format) for shape in shapes)


def _experts(r: _Random, dtype: torch.dtype) -> list[Case]:
    experts = [_expert(r, Format.NVFP4) for _ in range(5)]
    ids = torch.tensor([[0, 3], [3, 1], [4, 0], [1, 2], [3, 4], [2, 0], [0, 1]])
    x = (r(7, 128) * 20).to(dtype)  # large enough for the clamp to act
    return [
        Case("experts", "ffn", "shared", (x, _expert(r, Format.FP8), 10.0, "a16")),
        Case("experts", "routed", "two of five", (x, ids, r(7, 2).abs() + 0.1, experts, 10.0, "a16")),
    ]


def _route(r: _Random, dtype: torch.dtype) -> list[Case]:
    x, gate = r(6, 128).to(dtype), _weight(r(16, 128) * 0.5, Format.BF16)
    chosen = torch.tensor([[3, 1], [0, 15], [7, 8], [2, 4], [9, 3], [14, 0]])
    return [
        Case("route", "by_score", "two of sixteen", (x, gate, r(16), 2, 1.5)),
        Case("route", "by_hash", "given ids", (x, gate, chosen, 1.5)),
    ]


def _norm(r: _Random, dtype: torch.dtype) -> list[Case]:
    return [
        Case("rows", "rms_norm", "weighted", ((r(5, 96) * 50).to(dtype), r(96) + 1, 1e-6)),
        Case("rows", "rms_norm", "plain", (r(3, 2, 64).to(dtype), None, 1e-6)),
    ]


def _mhc(r: _Random, dtype: torch.dtype) -> list[Case]:
    streams = (r(5, 4, 64) * 3).to(dtype)
    sizes = torch.tensor((4, 4, 16))
    mixing = (r(256, 24) * 0.2, r(24), (r(3) + 1).repeat_interleave(sizes), 1e-6, 1e-6, 20)
    head = (r(256, 4) * 0.2, r(4), r(1) + 1, 1e-6, 1e-6)
    comb = r(5, 4, 4).abs()
    out = [
        Case("mhc", "pre", "four streams", (streams, *mixing)),
        Case("mhc", "post", "four streams", (r(5, 64).to(dtype), streams, r(5, 4).abs(), comb)),
        Case("mhc", "head", "four streams", (streams, *head)),
    ]
    # From one site into the next, and what products make of its input: sizes that a kernel of its own serves.
    last = (r(9, 512).to(dtype), r(9, 4, 512).to(dtype), r(9, 4).abs(), r(9, 4, 4).abs())
    mixing = (r(2048, 24) * 0.05, *mixing[1:])
    readers = [(_weight(r(64, 512) * 0.1, Format.FP8), "a8"), (_weight(r(32, 512) * 0.1, Format.BF16), "a16")]
    out.append(Case("mhc", "mix_in", "512 channels", (last, mixing, r(512) + 1, readers), rounds=True))
    return out


def _turn(r: _Random, rows: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = r(rows, pairs) * 3
    return angle.cos(), angle.sin()


def _qkv(r: _Random, dtype: torch.dtype) -> list[Case]:
    x, turn = r(6, 128).to(dtype), _turn(r, 6, 16)
    return [
        Case("attention", "queries", "four heads", (r(6, 4, 128).to(dtype), *turn, 1e-6)),
        Case("attention", "entries", "one head", (x, r(128) + 1, *turn, 1e-6)),
        Case("attention", "store", "fp8", (x, 32, Format.KV8, True), rounds=True),
    ]


def _compress(r: _Random, dtype: torch.dtype) -> list[Case]:
    """Tokens 6 to 17 of one sequence: two blocks of the tail, the rest of this step."""
    positions = torch.arange(6, 18)
    common = (torch.zeros(12, dtype=torch.long), positions, torch.full((12,), 6))
    closing = ((positions + 1) % 4 == 0).nonzero().squeeze(1)
    overlap = (r(12, 128), r(12, 128), r(1, 16, 128), r(1, 16, 128))
    whole = (r(12, 64), r(12, 64), r(1, 12, 64), r(1, 12, 64))
    return [
        Case("attention", "pool", "overlap", (*overlap, closing, *common, 4, True)),
        Case("attention", "pool", "whole", (*whole, closing, *common, 4, False)),
    ]


def _index(r: _Random, dtype: torch.dtype) -> list[Case]:
    turn, table = _turn(r, 6, 16), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slots, positions = torch.zeros(3, dtype=torch.long), torch.tensor([3, 40, 95])
    keys = encode_kv(r(24, 64) * 2, 0, Format.MXFP4)
    query, weights = r(3, 8, 64).to(dtype), r(3, 8)
    return [
        Case("index", "queries", "rounded", (r(6, 8, 64).to(dtype), *turn, True), rounds=True),
        Case("index", "keys", "fp4", (r(6, 64).to(dtype), r(64) + 1, *turn, 1e-6, True, Format.MXFP4), True),
        Case("index", "select", "five best", (query, weights, keys, table, slots, positions, 4, 8, 5)),
        Case("index", "visible_rows", "all", (table, slots, positions, 4, 8)),
        Case("index", "queries", "V4's", (r(6, 8, 128).to(dtype), *_turn(r, 6, 32), True), rounds=True),
    ]


def _attend(r: _Random, dtype: torch.dtype) -> list[Case]:
    """Tokens 6 to 8 of one sequence with a window of 5: two rows of the ring, and compressed entries."""
    positions, slots = torch.arange(6, 9), torch.zeros(3, dtype=torch.long)
    rope = 32
    fresh, ring, pool = (encode_kv(r(rows, 128).to(dtype), rope, Format.KV8) for rows in (3, 13, 4))
    chosen = torch.tensor([[0, -1], [0, 2], [3, 1]])
    turn = _turn(r, 3, rope // 2)
    where = (slots, positions, torch.full((3,), 6), 5, 13)
    block = (slots, torch.full((3,), 6), torch.full((3,), 2), 5, 13)
    q, sinks = (r(3, 4, 128) * 4).to(dtype), r(4)
    return [
        Case("attention", "attend", "window", (q, fresh, ring, *where, None, None, sinks, *turn)),
        Case("attention", "attend", "entries", (q, fresh, ring, *where, pool, chosen, sinks, *turn)),
        Case("attention", "attend_block", "drafts", (q, fresh, ring, *block, sinks, *turn, 1e-6)),
    ]


def _sample(r: _Random, dtype: torch.dtype) -> list[Case]:
    logits, mask = r(4, 200) * 8, torch.full((4, 7), 0x5A5A5A5A, dtype=torch.int32)
    settings = torch.tensor(
        [
            pack(num_top=3),
            pack(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=7, index=3),
            pack(temperature=2.0, seed=8, num_top=20, has_mask=True),
            pack(forced=11, num_top=0),
        ]
    )
    return [
        Case("sample", "log_probs", "row", (logits[0],)),
        Case("sample", "choose", "four kinds of rows", (logits, settings, mask)),
    ]
