"""The ablations of entry selection, and modules from elsewhere in place of an op's backend."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.errors import ConfigError
from dsv4.lab.score import score_ids
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.index import cpu
from dsv4.quant.formats import Format, QuantTensor
from recipes.ablations import index_dense, index_random

RATIO, PAGE, TOPK = 4, 8, 6
# Two sequences of up to 64 entries on shuffled pages; keys are never to be read, so they are NaN.
TABLE = torch.randperm(16, generator=torch.Generator().manual_seed(1)).int().view(2, 8)
POOL = QuantTensor(Format.F32, torch.full((128, 4), torch.nan), (128, 4))


def select(module: ModuleType, q: Tensor, slots: list[int], positions: list[int], topk: int = TOPK) -> Tensor:
    where = (torch.tensor(slots), torch.tensor(positions))
    return module.select(q, q[:, :, 0], POOL, TABLE, *where, RATIO, PAGE, topk)


def rows(slot: int, count: int) -> list[int]:
    return [int(TABLE[slot, entry // PAGE]) * PAGE + entry % PAGE for entry in range(count)]


def queries(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("module", [index_dense, index_random])
def test_they_have_the_functions_of_the_reference(module: ModuleType) -> None:
    for name, function in vars(cpu).items():
        if inspect.isfunction(function) and function.__module__ == cpu.__name__ and name[0] != "_":
            assert inspect.signature(getattr(module, name)) == inspect.signature(function), name
            assert (getattr(module, name) is function) == (name != "select")


def test_dense_takes_every_visible_entry() -> None:
    got = select(index_dense, queries(3), [1, 0, 1], [255, 2, 30])
    assert got.shape == (3, 64)
    assert got[0].tolist() == rows(1, 64) and got[1].tolist() == [-1] * 64
    assert got[2].tolist() == rows(1, 7) + [-1] * 57


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_takes_as_many_entries_as_the_reference(dtype: torch.dtype) -> None:
    q, slots, positions = queries(5).to(dtype), [0, 1, 0, 1, 1], [255, 100, 23, 27, 2]
    got = select(index_random, q, slots, positions)
    assert got.shape == (5, TOPK)
    for t, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        visible = rows(slot, (position + 1) // RATIO)
        chosen = [row for row in got[t].tolist() if row >= 0]
        order = [visible.index(row) for row in chosen]
        assert len(chosen) == min(TOPK, len(visible)) and order == sorted(set(order)), "distinct, in order"
    assert got[2].tolist() == rows(0, 6), "few entries are all taken"
    for t in range(5):
        alone = select(index_random, q[t : t + 1], [slots[t]], [positions[t]])[0].tolist()
        assert alone == got[t].tolist()[: len(alone)], "batch-mates change no choice"
    assert torch.equal(got, select(index_random, q, slots, positions)), "repeatable"
    assert select(index_random, q[:0], [], []).shape == (0, 0)


def test_random_is_fair_and_another_one_for_every_query() -> None:
    """600 queries choose 6 of 64 entries: each entry 56 times on average, with a deviation of 7."""
    got = select(index_random, queries(600, seed=5), [0] * 600, [255] * 600)
    counts = torch.bincount(got.flatten(), minlength=128)[rows(0, 64)]
    assert counts.sum() == 3600 and counts.min() > 56 - 5 * 7.2 and counts.max() < 56 + 5 * 7.2
    assert len({tuple(row) for row in got.tolist()}) == 600


@pytest.mark.parametrize("name", ["index_dense", "index_random"])
def test_the_model_differs_only_where_entries_compete(engine_for: Callable[..., Engine], name: str) -> None:
    """Below 4 * 12 tokens every entry is taken anyway; beyond, another choice gives other logits."""
    ids = [(7 * i) % 250 + 20 for i in range(140)]
    plain = score_ids(engine_for(), ids, 140)["prefill_logits"]
    for chunk in (140, 33):
        changed = score_ids(engine_for(ops=(("index", f"recipes.ablations.{name}"),), chunk=chunk), ids, 140)
        got = changed["prefill_logits"]
        assert torch.equal(got[:48], plain[:48])
        assert (got[60:] != plain[60:]).any(1).all()


def test_random_answers_do_not_depend_on_the_batch(engine_for: Callable[..., Engine]) -> None:
    engine = engine_for(ops=(("index", "recipes.ablations.index_random"),))
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[(seed * i) % 250 + 20 for i in range(90 + seed)] for seed in (3, 5, 7)]
    together = [done.ids for done in engine.generate(prompts, params)]
    assert together == [engine.generate([prompt], params)[0].ids for prompt in prompts]


def test_a_module_from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_kernels").mkdir()
    (tmp_path / "my_kernels" / "rows.py").write_text("from dsv4.ops.rows.cpu import normed, rms_norm\n")
    (tmp_path / "my_kernels" / "half.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    ops = Ops.choose("cpu", rows="my_kernels.rows", index="recipes.ablations.index_dense")
    assert ops.rows is sys.modules["my_kernels.rows"]
    names = ops.names()
    assert names.pop("rows") == "my_kernels.rows" and names.pop("index") == "recipes.ablations.index_dense"
    assert names == {op: "cpu" for op in IMPLEMENTATIONS if op not in ("rows", "index")}
    for name, why in (
        ("my_kernels.half", "lacks rms_norm, normed; it needs the functions of dsv4/ops/rows/cpu.py"),
        ("my_kernels.none", "cannot be imported"),
        (".rows", "cannot be imported"),
        ("a..b", "cannot be imported"),
        ("nothing", "op rows has no backend 'nothing'; it has cpu"),
    ):
        with pytest.raises(ConfigError, match=why):
            Ops.choose("cpu", rows=name)
