"""Encode and decode every number format in plain torch: what each format means, bit for bit. No speed."""

from functools import cache

import torch
from torch import Tensor

from dsv4.quant.formats import FP8_TILE, KV_BLOCK, MX_BLOCK, NV_BLOCK, Format, QuantTensor, scale_bytes

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NV_RANGE = E2M1_MAX * E4M3_MAX
F32_MAX = torch.finfo(torch.float32).max
# Floors of the reference's block maxima: a block of zeros still gets a scale.
FP8_FLOOR = 1e-4
FP4_FLOOR = 6.0 * 2.0**-126

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The largest float32 that rounds down to each code: the midpoint above it, or, where the tie goes up to an
# even code, the float32 before that midpoint.
_E2M1_LAST = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


def e2m1_encode(x: Tensor) -> Tensor:
    """float -> 4-bit codes in uint8; nearest, ties to even, saturating at 6."""
    code = torch.bucketize(x.abs(), _table(_E2M1_LAST, x.device)).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(code: Tensor) -> Tensor:
    return _look_up(_table((*_E2M1, *(-v for v in _E2M1)), code.device), code)


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _look_up(table: Tensor, code: Tensor) -> Tensor:
    """table[code] for a table of one dimension; index_select is the fastest of torch's ways to say it."""
    return table.index_select(0, code.flatten().int()).view(code.shape)


def pack_nibbles(code: Tensor) -> Tensor:
    """[..., K] codes -> [..., K/2] bytes: even k in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def e4m3_encode(x: Tensor) -> Tensor:
    """float -> E4M3 bytes; nearest even, clamped to +-448 first: a plain cast may give NaN above it."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(code: Tensor) -> Tensor:
    return _look_up(_e4m3_table(code.device), code)


@cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def e8m0_decode(code: Tensor) -> Tensor:
    """uint8 -> 2^(code-127); 255 is NaN; 0 is the subnormal 2^-127."""
    return code.view(torch.float8_e8m0fnu).float()


def p2ceil_code(v: Tensor) -> Tensor:
    """E8M0 code of the smallest power of two >= v, for normal float32 v > 0; NaN gives NaN's code, 255.

    On bits, because a floating-point log2 can be off by one at the powers of two.
    """
    bits = v.float().clamp(max=2.0**127).view(torch.int32)
    # A shift rounds down, so the shift of the negative rounds the exponent up unless the mantissa is 0.
    return (-(-bits >> 23)).clamp(max=255).to(torch.uint8)


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., K] -> [..., ceil(K/size), size], padded with zeros."""
    pad = -x.shape[-1] % size
    if pad:
        x = torch.nn.functional.pad(x, (0, pad))
    return x.unflatten(-1, (-1, size))


def _finite(x: Tensor) -> Tensor:
    """Infinity becomes the largest float, so that a scale stays a number; NaN stays, and its block is NaN."""
    return x.clamp(-F32_MAX, F32_MAX)


def fp8_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[..., K] -> E4M3 codes [..., K] and E8M0 codes [..., ceil(K/block)], one scale per block of a row."""
    blocks = _blocks(_finite(x.float()), block)
    amax = blocks.abs().amax(-1).clamp(min=FP8_FLOOR)
    scale = p2ceil_code(amax * (1 / E4M3_MAX))
    codes = e4m3_encode(blocks / e8m0_decode(scale).unsqueeze(-1))
    return codes.flatten(-2)[..., : x.shape[-1]], scale


def fp8_round(x: Tensor, block: int) -> Tensor:
    """Quantise and dequantise in blocks along the last dimension; keeps the dtype (FP8 values fit BF16)."""
    codes, scale = fp8_rows(x, block)
    values = _blocks(e4m3_decode(codes), block) * e8m0_decode(scale).unsqueeze(-1)
    return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def mxfp4_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> E2M1 codes [..., K] and E8M0 codes [..., ceil(K/32)] by the reference's ceil rule."""
    blocks = _blocks(_finite(x.float()), MX_BLOCK)
    amax = blocks.abs().amax(-1).clamp(min=FP4_FLOOR)
    scale = p2ceil_code(amax * (1 / E2M1_MAX))
    codes = e2m1_encode(blocks / e8m0_decode(scale).unsqueeze(-1))
    return codes.flatten(-2)[..., : x.shape[-1]], scale


def mxfp4_round(x: Tensor) -> Tensor:
    codes, scale = mxfp4_rows(x)
    values = _blocks(e2m1_decode(codes), MX_BLOCK) * e8m0_decode(scale).unsqueeze(-1)
    return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def nvfp4_rows(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> E2M1 codes and E4M3 block-scale codes, given the global scale (a scalar or one per row)."""
    blocks = _blocks(_finite(x.float()), NV_BLOCK)
    scale_in = blocks.abs().amax(-1) / (E2M1_MAX * global_scale)
    scale = e4m3_encode(scale_in.clamp(2.0**-9, E4M3_MAX))
    step = e4m3_decode(scale) * global_scale
    codes = e2m1_encode(blocks / step.unsqueeze(-1))
    return codes.flatten(-2)[..., : x.shape[-1]], scale


def nvfp4_global(x: Tensor) -> Tensor:
    """[..., K] -> [..., 1], each row's amax / (6*448); 1 for zeros, for what that makes zero, and for NaN."""
    largest = _finite(x.float()).abs().amax(-1, keepdim=True)
    share = largest / largest.new_tensor(NV_RANGE)  # a GPU would multiply by a number's reciprocal
    return torch.where(share > 0, share, torch.ones_like(share))


def nvfp4_round(x: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Quantise and dequantise; by default as activations are, each row with a global scale of its own."""
    global_scale = nvfp4_global(x) if global_scale is None else global_scale
    codes, scale = nvfp4_rows(x, global_scale)
    values = _blocks(e2m1_decode(codes), NV_BLOCK) * (e4m3_decode(scale) * global_scale).unsqueeze(-1)
    return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def encode_weight(w: Tensor, format: Format, global_scale: float | None = None) -> QuantTensor:
    """[N, K] float -> QuantTensor by spec rules. FP8 scales are powers of two."""
    shape = (w.shape[0], w.shape[1])
    if format is Format.F32:
        return QuantTensor(format, w.float(), shape)
    if format is Format.BF16:
        return QuantTensor(format, w.to(torch.bfloat16), shape)
    if format is Format.FP8:
        tiles = _tiles(_finite(w.float()))
        amax = tiles.abs().amax((1, 3)).clamp(min=FP8_FLOOR)
        scale = p2ceil_code(amax * torch.tensor(1 / E4M3_MAX, dtype=torch.float32, device=w.device))
        codes = e4m3_encode(tiles / e8m0_decode(scale)[:, None, :, None])
        return QuantTensor(format, codes.flatten(2).flatten(0, 1)[: shape[0], : shape[1]], shape, scale)
    if format is Format.MXFP4:
        codes, scale = mxfp4_rows(w)
        return QuantTensor(format, pack_nibbles(codes), shape, scale)
    if format is Format.NVFP4:
        if global_scale is None:
            largest = float(_finite(w.float()).abs().max())
            global_scale = largest / NV_RANGE if largest > 0 else 1.0
        g = torch.tensor(global_scale, dtype=torch.float32, device=w.device)
        codes, scale = nvfp4_rows(w, g)
        return QuantTensor(format, pack_nibbles(codes), shape, scale, float(g))
    raise AssertionError(format)


def encode_kv(x: Tensor, rope_dim: int, format: Format) -> QuantTensor:
    """[T, D] cache rows -> stored rows. KV8 keeps the last `rope_dim` columns in x's own dtype."""
    shape = (x.shape[0], x.shape[1])
    if format is Format.KV8:
        nope = x.shape[1] - rope_dim
        codes, scale = fp8_rows(x[:, :nope], KV_BLOCK)
        scale = torch.nn.functional.pad(scale, (0, scale_bytes(nope) - scale.shape[1]))
        data = torch.cat((codes, x[:, nope:].contiguous().view(torch.uint8)), dim=1)
        return QuantTensor(format, data, shape, scale, rope_dim=rope_dim)
    if format is Format.MXFP4:
        codes, scale = mxfp4_rows(x)
        return QuantTensor(format, pack_nibbles(codes), shape, scale)
    return QuantTensor(format, x.to({Format.BF16: torch.bfloat16, Format.F32: torch.float32}[format]), shape)


def decode(q: QuantTensor) -> Tensor:
    """The float32 values of any QuantTensor, [rows, cols]."""
    rows, cols = q.shape
    if q.format.is_plain:
        return q.data.float()
    assert q.scale is not None
    if q.format is Format.FP8:
        scale = e8m0_decode(q.scale) if q.scale.dtype == torch.uint8 else q.scale.float()
        tiles = _tiles(e4m3_decode(q.data)) * scale[:, None, :, None]
        return tiles.flatten(2).flatten(0, 1)[:rows, :cols]
    if q.format is Format.KV8:
        nope = cols - q.rope_dim
        values = _blocks(e4m3_decode(q.data[:, :nope]), KV_BLOCK)
        values = values * e8m0_decode(q.scale[:, : values.shape[1]]).unsqueeze(-1)
        dtype = torch.bfloat16 if q.data.shape[1] - nope == 2 * q.rope_dim else torch.float32
        rope = q.data[:, nope:].contiguous().view(dtype).float()
        return torch.cat((values.flatten(-2)[:, :nope], rope), dim=1)
    # Code times block scale is exact in float32, so NVFP4's global scale brings the only rounding.
    mx = q.format is Format.MXFP4
    scale = e8m0_decode(q.scale) if mx else e4m3_decode(q.scale)
    values = _blocks(_nibble_values(q.data), MX_BLOCK if mx else NV_BLOCK).mul_(scale.unsqueeze(-1))
    if not mx:
        values.mul_(q.global_scale)
    return values.flatten(-2)[:, :cols]


def _nibble_values(data: Tensor) -> Tensor:
    """[..., K/2] packed bytes -> [..., K] float32; one look-up per byte instead of one per code."""
    return _look_up(_pair_table(data.device), data).view(torch.float32)


@cache
def _pair_table(device: torch.device) -> Tensor:
    """Both values of a byte, as one 64-bit number: twice as fast to look up as a row of two."""
    codes = unpack_nibbles(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1))
    return e2m1_decode(codes).view(torch.int64).squeeze(1)


def _tiles(w: Tensor) -> Tensor:
    """[N, K] -> [ceil(N/128), 128, ceil(K/128), 128], padded with zeros."""
    pad_rows, pad_cols = -w.shape[0] % FP8_TILE, -w.shape[1] % FP8_TILE
    if pad_rows or pad_cols:
        w = torch.nn.functional.pad(w, (0, pad_cols, 0, pad_rows))
    return w.unflatten(1, (-1, FP8_TILE)).unflatten(0, (-1, FP8_TILE))


def has_nan_scale(q: QuantTensor) -> bool:
    """Whether any scale of the tensor is NaN or infinite: such a tensor cannot mean anything."""
    if q.scale is None:
        return False
    return bool(bad_scales(q.scale, q.format).any()) or not abs(q.global_scale) <= F32_MAX


def bad_scales(scale: Tensor, format: Format) -> Tensor:
    """Which of them are NaN or infinite."""
    if scale.dtype != torch.uint8:
        return ~torch.isfinite(scale)
    return (scale & 127) == 127 if format is Format.NVFP4 else scale == 255
