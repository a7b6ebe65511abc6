"""A drafter's kernels beyond the small model of tests/step: sums of several parts, Pro's rank."""

import pytest
import torch
from step_support import DTYPES, blank, rand, runs, there

kernels = pytest.importorskip("dsv4.ops.draft.decode", reason="Triton is not installed")

from dsv4.gpu.meaning import run_and_check  # noqa: E402
from dsv4.ops.draft import streams  # noqa: E402

pytestmark = runs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["a16", "a8", "a4"])
@pytest.mark.parametrize(("parts", "d"), [(3, 256), (2, 640)])
def test_fuse(parts: int, d: int, activations: str, dtype: torch.dtype) -> None:
    out, rounds = blank(2, d, dtype=dtype), activations != "a16"
    given = {"parts": there(rand(parts, 2, d)), "weight": there(rand(d, seed=1)), "out": out, "eps": 1e-5}
    given |= {"out_in": blank(2, d, dtype=dtype) if rounds else None, "activations": activations}
    claims = kernels.fuse.means(**given)
    assert run_and_check(lambda: kernels.fuse(**given), claims) == []
    given["parts"][1:].zero_()
    assert run_and_check(lambda: None, claims) != [], "only the first part counts"


@pytest.mark.parametrize(("vocab", "rank", "rows"), [(70, 512, 3), (130, 24, 1), (40, 16, 12)])
def test_markov(vocab: int, rank: int, rows: int) -> None:
    """Tiles that the vocabulary does not fill; a token that is none."""
    block, d = 2, 40
    chain = torch.randint(0, vocab, (1 + block, rows), generator=torch.Generator().manual_seed(1))
    chain[1, -1] = -1
    w1, w2 = (there(rand(vocab, rank, seed=seed, dtype=torch.bfloat16)) for seed in (2, 3))
    base, mixed = there(rand(rows * block, vocab)), there(rand(rows * block, d, dtype=torch.bfloat16))
    confidence = blank(rows, block)
    given = {"slot": 1, "chain": there(chain), "w1": w1, "w2": w2, "base": base, "mixed": mixed}
    given |= {"proj": there(rand(1, d + rank, seed=4)), "z": blank(rows, vocab), "confidence": confidence}
    found = run_and_check(lambda: kernels.markov(**given), kernels.markov.means(**given))
    assert found == [] and confidence[:, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["a16", "a8", "a4"])
def test_enter(activations: str, dtype: torch.dtype) -> None:
    """Ids in a column of results, one of them none; a width that no block fills."""
    rows, n, d, out = 3, 4, 640, torch.zeros(3, 44, dtype=torch.int32)
    out[:, 0] = torch.tensor((4, -1, 0))
    given = {"ids": there(out)[:, 0], "table": there(rand(6, d, dtype=torch.bfloat16)), "eps": 1e-5}
    given |= {"streams": there(rand(rows, n, d, seed=1, dtype=dtype))}
    given |= {"enorm": there(rand(d, seed=2)), "hnorm": there(rand(d, seed=3))}
    given |= {"e": blank(rows, d, dtype=dtype), "h": blank(rows * n, d, dtype=dtype)}
    given |= {"e_activations": activations, "h_activations": activations}
    run = lambda: streams.enter(**given)  # noqa: E731
    assert run_and_check(run, streams.enter.means(**given)) == []
    claims = streams.enter.means(**given | {"ids": given["ids"] ^ 1, "hnorm": given["enorm"]})
    assert len(run_and_check(run, claims)) == 2, "other tokens and another norm are no difference"


@pytest.mark.parametrize("rounds", [False, True])
def test_take_last(rounds: bool) -> None:
    """Of three rows the last committed one: all, one, none; two drafts each."""
    count, each, n, d = 3, 3, 4, 72
    committed = torch.tensor([[7, 8, 9], [0, -1, -1], [-1, -1, -1]]).flatten()
    rows = count * each
    given = {"committed": there(committed), "anchors_at": there(torch.tensor([10, 1, -1]))}
    given |= {"anchors_slots": there(torch.tensor([2, 0, 1])), "drafts": there(torch.zeros(2, 3).long())}
    given |= {"settings": there(torch.arange(24).view(3, 8)), "choices": there(torch.zeros(3, 8).long())}
    given |= {name: there(torch.zeros(3).long()) for name in ("positions", "slots")}
    for seed, (name, shape) in enumerate(
        {"streams": (n, d), "x": (d,), "x_in": (d,), "gate": (n,), "comb": (n, n)}.items()
    ):
        is_there = rounds or name != "x_in"
        given[name] = there(rand(rows, *shape, seed=seed)) if is_there else None
        given[f"to_{name}"] = blank(count, *shape) if is_there else None
    run = lambda: streams.take_last(**given)  # noqa: E731
    assert run_and_check(run, streams.take_last.means(**given)) == []
    assert given["positions"].tolist() == [9, 0, -1]
    assert torch.equal(given["to_x"], given["x"][[2, 3, 6]])
