"""attention/decode.cu on a GPU: the reference's results; the same bits alone and among others, as a
graph or not."""

from typing import Any

import pytest
import torch
from attention_support import Case
from step_support import moved
from torch import Tensor

from dsv4.ops.attention import decode as attention

pytestmark = pytest.mark.gpu
# Flash's and Pro's heads, of one GPU and of one rank of two; positions around every change of shape.
LONG = [0, 3, 127, 128, 515, 2047, 4095, 4099]
CASES = {
    "window": Case("window", [0, 5, 127, 128, -1, 300], heads=64, ratio=4, page=64),
    "CSA": Case("listed", [*LONG, -1], heads=64, ratio=4, page=64),
    "CSA, a rank's": Case("listed", LONG, heads=32, ratio=4, page=64),
    "CSA, wide list": Case("listed", [4095, 8191], heads=8, ratio=4, page=64, topk=1024),
    "HCA": Case("visible", LONG, heads=128, ratio=128, page=2),
    "HCA, long": Case("visible", [70000, 9000], heads=64, ratio=8, page=32),
}


def there(case: Case, rows: list[int] | None = None) -> dict[str, Any]:
    """The launch's arguments on the device, of these rows alone."""
    picked = torch.tensor(range(len(case.q)) if rows is None else rows)
    given = case.arguments(torch.full_like(case.q[picked], float("nan")))
    for name in ("q", "rows", "slots", "positions"):
        tensor = given[name]
        given[name] = tensor[picked] if isinstance(tensor, Tensor) else None
    for name, value in given.items():
        if isinstance(value, Tensor):
            given[name] = value.cuda()
    return given | {name: None if given[name] is None else moved(given[name]) for name in ("ring", "entries")}  # type: ignore[arg-type]


def run(case: Case, rows: list[int] | None = None) -> Tensor:
    given = there(case, rows)
    attention.attend(**given)
    return given["out"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_attend(name: str) -> None:
    case = CASES[name]
    out = run(case)
    case.check(out, name)
    for row in range(len(case.q)):
        assert torch.equal(run(case, [row])[0], out[row]), f"row {row} alone"
    pair = [len(case.q) - 1, 0] * 4
    assert torch.equal(run(case, pair), out[pair]), "rows twice, in another order"


def test_replayed_back_to_back() -> None:
    """Launches that overlap, over and over: each has the bits it has alone, whatever came before."""
    names = ("window", "CSA, a rank's", "HCA", "CSA")
    each = [there(CASES[name]) for name in names]
    want = [run(CASES[name]) for name in names]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(24):
            attention.attend(**each[turn % len(each)], overlap=True)
    for turn in range(200):
        if turn % 20 == 0:
            torch.cuda.synchronize()
            for given in each:
                given["out"].fill_(float("nan"))
        graph.replay()
        if turn % 20 == 19:
            for given, expected in zip(each, want, strict=True):
                assert torch.equal(given["out"], expected), turn
