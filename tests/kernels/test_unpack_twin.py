"""linear/prefill_unpack.cu's own source on the CPU: weights in tiles as rows, bit for bit the codec's."""

import ctypes
from dataclasses import replace

import pytest
import torch
from matvec_support import FORMATS, bank
from prompt_support import BF16, F32, on_twin, rand

from dsv4.gpu.tiles import tile
from dsv4.ops.linear import prefill_unpack as unpack
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format
from tests.support.twin import needs_compiler, twin_of

pytestmark = needs_compiler
twin = twin_of("unpack", launch=ctypes.c_char_p)


@pytest.mark.parametrize("act", [BF16, F32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_codec(twin: ctypes.CDLL, format: Format, act: torch.dtype) -> None:
    for n, k in ((16, 512), (40, 1028), (33, 68)):
        stored = encode_weight(rand(n, k, seed=n) * 2.0 ** (torch.arange(n) % 20 - 9).unsqueeze(1), format)
        weight = tile(stored)
        out = torch.full((n + 1, k), 7.0, dtype=act)
        with on_twin(twin, unpack):
            unpack.unpack(weight, out[:n])
        assert torch.equal(out[:n], decode(replace(stored, global_scale=1.0)).to(act))
        assert out[n:].eq(7.0).all()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_banks(twin: ctypes.CDLL, format: Format, apart: bool) -> None:
    """Pairs, w1 before w3; experts one after the other, or each in its place."""
    n, k, experts = 40, 600, 3
    weight, stored = bank(format, experts, n, k, 2, apart)
    out = torch.full((experts, 2, n, k), torch.nan)
    with on_twin(twin, unpack, seed=1):
        unpack.unpack(weight, out)
    for e, parts in enumerate(stored):
        for half, part in enumerate(parts):
            assert torch.equal(out[e, half], decode(replace(part, global_scale=1.0))), (e, half)
