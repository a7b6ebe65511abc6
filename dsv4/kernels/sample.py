"""Launches sample.cu: every row's next token and its log-probabilities, as ops/sample/ref.py has them."""

import torch
from torch import Tensor

from dsv4.kernels.build import call, pointer

WIDTH, RESULT, MAX_VOCAB = 8, 44, 1 << 18


def sample(
    logits: Tensor,
    settings: Tensor,
    mask: Tensor | None,
    out: Tensor,
    next_ids: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    """logits [T, V] float32, settings [T, 8] int64, mask [T, ceil(V / 32)] int32 or None; out [T, 44] int32.

    With positions [T] int64, rows below 0 are padding and nothing of theirs is written; the others move on by
    one position, and so does the index in their settings. next_ids [T] int64 get the ids, -1 where there is
    none.
    """
    rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB, vocab
    shapes: list[tuple[Tensor, tuple[int, ...], torch.dtype]]
    shapes = [(logits, (rows, vocab), torch.float32), (settings, (rows, WIDTH), torch.int64)]
    shapes += [(out, (rows, RESULT), torch.int32)]
    shapes += [(mask, (rows, -(-vocab // 32)), torch.int32)] if mask is not None else []
    shapes += [(each, (rows,), torch.int64) for each in (next_ids, positions) if each is not None]
    for tensor, shape, dtype in shapes:
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous(), (
            tensor.shape,
            shape,
        )
        assert tensor.device == logits.device, tensor.device
    if not rows:
        return
    call(
        *("sample", "sample", logits.device),
        *(pointer(logits), rows, vocab, pointer(settings), pointer(mask), pointer(out)),
        *(pointer(next_ids), pointer(positions)),
    )
