"""Sums and columns that ranks share have one order: the same bits, whoever computes which part."""

import pytest
import torch
from torch import Tensor

from dsv4.ops import _product
from dsv4.ops._product import column_product, row_product, split_product
from dsv4.ops.experts import cpu as experts
from dsv4.ops.linear import cpu as linear
from dsv4.parallel.comm import tree_sum

PARTS = 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def over_ranks(parts: list[Tensor]) -> Tensor:
    """What ranks do with their own sums."""
    return tree_sum(torch.stack([tree_sum(part) for part in parts], dim=1))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 33])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_sum_over_ranks(rows: int, size: int) -> None:
    x, w = rand(rows, 192), rand(192, 40, seed=1)
    whole = linear.partial(x, w, "a16", PARTS, torch.float32)
    shares = zip(x.chunk(size, 1), w.chunk(size), strict=True)
    parts = [linear.partial(a.contiguous(), b, "a16", PARTS // size, torch.float32) for a, b in shares]
    assert torch.equal(over_ranks(parts), tree_sum(whole))
    exact = x.double() @ w.double()
    assert torch.allclose(tree_sum(whole).double(), exact, atol=1e-4)
    if rows:
        assert not torch.equal(tree_sum(whole), row_product(x, w)), "one sum over all has other bits here"


@pytest.mark.parametrize("width", [24, 64, 256, 1000])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_columns_of_ranks(width: int, size: int) -> None:
    for rows in (1, 4, 37):
        x, w = rand(rows, 96), rand(96, width, seed=1)
        whole = column_product(x, w, PARTS)
        shares = [column_product(x, part.contiguous(), PARTS // size) for part in w.chunk(size, 1)]
        assert torch.equal(torch.cat(shares, dim=1), whole)


def test_columns_that_show_their_number_are_multiplied_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose bits depend on a product's width is found out, and its columns go run by run."""
    honest = _product.row_product

    def moody(x: Tensor, w: Tensor) -> Tensor:
        return honest(x, w) * (1 + 1e-6 * (w.shape[1] > 8))

    monkeypatch.setattr(_product, "row_product", moody)
    _product.has_free_columns.cache_clear()
    monkeypatch.setattr(_product._memory, "recall", lambda device, threads: ({}, ""))
    x, w = rand(3, 32), rand(32, 64, seed=1)
    try:
        assert not _product.has_free_columns(32, 64, 8, x.device, torch.get_num_threads())
        runs = torch.cat([moody(x, part) for part in w.split(8, 1)], dim=1)
        assert torch.equal(column_product(x, w, 8), runs)
    finally:
        _product.has_free_columns.cache_clear()


@pytest.mark.parametrize("activations", ["a16", "a8"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_experts_of_ranks(size: int, activations: str) -> None:
    width = 1024
    made = [tuple(rand(*s, seed=7 * e + i) for i, s in enumerate(_shapes(width))) for e in range(5)]
    x, weights = 3 * rand(9, 64), rand(9, 2, seed=4).abs()
    ids = torch.tensor([[0, 1], [1, 4], [3, 0], [2, 1], [4, 2], [0, 4], [1, 0], [3, 4], [2, 3]])

    def run(rank: int, of: int) -> Tensor:
        part = slice(rank * width // of, (rank + 1) * width // of)
        own = [(w1[:, part].contiguous(), w3[:, part].contiguous(), w2[part]) for w1, w3, w2 in made]
        routed = experts.routed(x, ids, weights, own, 5.0, activations, PARTS // of)
        return routed + experts.ffn(x, own[0], 5.0, activations, None, PARTS // of)

    assert torch.equal(over_ranks([run(rank, size) for rank in range(size)]), tree_sum(run(0, 1)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_whole_experts_of_ranks(size: int) -> None:
    """Each rank's choices, its parts of which go to the others: what ranks that share the width add up."""
    width, count = 256, 8
    made = [tuple(rand(*s, seed=7 * e + i) for i, s in enumerate(_shapes(width))) for e in range(count)]
    for tokens, last in ((1, 8), (9, 8), (40, 3)):  # of few experts: ranks that have nothing to do
        x, weights = 3 * rand(tokens, 64), rand(tokens, 3, seed=4).abs()
        ids = torch.rand(tokens, last, generator=torch.Generator().manual_seed(5)).topk(3, dim=1).indices
        want = experts.routed(x, ids, weights, made, 5.0, "a8", PARTS)
        share, rows = count // size, []
        for rank in range(size):
            own = made[rank * share : (rank + 1) * share]
            rows.append(experts.by_choice(x, ids, weights, own, 5.0, "a8", PARTS, rank * share))
        for rank, part in enumerate(want.chunk(size, dim=1)):
            taken = torch.cat([made.chunk(size, dim=1)[rank] for made in rows])
            assert torch.equal(experts.add_choices(taken, ids), part), (tokens, rank)


def _shapes(width: int) -> tuple[tuple[int, int], ...]:
    return (64, width), (64, width), (width, 64)


def test_split_product_adds_nothing() -> None:
    x, w = rand(5, 64), rand(64, 24, seed=1)
    parts = split_product(x, w, 4)
    for part in range(4):
        run = slice(16 * part, 16 * part + 16)
        assert torch.equal(parts[:, part], row_product(x[:, run], w[run]))
