"""Decode step: hyper-connections, two launches per site. Replaces ops.mhc.cpu and the norm after it.

`mix_open` (decode_open.cu) puts the last output back into the streams, `embed_open` begins them with the
step's tokens; both multiply them with `fn`, a few channels per block. `mix_close` (decode_mix.cu) adds the
parts up and makes the next input. Four streams, as in every V4 model. With `peers`, opening
is also an all-reduce.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.pdl import launcher
from dsv4.gpu.shapes import HOW
from dsv4.gpu.shapes import MIX_CHUNK as CHUNK
from dsv4.gpu.shapes import MIX_WIDTH as WIDTH
from dsv4.gpu.shapes import mix_chunks as num_chunks
from dsv4.gpu.structs import mirror
from dsv4.ops.exchange.decode import Peers, multiprocessors, passed, tag
from dsv4.ops.mhc import meaning

STREAMS = 4
ITEM, MAX_CHANNELS = 8, 8192  # of a stream: a thread of decode_mix.cu takes up to two items
THREADS = STREAMS * CHUNK  # of a block of decode_open.cu
BLOCKS, SHARED_BLOCKS = 6, 4  # of decode_open.cu, alone and with peers, that a multiprocessor surely holds

_Open = mirror("mhc/decode_open.cu", "Open")


def _open(
    kernel: str,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    peers: Peers | None,
    number: int,
    overlap: bool,
    **inputs: Any,
) -> None:
    """`inputs`: those fields of _Open that are the output's, or the tokens'."""
    rows, n, d = streams.shape
    chunks, mixes, device = num_chunks(d), fn.shape[0], streams.device
    assert n == STREAMS and mixes in (n, n * (n + 2)) and fn.shape[1] == n * d, (streams.shape, fn.shape)
    assert partial.shape == (rows, chunks, WIDTH), partial.shape
    assert streams.is_contiguous() and fn.is_contiguous() and partial.is_contiguous()
    assert streams.numel() < 2**31, "offsets are 32 bits"
    assert peers is None or (rows <= peers.rows and d == peers.hidden), (streams.shape, peers)
    # Each keeps its part of fn for all its rows. With peers all blocks are resident at once: a block that
    # waits may keep none from starting.
    most = multiprocessors(device) * (BLOCKS if peers is None else SHARED_BLOCKS) // chunks
    assert most or peers is None, f"{chunks} chunks of {d} channels"
    in_turn = -(-rows // max(most, 1))
    programs = -(-rows // in_turn)
    params = _Open(
        peers=passed(peers),
        streams=streams,
        fn=fn,
        partial=partial,
        first_place=0 if peers is None else peers.first_place(number),
        rows=rows,
        programs=programs,
        chunks=chunks,
        d=d,
        mixes=mixes,
        tag=tag(number, rows),
        **inputs,
    )
    call(
        "mhc/decode_open", kernel, device, params, blocks=chunks * programs, threads=THREADS, overlap=overlap
    )


def _type(dtype: torch.dtype) -> str:
    return "float" if dtype == torch.float32 else "__nv_bfloat16"


def _truth(value: bool) -> str:
    return "true" if value else "false"


@launcher(
    reads=("y", "chosen", "gate", "comb", "streams", "peers.inbox"),
    reads_early=("fn",),
    writes=("streams", "partial", "peers.inbox"),
    means=meaning.mix_open,
)
def mix_open(
    y: Tensor,
    gate: Tensor,
    comb: Tensor,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    chosen: Tensor | None = None,
    own: range = range(0),
    peers: Peers | None = None,
    number: int = 0,
    overlap: bool = True,
) -> None:
    """streams [T, N, D] <- mhc.post(sum over P of y, streams, gate, comb); partial <- products with fn.

    y [T, P, D], float32 or as the streams; gate [T, N], comb [T, N, N], fn [M, N*D] float32, partial
    [T, num_chunks(D), WIDTH] float32: columns 0 .. M are written. With `peers` y is this rank's share, in
    float32; all ranks' are added up. `number`: of the exchange, in its step. `chosen` int32 [T, P - 1]: the
    experts whose outputs y holds, before something that always counts; what experts made that are not among
    this rank's `own` is left out.
    """
    rows, n, d = streams.shape
    assert y.shape[::2] == (rows, d) and y.is_contiguous() and y.shape[1], y.shape
    assert y.numel() < 2**31, "offsets are 32 bits"
    is_wide = y.dtype == torch.float32
    assert is_wide or (y.dtype == streams.dtype and peers is None and chosen is None), y.dtype
    assert gate.shape == (rows, n) and comb.shape == (rows, n, n), (gate.shape, comb.shape)
    # They are read 16 bytes at a time.
    assert all(t.is_contiguous() and t.storage_offset() % 4 == 0 for t in (gate, comb))
    if chosen is not None:
        assert chosen.dtype == torch.int32 and chosen.is_contiguous() and len(own), own
        assert chosen.shape == (rows, y.shape[1] - 1), (chosen.shape, y.shape)
    if rows:
        _open(
            kernel=f"open_kernel<{_type(streams.dtype)}, {_truth(is_wide)}, {_truth(peers is not None)}>",
            streams=streams,
            fn=fn,
            partial=partial,
            peers=peers,
            number=number,
            overlap=overlap,
            y=y,
            gate=gate,
            comb=comb,
            parts=y.shape[1],
            chosen=chosen,
            first_own=own.start,
            own=len(own),
            ids=None,
            table=None,
            vocab=0,
            is_wide=False,
        )


@launcher(
    reads=("ids", "table", "peers.inbox"),
    reads_early=("fn",),
    writes=("streams", "partial", "peers.inbox"),
    triggers_late=True,
    means=meaning.embed_open,
)
def embed_open(
    ids: Tensor,
    table: Tensor,
    streams: Tensor,
    fn: Tensor,
    partial: Tensor,
    peers: Peers | None = None,
    number: int = 0,
    overlap: bool = True,
) -> None:
    """ids [T] int64, table [V, D] -> streams [T, N, D]: every stream is the token's row; then as mix_open.

    With `peers`, table [V / ranks, D]: each rank has its rows.
    """
    rows, _, d = streams.shape
    assert ids.shape == (rows,) and ids.is_contiguous() and table.shape[1] == d, (table.shape, ids.shape)
    assert peers is None or table.shape[0] == peers.vocab, (table.shape, peers)
    assert table.dtype in (torch.float32, torch.bfloat16) and table.is_contiguous(), table.dtype
    if rows:
        _open(
            kernel=f"embed_kernel<{_type(streams.dtype)}, {_truth(peers is not None)}>",
            streams=streams,
            fn=fn,
            partial=partial,
            peers=peers,
            number=number,
            overlap=overlap,
            ids=ids,
            table=table,
            vocab=table.shape[0],
            is_wide=table.dtype == torch.float32,
            y=None,
            chosen=None,
            gate=None,
            comb=None,
            parts=0,
            first_own=0,
            own=0,
        )


_Closing = mirror("mhc/decode_mix.cu", "Closing")


@launcher(
    reads=("partial", "streams"),
    reads_early=("base", "scale", "weight"),
    writes=("x", "x_in", "gate", "comb", "mixed", "mean"),
    means=meaning.mix_close,
)
def mix_close(
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    streams: Tensor,
    weight: Tensor,
    x: Tensor,
    gate: Tensor | None,
    comb: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    x_in: Tensor | None = None,
    activations: str = "a16",
    mixed: Tensor | None = None,
    mean: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """What mix_open left in `partial` -> x [T, D] (mhc.pre, then rms_norm), gate [T, N], comb [T, N, N].

    x_in [T, D]: x as quantised products see it, round_input(x, activations); None with a16.
    base, scale [M] (scale repeated for each mix), weight [D], all float32. gate and comb None: mhc.head.
    comb is what Sinkhorn's rounds start from; a product's launch does them (matvec.Mixing).
    mixed [T, D]: x before its norm. mean [T, D], maybe columns of a wider matrix: the streams' average.
    """
    rows, n, d = streams.shape
    chunks = num_chunks(d)
    mixes = n if gate is None else 2 * n + n * n
    assert n == STREAMS and base.shape == scale.shape == (mixes,), (streams.shape, base.shape, scale.shape)
    assert (gate is None) == (comb is None) and partial.shape == (rows, chunks, WIDTH), partial.shape
    assert d % ITEM == 0 and d <= MAX_CHANNELS, f"{d} channels"
    assert (x_in is None) == (activations == "a16"), activations
    for each in (mixed, mean):
        assert each is None or (each.shape == (rows, d) and each.dtype == x.dtype and each.stride(1) == 1)
        # They are written 16 bytes at a time.
        assert each is None or each.stride(0) % ITEM == int(each.storage_offset()) % ITEM == 0, each.stride()
    assert mixed is None or mixed.is_contiguous()
    if rows:
        closing = _Closing(
            partial=partial,
            base=base,
            scale=scale,
            streams=streams,
            weight=weight,
            x=x,
            x_in=x_in,
            mixed=mixed,
            mean=mean,
            gate=gate,
            comb=comb,
            rows=rows,
            d=d,
            chunks=chunks,
            how=HOW[activations],
            mean_stride=0 if mean is None else mean.stride(0),
            norm_eps=norm_eps,
            hc_eps=hc_eps,
        )
        call(
            "mhc/decode_mix",
            f"close_kernel<{_type(x.dtype)}>",
            x.device,
            closing,
            blocks=rows if gate is None else 2 * rows,
            threads=512,
            overlap=overlap,
        )
