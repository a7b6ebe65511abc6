"""The codec over long streams of weights: slices in reused buffers, the codec's bits at many times its speed.

A slice is a few columns of at most 128 rows, small enough for a core's cache. Widths are rounded up to whole
tiles with zeros, which every format encodes as zeros.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.quant.codec import (
    E2M1_MAX,
    E4M3_MAX,
    FP4_FLOOR,
    FP8_FLOOR,
    NV_RANGE,
    e2m1_decode,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    p2ceil_code,
    unpack_nibbles,
)
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format, QuantTensor

SLICE_ROWS = FP8_TILE
SLICE_COLS = 2048
# Steps from the rule's scale code that the least-squares search tries: further ones never won (docs/log.md).
NV_SEARCH = (-2, -1, 1, 2, 3, 4, 5, 6)
MX_SEARCH = (-1,)
# Numpy compares three to ten times as fast as torch here. A tie goes to the even code.
_MIDPOINTS = (
    (np.greater, 0.25),
    (np.greater_equal, 0.75),
    (np.greater, 1.25),
    (np.greater_equal, 1.75),
    (np.greater, 2.5),
    (np.greater_equal, 3.5),
    (np.greater, 5.0),
)


class Buffers:
    """Working memory of one thread: an array per name, made once and used again."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        codes = torch.arange(256, dtype=torch.uint8)
        pairs = e2m1_decode(unpack_nibbles(codes.unsqueeze(1)))
        self.nibble_pairs = pairs.view(torch.int64).flatten().numpy()
        self._e4m3, self._e8m0 = e4m3_decode(codes).numpy(), e8m0_decode(codes).numpy()

    def scales(self, codes: Tensor, is_e8m0: bool) -> Tensor:
        """Values of 8-bit scale codes; a look-up is ten times as fast as torch's conversion."""
        return torch.from_numpy(np.take(self._e8m0 if is_e8m0 else self._e4m3, codes.numpy()))

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < count:
            held = self._held[name] = torch.empty(count, dtype=dtype)
        assert held.dtype == dtype
        return held[:count].view(shape)


@dataclass
class Tally:
    """What encoding did to values: sums of squares of the source x, the result y, and the error."""

    values: int = 0
    inexact: int = 0
    xx: float = 0.0
    yy: float = 0.0
    ee: float = 0.0
    exponents: list[int] = field(default_factory=lambda: [0] * 16)  # NVFP4 blocks by exponent of their scale

    def add(self, other: "Tally") -> None:
        for name in ("values", "inexact", "xx", "yy", "ee"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.exponents = [a + b for a, b in zip(self.exponents, other.exponents, strict=True)]

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.ee / self.xx) if self.xx else 0.0

    @property
    def cosine(self) -> float:
        """From the error rather than the product: that keeps the digits by which it falls short of 1."""
        x, y = math.sqrt(self.xx), math.sqrt(self.yy)
        return 1.0 - (self.ee - (x - y) ** 2) / (2 * x * y) if x and y else 1.0


def decode_slice(q: QuantTensor, start: int, stop: int, buffers: Buffers) -> Tensor:
    """Columns [start, stop) of at most 128 stored rows -> float32 [rows, width], width a multiple of 128."""
    rows, count = q.shape[0], stop - start
    assert rows <= SLICE_ROWS and start % SLICE_COLS == 0
    width = -(-count // FP8_TILE) * FP8_TILE
    out = buffers.get("x", (rows, width), torch.float32)
    out[:, count:] = 0
    if q.format.is_plain:
        out[:, :count].copy_(q.data[:, start:stop])
        return out
    assert q.scale is not None
    if q.format is Format.FP8:
        _e4m3_values(q.data[:, start:stop], out[:, :count], buffers)
        block = FP8_TILE
        scale = q.scale[:, start // block : -(-stop // block)]
        scale = buffers.scales(scale, True) if scale.dtype == torch.uint8 else scale
    else:
        data = q.data[:, start // 2 : stop // 2].numpy()
        pairs = out.view(torch.int64).numpy()
        if width == count:
            # "clip" skips numpy's bounds check; a byte is never out of 256 entries.
            np.take(buffers.nibble_pairs, data, out=pairs, mode="clip")
        else:
            pairs[:, : count // 2] = np.take(buffers.nibble_pairs, data)
        is_mx = q.format is Format.MXFP4
        block = MX_BLOCK if is_mx else NV_BLOCK
        scale = buffers.scales(q.scale[:, start // block : -(-stop // block)], is_mx)
    out.view(rows, -1, block)[:, : scale.shape[1]].mul_(scale.unsqueeze(-1))
    if q.format is Format.NVFP4:
        out.mul_(q.global_scale)
    return out


def _e4m3_values(codes: Tensor, out: Tensor, buffers: Buffers) -> None:
    """E4M3's bits, moved to where a half keeps its own, are the value / 256, subnormals too; NaN is not."""
    half = buffers.get("half", tuple(codes.shape), torch.int16)
    half.copy_(codes.view(torch.int8))
    half.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(half.view(torch.float16)).mul_(256.0)
    nan = (codes.numpy() & 127) == 127
    if nan.any():
        out[torch.from_numpy(nan)] = math.nan


def largest(x: Tensor) -> float:
    """The largest magnitude; NaN and infinity show as themselves."""
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


def nvfp4_global_scale(amax: float) -> float:
    """The rule's global scale in float32; never 0, which could not be divided by."""
    if amax == 0:
        return 1.0
    return max(float(np.float32(amax / NV_RANGE)), float(np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class Encoded:
    """One encoded slice: what is stored (views of buffers, padding included) and what it decodes to."""

    data: Tensor
    scale: Tensor | None
    magnitudes: Tensor  # |decoded values|, float32; signs are the source's


def encode_slice(
    x: Tensor,
    format: Format,
    buffers: Buffers,
    global_scale: float = 1.0,
    search: bool = False,
    scale: Tensor | None = None,
) -> Encoded:
    """A slice from decode_slice in another format. `scale`: NVFP4 block-scale codes already settled."""
    magnitudes = torch.abs(x, out=buffers.get("magnitudes", tuple(x.shape), torch.float32))
    if format is Format.BF16:
        data = buffers.get("bf16", tuple(x.shape), torch.bfloat16).copy_(x)
        decoded = buffers.get("decoded", tuple(x.shape), torch.float32).copy_(data).abs_()
        return Encoded(data, None, decoded)
    if format is Format.FP8:
        return _encode_fp8(x, magnitudes, buffers)
    block = NV_BLOCK if format is Format.NVFP4 else MX_BLOCK
    if format is Format.NVFP4:
        g = torch.tensor(global_scale, dtype=torch.float32)
        if scale is None:
            amax = _block_max(magnitudes, NV_BLOCK)
            scale = e4m3_encode((amax / (E2M1_MAX * g)).clamp_(2.0**-9, E4M3_MAX))
            if search:
                scale = _search(magnitudes, scale, NV_BLOCK, global_scale, buffers)
        codes, decoded = _e2m1(magnitudes, buffers.scales(scale, False), NV_BLOCK, global_scale, buffers)
    else:
        assert format is Format.MXFP4
        amax = _block_max(magnitudes, MX_BLOCK).clamp_(min=FP4_FLOOR)
        scale = p2ceil_code(amax * (1 / E2M1_MAX))
        if search:
            scale = _search(magnitudes, scale, MX_BLOCK, 1.0, buffers)
        codes, decoded = _e2m1(magnitudes, buffers.scales(scale, True), MX_BLOCK, 1.0, buffers)
    return Encoded(_pack(x, codes, buffers), scale.view(x.shape[0], x.shape[1] // block), decoded)


def _block_max(magnitudes: Tensor, block: int) -> Tensor:
    """[..] -> one maximum per block. Bits of non-negative floats are ordered, and integers reduce faster."""
    return magnitudes.view(torch.int32).view(-1, block).amax(-1).view(torch.float32)


def _e2m1(
    magnitudes: Tensor, scale: Tensor, block: int, global_scale: float, buffers: Buffers
) -> tuple[Any, Tensor]:
    """-> codes without sign (numpy, uint8) and decoded magnitudes, both in the slice's shape."""
    shape = tuple(magnitudes.shape)
    column = scale.view(-1, 1)
    ratio = buffers.get("ratio", shape, torch.float32)
    torch.div(magnitudes.view(-1, block), column * global_scale, out=ratio.view(-1, block))
    codes = buffers.get("codes", shape, torch.uint8).zero_().numpy()
    above = buffers.get("above", shape, torch.bool).numpy()
    for compare, midpoint in _MIDPOINTS:
        compare(ratio.numpy(), np.float32(midpoint), out=above)
        np.add(codes, above.view(np.uint8), out=codes)
    # Twice the value, in bytes: the code, plus 1 for each step above 4 (3 and 4 lie 1 apart), plus 2 above 6.
    doubled = buffers.get("doubled", shape, torch.uint8).numpy()
    more = above.view(np.uint8)
    np.maximum(codes, 4, out=doubled)
    np.maximum(codes, 6, out=more)
    np.add(doubled, more, out=doubled)
    np.add(doubled, more, out=doubled)
    np.add(doubled, codes, out=doubled)
    np.subtract(doubled, 16, out=doubled)
    decoded = buffers.get("decoded", shape, torch.float32).copy_(torch.from_numpy(doubled))
    # In the decoder's order: code times block scale is exact, the global scale brings the only rounding.
    decoded.view(-1, block).mul_(column * 0.5)
    if global_scale != 1.0:
        decoded.mul_(global_scale)
    return codes, decoded


def _pack(x: Tensor, codes: Any, buffers: Buffers) -> Tensor:
    """Signs added, two codes to a byte, the even column low: [rows, width] -> [rows, width / 2]."""
    sign = buffers.get("above", tuple(x.shape), torch.bool).numpy()
    np.less(x.view(torch.int32).numpy(), 0, out=sign)
    signs = sign.view(np.uint8)
    np.left_shift(signs, 3, out=signs)
    np.bitwise_or(codes, signs, out=codes)
    pairs = codes.view(np.uint16)
    joined = buffers.get("joined", tuple(pairs.shape), torch.int16).numpy().view(np.uint16)
    np.right_shift(pairs, 4, out=joined)
    np.bitwise_or(joined, pairs, out=joined)
    packed = buffers.get("packed", tuple(pairs.shape), torch.uint8)
    np.copyto(packed.numpy(), joined, casting="unsafe")
    return packed


def _search(magnitudes: Tensor, scale: Tensor, block: int, global_scale: float, buffers: Buffers) -> Tensor:
    """Among neighbours of the rule's scale codes, those of least squared error; a tie keeps the rule's."""
    is_nv = block == NV_BLOCK
    lowest, highest = (1, 126) if is_nv else (0, 254)
    ones = torch.ones(block)

    def errors(codes: Tensor) -> Tensor:
        _, decoded = _e2m1(magnitudes, buffers.scales(codes, not is_nv), block, global_scale, buffers)
        difference = decoded.sub_(magnitudes)
        return difference.mul_(difference).view(-1, block) @ ones

    base, best = scale.to(torch.int16), scale.clone()
    least = errors(scale)
    for step in NV_SEARCH if is_nv else MX_SEARCH:
        tried = (base + step).clamp_(lowest, highest).to(torch.uint8)
        error = errors(tried)
        better = error < least
        best = torch.where(better, tried, best)
        least = torch.where(better, error, least)
    return best


def _encode_fp8(x: Tensor, magnitudes: Tensor, buffers: Buffers) -> Encoded:
    rows, width = x.shape
    amax = _block_max(magnitudes, FP8_TILE).view(rows, -1).amax(0).clamp_(min=FP8_FLOOR)
    scale = p2ceil_code(amax * (1 / E4M3_MAX))
    step = buffers.scales(scale, True).view(1, -1, 1)
    ratio = buffers.get("ratio", (rows, width), torch.float32)
    torch.div(x.view(rows, -1, FP8_TILE), step, out=ratio.view(rows, -1, FP8_TILE))
    codes = buffers.get("fp8", (rows, width), torch.float8_e4m3fn)
    codes.copy_(ratio.clamp_(-E4M3_MAX, E4M3_MAX))
    data = codes.view(torch.uint8)
    decoded = buffers.get("decoded", (rows, width), torch.float32)
    _e4m3_values(data, decoded, buffers)
    decoded.abs_().view(rows, -1, FP8_TILE).mul_(step)
    return Encoded(data, scale.view(1, -1), decoded)


def tally(x: Tensor, encoded: Encoded, num_values: int, buffers: Buffers) -> Tally:
    """Compare a slice with what it became; overwrites the encoded magnitudes."""
    magnitudes = buffers.get("magnitudes", tuple(x.shape), torch.float32).flatten()
    decoded = encoded.magnitudes.flatten()
    out = Tally(values=num_values)
    out.xx, out.yy, out.ee = _sums(magnitudes, decoded)
    different = buffers.get("above", tuple(decoded.shape), torch.bool).numpy()
    np.not_equal(magnitudes.numpy(), decoded.numpy(), out=different)
    out.inexact = int(np.count_nonzero(different))
    return out


def _sums(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    xx, yy = float(torch.dot(x, x)), float(torch.dot(y, y))
    if not (1e-20 < xx < 1e30 and yy < 1e30) and x.dtype == torch.float32:
        # Squares that float32 cannot hold.
        return _sums(x.double(), y.double())
    difference = x - y
    return xx, yy, float(torch.dot(difference, difference))
