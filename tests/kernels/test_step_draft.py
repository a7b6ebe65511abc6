"""A drafter's kernels beyond the small model of tests/step: sums of several parts, Pro's rank."""

import pytest
import torch
from step_support import DTYPES, blank, rand, runs, there

kernels = pytest.importorskip("dsv4.ops.draft.decode", reason="Triton is not installed")

from dsv4.gpu.meaning import run_and_check  # noqa: E402

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
