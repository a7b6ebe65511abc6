"""Prompts: hyper-connections, two launches a site (prefill_sm90.cu). What a block made goes back to the
streams in the launch that multiplies them for the next; the other makes its input, normalised, as products
read it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.gpu.build import HOPPER, architecture, call
from dsv4.gpu.structs import mirror
from dsv4.ops.linear.prefill_packed import FP8_CODES, IN_16_BITS, Codes, Mode, Packed, empty_packed
from dsv4.quant.formats import Format

# Numbers of prefill_sm90.cu.
STREAMS, MIXES, WIDTH, PART, WARPS, ROWS, OPEN_BYTES = 4, 24, 32, 256, 8, 16, 157696
SLICE, MAX_CHANNELS = 512, 8192
IN_BF16 = IN_16_BITS[Format.BF16]
MADE = (FP8_CODES, IN_BF16)  # modes that `close_site` packs

_Opening = mirror("mhc/prefill_sm90.cu", "Opening")

_Closing = mirror("mhc/prefill_sm90.cu", "Closing")


@dataclass(frozen=True)
class Closed:
    """What `close` made of the streams: the input before its norm, if wanted, and after, in several forms."""

    x: Tensor | None
    normed: Tensor | None  # as it is: where BF16 is not packed, or somebody wants it so
    packed: dict[Mode, Packed]
    codes: Codes | None  # FP8, row by row
    gate: Tensor
    comb: Tensor


def serves(streams: Tensor, fn: Tensor) -> bool:
    """BF16 on a Hopper, whose products take packed rows, in the sizes of published models."""
    _, n, d = streams.shape
    fits = n == STREAMS and fn.shape[1] == MIXES and d % SLICE == 0 and d <= MAX_CHANNELS
    is_ours = streams.dtype == torch.bfloat16 and streams.is_cuda
    return fits and is_ours and architecture(streams.device) == HOPPER


def open_site(
    y: Tensor | None, streams: Tensor, gate: Tensor | None, comb: Tensor | None, fn: Tensor
) -> tuple[Tensor, Tensor]:
    """mhc.post(y, streams, gate, comb), or the streams as they are; their products with fn, by parts of the
    channels: [T, D / PART, WIDTH], the sum of squares behind the mixes."""
    rows, _, d = streams.shape
    parts = d // PART
    partial = torch.empty(rows, parts, WIDTH, device=streams.device)
    out = streams
    if y is not None:
        y = y.contiguous()
        assert gate is not None and comb is not None and y.dtype == streams.dtype
        assert gate.is_contiguous() and comb.is_contiguous() and gate.dtype == comb.dtype == torch.float32
        assert y.data_ptr() % 16 == 0
        out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    assert streams.stride(2) == 1 and all(s % 8 == 0 for s in streams.stride()[:2]) and fn.is_contiguous()
    assert streams.data_ptr() % 16 == 0 and fn.dtype == torch.float32
    multiprocessors = torch.cuda.get_device_properties(streams.device).multi_processor_count
    blocks = max(1, min(multiprocessors // parts, -(-rows // ROWS)))
    opening = _Opening(
        y=y,
        gate=gate,
        comb=comb,
        streams=streams,
        fn=fn,
        out=None if y is None else out,
        partial=partial,
        row=streams.stride(0),
        stream=streams.stride(1),
        rows=rows,
        d=d,
        blocks=blocks,
    )
    call(
        "mhc/prefill_sm90",
        f"open_kernel<{str(y is not None).lower()}>",
        streams.device,
        opening,
        blocks=parts * blocks,
        threads=WARPS * 32,
        shared=OPEN_BYTES,
    )
    return out, partial


def close_site(
    streams: Tensor,
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    modes: set[Mode],
    wants_normed: bool = True,
    wants_codes: bool = False,
    wants_x: bool = False,
) -> Closed:
    """mhc.pre, then rms_norm by `norm`. `modes`: how products read it; FP8 and BF16 are made here."""
    rows, n, d = streams.shape
    parts, device = d // PART, streams.device
    assert (
        base.shape == scale.shape == (MIXES,) and norm.shape == (d,) and partial.shape == (rows, parts, WIDTH)
    )
    assert base.is_contiguous() and scale.is_contiguous() and norm.is_contiguous() and streams.stride(2) == 1
    assert base.dtype == scale.dtype == norm.dtype == torch.float32 and norm.data_ptr() % 16 == 0
    packed = {mode: empty_packed(mode, rows, d, device) for mode in MADE if mode in modes}
    closed = Closed(
        x=streams.new_empty(rows, d) if wants_x else None,
        normed=streams.new_empty(rows, d) if wants_normed or IN_BF16 not in packed else None,
        packed=packed,
        codes=Codes.empty(rows, d, device) if wants_codes and FP8_CODES in modes else None,
        gate=torch.empty(rows, n, device=device),
        comb=torch.empty(rows, n, n, device=device),
    )
    in_8, in_16 = packed.get(FP8_CODES), packed.get(IN_BF16)
    rows_padded = -(-rows // ROWS) * ROWS
    closing = _Closing(
        partial=partial,
        scale=scale,
        base=base,
        streams=streams,
        weight=norm,
        x=closed.x,
        normed=closed.normed,
        in_16=None if in_16 is None else in_16.data,
        in_8=None if in_8 is None else in_8.data,
        codes=None if closed.codes is None else closed.codes.data,
        scales=None if closed.codes is None else closed.codes.scale,
        gate=closed.gate,
        comb=closed.comb,
        row=streams.stride(0),
        stream=streams.stride(1),
        rows=rows,
        rows_padded=rows_padded,
        d=d,
        parts=parts,
        iters=iters,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
    )
    call(
        "mhc/prefill_sm90",
        f"close_kernel<{16 if d <= 16 * PART else 32}>",
        device,
        closing,
        blocks=rows_padded // WARPS,
        threads=WARPS * 32,
        shared=WARPS * d if in_8 is not None else 0,
    )
    return closed
