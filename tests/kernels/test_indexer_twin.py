"""indexer.cu's own source on the CPU, all blocks of a cluster at once in shuffled orders, against the
reference."""

import ctypes

import pytest
import torch
from indexer_support import Case
from torch import Tensor

from dsv4.kernels.decode import indexer
from tests.support.twin import build, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = build("indexer", tmp_path_factory)
    loaded.choose.restype = ctypes.c_char_p
    return loaded


def run(twin: ctypes.CDLL, case: Case, seed: int = 0) -> Tensor:
    out = case.blank()
    given = indexer.arguments(**case.arguments(out))  # type: ignore[arg-type]
    keys = indexer.keys_of_lane(case.capacity)
    problem = twin.choose(keys, len(case.iq), ctypes.byref(given), seed)
    assert problem == b"", problem.decode()
    return out


# Fewer entries than are chosen; one more; about a group of 16 for each warp; two; several turns.
CASES = {
    "few": Case([-1, 7, 255, 259, 261], page=16, topk=64, capacity=1280),
    "a group each": Case([4095, 4163], page=64, topk=512, capacity=1280),
    "several": Case([12000], page=64, topk=512, capacity=4096),
}


def test_sizes(twin: ctypes.CDLL) -> None:
    assert {keys: twin.memory_bytes(keys) for keys in indexer.SHARED_BYTES} == indexer.SHARED_BYTES


@pytest.mark.parametrize("name", CASES)
def test_choice(twin: ctypes.CDLL, name: str) -> None:
    case = CASES[name]
    out = run(twin, case)
    case.check(out)
    assert torch.equal(run(twin, case, seed=1), out), "the order of events shows"


def test_ties_and_nan(twin: ctypes.CDLL) -> None:
    """Of equal scores the first are taken; NaN, from a query or a key's scale, is above all numbers."""
    case = Case([1599, 1599], page=64, topk=64, capacity=1280)
    case.iq[0] = 0.0
    assert case.keys.scale is not None
    rows = case.page_table[1].long() * 64
    case.keys.scale[rows[4] + 3, 1] = 255
    out = run(twin, case)
    assert out[0].tolist() == (case.page_table[0, 0] * 64 + torch.arange(64)).tolist()
    assert int(rows[4]) + 3 in out[1].tolist()
    case.iq[1, 5, 7] = float("nan")
    assert run(twin, case)[1].tolist() == (case.page_table[1, 0] * 64 + torch.arange(64)).tolist()
