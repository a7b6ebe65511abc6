"""A library that fails the proof is not taken, the next one is; and what was found is remembered."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ops_support import rand
from torch import Tensor

from dsv4 import Engine, identity
from dsv4.config import preset
from dsv4.lab.score import score_ids
from dsv4.model import exact
from dsv4.ops import _memory, _product
from dsv4.ops._exact import by_row
from dsv4.ops._product import LIBRARIES, choose, measure, prove, row_product
from tests.support.feeding import claim, feed_all

CPU = torch.device("cpu")


def forget() -> None:
    for cached in (_memory.recall, _product.choose, _product._cut, _product.is_one_call):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has measured nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def by_place(least: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A product whose last row is summed in another order, in tiles of `least` rows or more."""

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        y = (x.double() @ w.double()).float()
        if x.shape[0] >= least:
            y[-1] = torch.mm(x[-1:].flip(1), w.flip(0))
        return y

    return multiply


def by_height(x: Tensor, w: Tensor) -> Tensor:
    """A product with one order for few rows and another for many."""
    return torch.mm(x, w) if x.shape[0] < 8 else (x.double() @ w.double()).float()


@pytest.mark.parametrize(("k", "n"), [(33, 7), (256, 64), (1024, 24)])
def test_a_product_that_shows_a_rows_place_is_rejected(
    k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_product, "LIBRARIES", {"fake": by_place(2), **LIBRARIES})
    chosen = measure(k, n, (n, 1), CPU)
    assert chosen.library != "fake"
    assert chosen.why.startswith("fake: a row's place shows at 4, 8, 32, 128 rows")


def test_heights_that_disagree_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_product, "LIBRARIES", {"fake": by_height, "late": by_place(32), **LIBRARIES})
    assert prove("fake", 256, 64, (64, 1), CPU)[0] == (8, 32, 128)
    assert prove("late", 256, 64, (64, 1), CPU) == ((1, 4, 8), (32, 128))
    assert measure(256, 64, (64, 1), CPU).heights == (8, 32, 128)


def test_where_nothing_holds_rows_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_product, "LIBRARIES", {"blas": by_place(2), "onednn": by_place(3)})
    chosen = measure(64, 48, (48, 1), CPU)
    assert (chosen.library, chosen.heights) == ("blas", (1,))
    assert chosen.why.count("a row's place shows") == 2
    x, w = rand(11, 64), rand(64, 48, seed=1)
    assert torch.equal(row_product(x, w), torch.cat([row_product(row, w) for row in x.split(1)]))


@pytest.mark.parametrize("fakes", [{"fake": by_place(2)}, {"blas": by_place(2), "onednn": by_place(2)}])
def test_an_engine_takes_the_next_product(
    fakes: dict[str, Callable[[Tensor, Tensor], Tensor]],
    engine_for: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine whose first library, or every one, shows a row's place: tokens stay what they are alone."""
    monkeypatch.setattr(
        _product, "LIBRARIES", {**fakes, **{n: f for n, f in LIBRARIES.items() if n not in fakes}}
    )
    engine = engine_for("modelopt")
    ids = [(7 * i + 3) % 300 for i in range(60)]
    whole = score_ids(engine, ids, 60)["prefill_logits"]
    slots = [claim(engine, 60) for _ in range(3)]
    for start, stop in ((0, 1), (1, 6), (6, 47), (47, 60)):
        spans = [(slot, start, ids[start:stop]) for slot in slots]
        got = feed_all(engine, spans).view(3, stop - start, -1)
        assert torch.equal(got, whole[start:stop].expand_as(got)), (start, stop)
    facts = _memory.recall.__wrapped__(CPU, engine.settings.threads)[0]
    assert all(fact[0] != "fake" for fact in facts.values() if isinstance(fact, list))
    assert any(isinstance(fact, list) and "place shows" in fact[2] for fact in facts.values())


def test_a_function_that_shows_its_neighbours_is_run_row_by_row() -> None:
    @by_row(((5,),))
    def numbered(x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0]).unsqueeze(1)

    @by_row(((5,),))
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    x = rand(9, 5)
    assert torch.equal(numbered(x), x)
    assert torch.equal(doubled(x), 2 * x)
    assert not numbered.__dict__["is_independent"](CPU, torch.get_num_threads())
    assert doubled.__dict__["is_independent"](CPU, torch.get_num_threads())


def settled() -> exact.Exact:
    return exact.settle_exact(preset("tiny"), 1, 512, CPU, torch.get_num_threads())


def test_what_was_found_is_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = settled()
    (file,) = folder.glob("dsv4/exact/*.json")
    assert set(first.products) <= set(json.loads(file.read_text())["facts"])
    forget()
    monkeypatch.setattr(_product, "measure", lambda *_: pytest.fail("measured again"))
    assert settled() == first
    assert [*folder.glob("dsv4/exact/*")] == [file], "no temporary file stays behind"


def test_a_second_model_takes_nothing_from_what_the_first_left(folder: Path) -> None:
    first, threads = settled(), torch.get_num_threads()
    other = exact.settle_exact(replace(preset("tiny"), hidden_size=96), 1, 512, CPU, threads)
    (file,) = folder.glob("dsv4/exact/*.json")
    assert not set(other.products) <= set(first.products)
    assert {*first.products, *other.products} <= set(json.loads(file.read_text())["facts"])


@pytest.mark.parametrize("context", [512, 1 << 20])
def test_a_start_looks_at_no_more_than_some_keys(context: int) -> None:
    """However long the window: at all of them it would look for hours."""
    config, threads = replace(preset("tiny"), window=1 << 20), torch.get_num_threads()
    assert len(exact.settle_exact(config, 0, context, CPU, threads).products) < 500


def test_another_setting_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = _memory.path_of(CPU, 1)
    assert here != _memory.path_of(CPU, 2)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert here != _memory.path_of(CPU, 1)


def test_other_code_finds_nothing_that_was_measured_of_this(tmp_path: Path) -> None:
    """Two versions of dsv4 that share a cache folder: what held for a function of one says nothing of the
    other's function of that name."""
    ops = Path(_memory.__file__).parent
    for name in ("_exact.py", "mhc/cpu.py"):
        copy = tmp_path / name.replace("/", " ") / "ops"
        shutil.copytree(ops, copy)
        here, there = identity.code("ops"), partial(identity.code.__wrapped__, "ops", root=copy.parent)
        assert there() == here
        with (copy / name).open("a") as file:
            file.write("\n# a line more\n")
        assert there() != here, name


def test_the_file_is_named_by_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    here = _memory.path_of(CPU, 1)
    monkeypatch.setattr(identity, "code", lambda *packages: "another version")
    assert _memory.path_of(CPU, 1) != here


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"facts": 3}', b"\xff\xfe", b'{"facts": {"256x128": 1}}']
)
def test_a_damaged_file_is_passed_over_with_a_sentence(content: bytes) -> None:
    path = _memory.path_of(CPU, torch.get_num_threads())
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    found = settled()
    assert len(found.notes) == 1 and str(path) in found.notes[0] and "measured again" in found.notes[0]
    forget()
    assert settled().notes == () and settled().products == found.products


def test_a_folder_that_cannot_be_written_costs_a_sentence(folder: Path) -> None:
    (folder / "dsv4").write_text("not a folder")
    found = settled()
    assert found.products and "cannot be written" in found.notes[-1]


def full(path: Path, text: str) -> None:
    path.touch()
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_no_part_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start would leave one more."""
    monkeypatch.setattr(Path, "write_text", full)
    found = settled()
    assert found.products and "cannot be written (No space left on device)" in found.notes[-1]
    assert [*folder.glob("dsv4/exact/*")] == []


def test_a_choice_is_the_same_at_every_start() -> None:
    for k, n in ((33, 6), (8, 6), (256, 64)):
        first = choose(k, n, (n, 1), CPU, torch.get_num_threads())
        forget()
        assert choose(k, n, (n, 1), CPU, torch.get_num_threads()) == first
