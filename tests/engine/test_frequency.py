"""Counts of chosen experts: whole or not there, of one model alone, decayed; what a memory would hit."""

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from dsv4.engine import frequency
from dsv4.engine.frequency import (
    HALF_LIFE,
    Counts,
    checksum,
    counts_path,
    coverage,
    known_counts,
    merged,
    read_counts,
    save_counts,
    write_counts,
)
from dsv4.errors import ConfigError
from dsv4.models import embedded
from dsv4.weights.load import Checkpoint

COUNTS = [[1.0, 0.0, 5.5], [2.0, 2.0, 0.0]]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_counts_come_back() -> None:
    assert known_counts("m", 2, 3) == (None, None)
    write_counts(counts_path("m"), "m", COUNTS)
    assert known_counts("m", 2, 3) == (COUNTS, None)
    assert [p.name for p in counts_path("m").parent.iterdir()] == ["m.json"], "no traces"


def test_what_is_not_this_models_is_ignored_with_a_sentence() -> None:
    path = counts_path("m")
    write_counts(path, "another", COUNTS)
    counts, why = known_counts("m", 2, 3)
    assert counts is None and why is not None and "counts the experts of another model" in why
    write_counts(path, "m", COUNTS)
    counts, why = known_counts("m", 2, 4)
    assert counts is None and why is not None and "other numbers of layers or experts" in why
    whole = path.read_text()
    for text in (whole[: len(whole) // 2], "", "[]", whole.replace("5.5", "7.5"), "{}", "\0" * 9):
        path.write_text(text)
        counts, why = known_counts("m", 2, 3)
        assert counts is None and why is not None and "is damaged" in why, text
        with pytest.raises(ConfigError, match="damaged"):
            read_counts(path)


def write_for_ever(path: Path) -> None:
    for i in range(10**9):
        write_counts(path, "m", [[float(i)] * 2000] * 20)


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    """Somebody writes all the time and is killed at some time or other; readers never see a part."""
    path = counts_path("m")
    for pause in (0.0, 0.013, 0.031):
        writer = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(path,))
        writer.start()
        began = time.monotonic()
        while not path.exists() and time.monotonic() < began + 60:
            time.sleep(0.01)
        time.sleep(pause)
        writer.kill()
        writer.join()
        counts = read_counts(path, "m")
        assert len(counts) == 20 and len({value for row in counts for value in row}) == 1
        path.unlink()


def test_old_counts_decay() -> None:
    assert merged(None, COUNTS) == COUNTS
    new = [[HALF_LIFE / 2, HALF_LIFE / 2, 0.0], [2.0, 2.0, 0.0]]
    half = merged([[4.0, 4.0, 4.0], [0.0, 0.0, 8.0]], new)
    assert half == [[2 + HALF_LIFE / 2, 2 + HALF_LIFE / 2, 2.0], [2.0, 2.0, 4.0]]


def test_a_run_is_added_to_the_file() -> None:
    save_counts("m", [[1, 2], [0, 3]])
    save_counts("m", [[1, 0], [0, 1]])
    counts, _ = known_counts("m", 2, 2)
    assert counts is not None and [[round(value, 3) for value in row] for row in counts] == [[2, 2], [0, 4]]
    counts_path("m").write_text("broken")
    save_counts("m", [[1, 0], [0, 1]])
    assert known_counts("m", 2, 2)[0] == [[1.0, 0.0], [0.0, 1.0]]


def test_two_servers_of_one_model_lose_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second adds its run between the first one's reading and its writing."""
    reading, second = frequency.known_counts, threading.Thread(target=save_counts, args=("m", [[0, 5]]))

    def read_and_wait(model: str, layers: int, experts: int) -> tuple[Counts | None, str | None]:
        found = reading(model, layers, experts)
        if not second.ident:
            second.start()
            second.join(0.3)
        return found

    monkeypatch.setattr(frequency, "known_counts", read_and_wait)
    save_counts("m", [[3, 0]])
    second.join()
    counts, _ = known_counts("m", 1, 2)
    assert counts is not None and [round(value, 3) for value in counts[0]] == [3, 5]
    assert [p.name for p in counts_path("m").parent.iterdir()] == ["m.json"], "no traces"


def test_coverage() -> None:
    assert coverage(COUNTS, 0) == 0.0 and coverage(COUNTS, 6) == 1.0
    assert coverage(COUNTS, 1) == 5.5 / 10.5 and coverage([[0.0]], 1) == 0.0


def test_checksums_tell_models_apart() -> None:
    found = checksum(Checkpoint.open(embedded()))
    assert found == checksum(Checkpoint.open(embedded())) and len(found) == 32
