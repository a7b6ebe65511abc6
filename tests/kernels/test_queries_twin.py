"""index/prefill_queries.cu's own source on the CPU: the index's queries, bit for bit the reference's."""

import ctypes

import pytest
import torch
from prompt_support import hostile, on_twin, rand

from dsv4.ops.index import cpu
from dsv4.ops.index import prefill_queries as queries
from tests.support.twin import needs_compiler, twin_of, unfinished

pytestmark = needs_compiler
twin = twin_of("queries", launch=ctypes.c_char_p)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (5, 3), (7, 64)])
def test_the_reference(twin: ctypes.CDLL, tokens: int, heads: int) -> None:
    angles = rand(tokens, 32, seed=2) * 100
    cos, sin = angles.cos(), angles.sin()
    for seed, q in enumerate((rand(tokens, heads, 128, seed=1), hostile(tokens * heads, 128))):
        q = q.bfloat16().view(tokens, heads, 128)
        with on_twin(twin, queries, seed), unfinished(twin, q, cos, sin):
            got = queries.rotate_round(q, cos, sin)
        want = cpu.queries(q, cos, sin, qat=True)
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert torch.equal(got.isnan(), want.isnan())
