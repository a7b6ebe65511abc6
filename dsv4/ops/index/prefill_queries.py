"""Prompts: launches prefill_queries.cu, the index's queries in one pass."""

import torch
from torch import Tensor

from dsv4.gpu.build import call
from dsv4.gpu.structs import mirror

# Numbers of prefill_queries.cu.
WIDTH, ROPE, ROWS, THREADS = 128, 64, 32, 128

_Queries = mirror("index/prefill_queries.cu", "Queries")


def serves(q: Tensor, cos: Tensor) -> bool:
    """BF16 on a GPU, in the sizes of published models."""
    return q.dtype == torch.bfloat16 and q.is_cuda and q.shape[2] == WIDTH and 2 * cos.shape[1] == ROPE


def rotate_round(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rows.rotate_round of q [T, H, d], where `serves`."""
    q, cos, sin = q.contiguous(), cos.contiguous(), sin.contiguous()
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape == (q.shape[0], ROPE // 2)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (q, cos, sin))
    out = torch.empty_like(q)
    rows = q.shape[0] * q.shape[1]
    if rows:
        queries = _Queries(q=q, cos=cos, sin=sin, out=out, rows=rows, heads=q.shape[1])
        call(
            "index/prefill_queries",
            "queries_kernel",
            q.device,
            queries,
            blocks=-(-rows // ROWS),
            threads=THREADS,
        )
    return out
