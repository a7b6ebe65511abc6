"""Decode step: launches decode.cu. Norm and rotation of queries, attention, the sum over its parts and the
rotation back, in one launch. Replaces ops.attention.cpu.attend, for the sizes that V4 has, in BF16.

decode_any.py has the same for other sizes and for float32, in four launches.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.pdl import launcher
from dsv4.gpu.structs import mirror
from dsv4.ops.attention import meaning
from dsv4.quant.formats import Format, QuantTensor

# Numbers of decode.cu.
HEADS, CLUSTER, WIDTH, ROPE, THREADS = 8, 8, 512, 64, 256
# By groups of eight heads that a cluster takes; a product's block fits beside one of the first kind.
SHARED_BYTES = {1: 75400, 2: 100072}
RESIDENT = 32  # clusters, two blocks a multiprocessor; of more, each gathers its keys for two groups of heads

_Attention = mirror("attention/decode.cu", "Attention")


def serves(heads: int, width: int, rope: int, dtype: torch.dtype, ratios: Iterable[int]) -> bool:
    """Whether so many heads of these sizes, over entries of so many tokens, are what the kernel takes."""
    are_powers = heads >= HEADS and all(number & (number - 1) == 0 for number in (heads, *ratios))
    return are_powers and (width, rope) == (WIDTH, ROPE) and dtype == torch.bfloat16


def bits_of(power: int) -> int:
    """Of a power of two."""
    assert power & (power - 1) == 0, f"{power} is no power of two"
    return max(power, 1).bit_length() - 1


@launcher(
    reads=("q", "rows", "entries"),
    reads_early=("ring", "entries", "page_table", "slots", "positions", "ends", "sinks", "cos", "sin"),
    writes=("out",),
    means=meaning.attend,
)
def attend(
    q: Tensor,
    ring: QuantTensor,
    ring_rows: int,
    window: int,
    entries: QuantTensor | None,
    rows: Tensor | None,
    page_table: Tensor | None,
    page_entries: int,
    ratio: int,
    slots: Tensor,
    positions: Tensor,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    out: Tensor,
    ends: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """q [T, H, d], as its product left it -> out [T, H*d], rotated back by the row's position; a sink per
    head [H].

    Keys of a row: the ring's positions max(0, pos-window+1) .. pos, the token's own included; then, of
    `entries`, the pool rows `rows` [T, S] int32 (-1: none), of which no more are read than entries are
    visible at pos, or, with None, all visible ones. With `ends` int64 [T] the ring's positions end there,
    not at pos, and all of `rows` is read.
    """
    tokens, heads, width = q.shape
    assert serves(heads, width, ring.rope_dim, q.dtype, [ratio]), (q.shape, ring.rope_dim, q.dtype, ratio)
    assert q.is_contiguous() and out.is_contiguous() and out.numel() == q.numel() and out.dtype == q.dtype
    for store in (ring, entries) if entries is not None else (ring,):
        assert store.format is Format.KV8 and store.scale is not None and store.rope_dim == ROPE
        assert store.data.shape[1] == WIDTH + ROPE and store.scale.shape[1] == 8, store.data.shape
        assert store.data.is_contiguous() and store.data.data_ptr() % 16 == 0
    assert cos.shape[1] * 2 == sin.shape[1] * 2 == ROPE and cos.is_contiguous() and sin.is_contiguous()
    assert ring_rows >= window and sinks.dtype == cos.dtype == sin.dtype == torch.float32
    assert slots.dtype == positions.dtype == torch.long and slots.is_contiguous()
    assert entries is None or ratio > 0
    assert entries is None or rows is not None or (page_table is not None and page_entries)
    assert rows is None or (rows.is_contiguous() and rows.dtype == torch.int32)
    assert ends is None or (rows is not None and ends.dtype == torch.long and ends.is_contiguous())
    groups = 2 if heads > HEADS and tokens * heads > RESIDENT * HEADS else 1
    given = _Attention(
        q=q,
        ring=ring.data,
        ring_scale=ring.scale,
        entries=None if entries is None else entries.data,
        entries_scale=None if entries is None else entries.scale,
        listed=rows,
        page_table=page_table,
        slots=slots,
        positions=positions,
        ends=ends,
        sinks=sinks,
        cos=cos,
        sin=sin,
        out=out,
        heads=heads,
        window=window,
        ring_rows=ring_rows,
        list_width=0 if rows is None else rows.shape[1],
        pages=0 if page_table is None else page_table.stride(0),
        group_bits=bits_of(heads // (groups * HEADS)),
        ratio_bits=bits_of(ratio),
        page_bits=bits_of(page_entries),
        scale=width**-0.5,
        eps=eps,
    )
    if tokens:
        call(
            "attention/decode",
            f"attention_kernel<{groups}>",
            q.device,
            given,
            blocks=tokens * heads // (groups * HEADS) * CLUSTER,
            threads=THREADS,
            shared=SHARED_BYTES[groups],
            cluster=CLUSTER,
            overlap=overlap,
        )
