"""indexer.cu on a GPU: what the reference chooses; the same alone and among others, as a graph or not."""

from typing import Any

import pytest
import torch
from indexer_support import Case
from step_support import moved
from torch import Tensor

from dsv4.kernels.decode import indexer

pytestmark = pytest.mark.gpu
CASES = {
    "few": Case([-1, 7, 255, 259, 261, 2051], page=16, topk=64, capacity=1280),
    "a group each": Case([2047, 2051, 4095, 4163, 5119, -1], page=64, topk=512, capacity=1280),
    "several": Case([12000, 16383], page=64, topk=512, capacity=4096),
    "wide list": Case([32767, 4095, 20000], page=64, topk=1024, capacity=8192),
}


def there(case: Case, rows: list[int] | None = None) -> dict[str, Any]:
    """The launch's arguments on the device, of these rows alone."""
    picked = torch.tensor(range(len(case.iq)) if rows is None else rows)
    given: dict[str, Any] = case.arguments(case.blank()[picked])
    for name in ("iq", "weights", "slots", "positions"):
        given[name] = given[name][picked]
    given = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in given.items()}
    return given | {name: moved(given[name]) for name in ("keys", "entries")}


def run(case: Case, rows: list[int] | None = None) -> Tensor:
    given = there(case, rows)
    indexer.choose_entries(**given)
    return given["out"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_choice(name: str) -> None:
    case = CASES[name]
    out = run(case)
    case.check(out)
    for row in range(len(case.iq)):
        assert torch.equal(run(case, [row])[0], out[row]), f"row {row} alone"
    pair = [len(case.iq) - 1, 0] * 4
    assert torch.equal(run(case, pair), out[pair]), "rows twice, in another order"


def test_replayed_back_to_back() -> None:
    """Launches that overlap, over and over: each chooses what it chooses alone, whatever came before."""
    each = [there(case) for case in CASES.values()]
    want = [run(case) for case in CASES.values()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(24):
            indexer.choose_entries(**each[turn % len(each)], overlap=True)
    for turn in range(200):
        if turn % 20 == 0:
            torch.cuda.synchronize()
            for given in each:
                given["out"].fill_(-7)
        graph.replay()
        if turn % 20 == 19:
            for given, expected in zip(each, want, strict=True):
                assert torch.equal(given["out"], expected), turn
