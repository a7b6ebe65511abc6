"""Decode step: launches decode.cu, the next token of every row (ops/sample/cpu.py). Ends prompts too."""

import torch
from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.pdl import launcher
from dsv4.gpu.structs import mirror
from dsv4.ops.sample import meaning

WIDTH, RESULT, MAX_VOCAB = 8, 44, 1 << 18
CLUSTER, THREADS = 8, 512  # blocks of a row, threads of a block
MOST_HELD, BLOCK_BYTES = 18500, 25616  # logits in a block's shared memory, and what lies beside them
MAX_PENALISED = CLUSTER * (MOST_HELD // 32 * 32)  # a vocabulary that shared memory holds

_Sampling = mirror("sample/decode.cu", "Sampling")


@launcher(
    reads=("logits", "settings", "mask", "next_ids", "positions", "slots", "penalties"),
    writes=("out", "settings", "next_ids", "positions", "latest", "penalties"),
    means=meaning.sample,
)
def sample(
    logits: Tensor,
    settings: Tensor,
    mask: Tensor | None,
    out: Tensor,
    next_ids: Tensor | None = None,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    latest: Tensor | None = None,
    penalties: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """logits [T, V] float32, settings [T, 8] int64, mask [T, ceil(V / 32)] int32, penalties [S, HISTORY + C]
    int32 -> out int32 [T, 44].

    With positions [T] int64, rows below 0 are padding and nothing of theirs is written; the others move on by
    one position, and so does the index in their settings. next_ids [T] int64 get the ids, -1 where there is
    none, and so does `latest` [S] int64 at the rows' `slots` [T] int64. What they held before, the rows'
    inputs, is the last token of their histories, and is noted there.
    """
    rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB, vocab
    shapes: list[tuple[Tensor, tuple[int, ...], torch.dtype]]
    shapes = [(logits, (rows, vocab), torch.float32), (settings, (rows, WIDTH), torch.int64)]
    shapes += [(out, (rows, RESULT), torch.int32)]
    shapes += [(mask, (rows, -(-vocab // 32)), torch.int32)] if mask is not None else []
    shapes += [(each, (rows,), torch.int64) for each in (next_ids, positions, slots) if each is not None]
    for tensor, shape, dtype in shapes:
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous(), (
            tensor.shape,
            shape,
        )
        assert tensor.device == logits.device, tensor.device
    assert penalties is None or (penalties.dtype == torch.int32 and penalties.is_contiguous())
    assert penalties is None or vocab <= MAX_PENALISED, vocab
    if not rows:
        return
    part = -(-vocab // (32 * CLUSTER)) * 32  # logits of a block
    held = min(part, MOST_HELD)
    params = _Sampling(
        logits=logits,
        vocab=vocab,
        settings=settings,
        mask=mask,
        out=out,
        next_ids=next_ids,
        positions=positions,
        slots=slots,
        latest=latest,
        penalties=penalties,
        penalty_width=0 if penalties is None else penalties.shape[1],
        slice=part,
        held=held,
    )
    call(
        "sample/decode",
        f"sample_kernel<{CLUSTER}, {THREADS}>",
        logits.device,
        params,
        blocks=rows * CLUSTER,
        threads=THREADS,
        shared=BLOCK_BYTES + 4 * held,
        cluster=CLUSTER,
        overlap=overlap,
    )
