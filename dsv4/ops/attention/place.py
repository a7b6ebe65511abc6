"""Prompts: rows of a step to their places in the cache, -1 being none; a store of two tensors at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(store, fresh, row, token, width, B: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, width, B):
        col = start + tl.arange(0, B)
        value = tl.load(fresh + token * width + col, mask=col < width)
        tl.store(store + row * width + col, value, mask=col < width)


@triton.jit(do_not_specialize=["has_tokens"], do_not_specialize_on_alignment=["rows", "tokens"])
def _place_kernel(rows, tokens, has_tokens, store, fresh, width, other, other_fresh, other_width,  # type: ignore[no-untyped-def]
                  HAS_OTHER: tl.constexpr, B: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if row >= 0:
        token = place
        if has_tokens:
            token = tl.load(tokens + place)
        _copy(store, fresh, row, token, width, B)
        if HAS_OTHER:
            _copy(other, other_fresh, row, token, other_width, B)


def place(
    store: Tensor,
    fresh: Tensor,
    other: Tensor | None,
    other_fresh: Tensor | None,
    rows: Tensor,
    tokens: Tensor | None,
) -> None:
    """store[rows[i]] = fresh[tokens[i]], or fresh[i] where tokens is None; and the same in `other`."""
    if not rows.shape[0]:
        return
    into, of, width = _words(store, fresh)
    others = (into, of, 0) if other is None or other_fresh is None else _words(other, other_fresh)
    assert rows.dtype == torch.long and (tokens is None or tokens.dtype == torch.long)
    _place_kernel[(rows.shape[0],)](
        *(rows, rows if tokens is None else tokens, int(tokens is not None), into, of, width, *others),
        **{"HAS_OTHER": other is not None, "B": 256, "num_warps": 4},
    )


def _words(store: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, int]:
    """Both as rows of 32-bit words, or of bytes where these do not fit, and how many a row has."""
    assert store.is_contiguous() and fresh.is_contiguous() and store.dtype == fresh.dtype
    store, fresh = store.flatten(0, -2), fresh.flatten(0, -2)
    assert store.shape[1] == fresh.shape[1], (store.shape, fresh.shape)
    kind = torch.int32 if store.shape[1] * store.element_size() % 4 == 0 else torch.uint8
    return store.view(kind), fresh.view(kind), store.shape[1] * store.element_size() // kind.itemsize
