"""attention/decode.cu's own source on the CPU, all blocks of a cluster at once in shuffled orders, against
the reference."""

import ctypes
from dataclasses import replace

import pytest
import torch
from attention_support import Case, blocks
from torch import Tensor

from dsv4.ops.attention import decode as attention
from tests.support.twin import needs_compiler, twin_of

pytestmark = needs_compiler


twin = twin_of("attention", attend=ctypes.c_char_p)


def run(twin: ctypes.CDLL, case: Case, seed: int = 0) -> Tensor:
    out = torch.full_like(case.q, float("nan"))

    def call(source: str, kernel: str, device: torch.device, given: ctypes.Structure, **how: int) -> None:
        problem = twin.attend(len(case.q), ctypes.byref(given), seed)
        assert problem == b"", problem.decode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "call", call)
        attention.attend(**case.arguments(out))  # type: ignore[arg-type]
    return out


# Keys of one block: none, one, a few (two groups of 16), many (five), several passes.
CASES = {
    "window": Case("window", [0, 5, 127, 128, -1, 300], heads=8, ratio=4, page=64),
    "CSA": Case("listed", [3, 600, 4095, -1], heads=8, ratio=4, page=64),
    "HCA": Case("visible", [127, 4095, 700], heads=16, ratio=128, page=2),
    "HCA, long": Case("visible", [9000], heads=8, ratio=8, page=8),
}


@pytest.mark.parametrize("name", CASES)
def test_attend(twin: ctypes.CDLL, name: str) -> None:
    case = CASES[name]
    out = run(twin, case)
    case.check(out, name)
    assert torch.equal(run(twin, case, seed=1), out), "the order of events shows"


@pytest.mark.parametrize("heads", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_blocks_of_drafts(twin: ctypes.CDLL, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window ends where each row's `ends` says, and all of its block is seen, later rows too."""
    case = blocks(heads)
    assert case.entries is not None and case.ends is not None
    out = run(twin, case)
    case.check(out, "blocks")
    case.entries.data[10:15] = 0x7F  # NaN: of the padding's block
    assert torch.equal(run(twin, case, seed=1), out)
    monkeypatch.setattr(attention, "RESIDENT", 0)
    assert torch.equal(run(twin, case), out)


@pytest.mark.parametrize("kind", ["window", "listed", "visible"])
def test_heads_of_a_cluster_do_not_show(
    twin: ctypes.CDLL, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight or sixteen, as the number of rows has it. With padding, with few keys, with several passes."""
    case = Case(kind, [3, -1, 5200], heads=16, ratio=4 if kind == "listed" else 8, page=8)
    few = run(twin, case)
    monkeypatch.setattr(attention, "RESIDENT", 0)
    many = run(twin, case, seed=1)
    case.check(many, kind)
    assert torch.equal(few, many)


@pytest.mark.parametrize("sink", [-100.0, 100.0])
def test_extremes(twin: ctypes.CDLL, sink: float) -> None:
    """Keys whose scales are far apart, scores far apart between blocks, a sink that outweighs or vanishes."""
    case = Case("listed", [1000], heads=8, ratio=4, page=64)
    assert case.ring.scale is not None and case.entries is not None and case.entries.scale is not None
    case.sinks = torch.full_like(case.sinks, sink)
    for store in (case.ring, case.entries):
        assert store.scale is not None
        spread = torch.randint(0, 14, store.scale.shape, generator=torch.Generator().manual_seed(1))
        store.scale.copy_((store.scale.int() - spread).clamp(min=1).to(torch.uint8))
    case.check(run(twin, case), f"sink {sink}")


def test_not_finite(twin: ctypes.CDLL) -> None:
    """NaN in a query shows in its head, a scale or code of a key that is NaN in its rows: there alone."""
    case = Case("listed", [400, 401, 402, 403, 404], heads=8, ratio=4, page=64)
    clean = run(twin, case)
    case.q[0, 3, 17] = float("nan")
    ring = case.ring.data.clone()
    assert case.ring.scale is not None and case.listed is not None and case.entries is not None
    scale = case.ring.scale.clone()
    scale[1 * 136 + 350 % 136, 2] = 255  # slot 1: rows 1 and 4 see position 350
    ring[2 * 136 + 390 % 136, 70] = 0x7F  # slot 2: row 2
    case.ring = replace(case.ring, data=ring, scale=scale)
    out = run(twin, case)
    is_nan = torch.isnan(out).all(-1)
    want = torch.zeros_like(is_nan)
    want[0, 3] = want[1] = want[2] = want[4] = True
    assert torch.equal(is_nan, want), is_nan
    assert torch.equal(torch.isnan(out).any(-1), want)
    assert torch.equal(out[~want], clean[~want])
