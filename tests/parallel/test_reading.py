"""Ranks of one machine read each byte once, for all of them, and hold what each would hold by itself."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dsv4.errors import CheckpointError, LostError
from dsv4.parallel.reading import Memory, Share
from dsv4.weights import batches, feed, load, tiled
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import Reader
from dsv4.weights.tiled import load_tiled
from dsv4.weights.writer import write_checkpoint
from tests.parallel.test_shards import WIDE
from tests.support import plainly
from tests.support.checkpoints import write_model
from tests.support.held import digests, readers

ROOT = Path(__file__).parents[2]
LOADERS: dict[str, Callable[..., Any]] = {
    "packed": lambda checkpoint, share: checkpoint.load(False, share=share),
    "dense": lambda checkpoint, share: checkpoint.load(True, share=share),
    "tiled": lambda checkpoint, share: load_tiled(checkpoint, "cpu", share=share),
}
PLAIN: dict[str, Callable[..., Any]] = {
    "packed": lambda checkpoint: plainly.load(checkpoint, False),
    "dense": lambda checkpoint: plainly.load(checkpoint, True),
    "tiled": lambda checkpoint: plainly.load_tiled(checkpoint, "cpu"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("reading"), {}

    def folder(style: str) -> Path:
        if style not in made:
            made[style] = write_model(root / style, style, replace(WIDE, num_experts=4))
        return made[style]

    return folder


@pytest.fixture
def memory() -> Any:
    held = Memory()
    yield held.fileno()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        *((load, "CPU_BATCH_BYTES", 40_000), (tiled, "BATCH_BYTES", 90_000), (feed, "SLOTS", 3)),
        *((batches, "PIECE_BYTES", 8192), (batches, "_MOST_BUFFERS", 5)),
    ):
        monkeypatch.setattr(module, name, value)


def shares(folder: Path, size: int, whole_experts: bool = False) -> list[Checkpoint]:
    """Each rank opens the checkpoint itself, and counts what it reads."""
    return [Checkpoint.open(folder).shard(rank, size, whole_experts) for rank in range(size)]


def together(ranks: list[Checkpoint], memory: int, loader: Callable[..., Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        jobs = [pool.submit(loader, own, Share(memory, rank, len(ranks))) for rank, own in enumerate(ranks)]
        return [job.result(120) for job in jobs]


@pytest.mark.parametrize("how", LOADERS)
@pytest.mark.parametrize(("style", "size"), [("modelopt", 2), ("official", 2), ("bf16", 8)])
def test_each_byte_is_read_once(
    style: str, size: int, how: str, folders: Callable, memory: int, small_batches: None
) -> None:
    ranks = shares(folders(style), size)
    held = together(ranks, memory, LOADERS[how])
    total = Checkpoint.open(folders(style)).inventory.num_bytes
    read = sum(own.reader.num_read for own in ranks)
    assert 0.95 * total < read <= 1.05 * total
    assert max(own.reader.num_read for own in ranks) < 2.5 * total / size, "all of them read"
    for own, weights in zip(ranks, held, strict=True):
        assert digests(weights) == digests(PLAIN[how](own))


@pytest.mark.parametrize("how", ["packed", "tiled"])
def test_ranks_with_whole_experts(how: str, folders: Callable, memory: int, small_batches: None) -> None:
    ranks = shares(folders("modelopt"), 2, whole_experts=True)
    held = together(ranks, memory, LOADERS[how])
    assert sum(own.reader.num_read for own in ranks) <= 1.05 * ranks[0].whole.num_bytes  # type: ignore[union-attr]
    for own, weights in zip(ranks, held, strict=True):
        assert digests(weights) == digests(PLAIN[how](own))


@pytest.mark.parametrize("seed", range(6))
def test_ranks_at_different_paces(
    seed: int, folders: Callable, memory: int, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers and consumers are late at random; a buffer that is reused too early would change bits."""
    order, scatter, one = random.Random(seed), Reader.scatter, load.stack_of

    def slowly(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(order.choice([0, 0, 0, 0, 0.002]))
            return make(*arguments)

        return call

    monkeypatch.setattr(Reader, "scatter", slowly(scatter))
    monkeypatch.setattr(load, "stack_of", slowly(one))
    ranks = shares(folders("modelopt"), 2)
    held = together(ranks, memory, LOADERS["packed"])
    monkeypatch.undo()
    for own, weights in zip(ranks, held, strict=True):
        assert digests(weights) == digests(PLAIN["packed"](own))


def test_a_rank_that_forgets_to_wait_is_caught(
    folders: Callable, memory: int, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: here buffers are handed out before all have read them."""
    monkeypatch.setattr(Share, "released", property(lambda share: 10**6))
    slow = load.stack_of

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.001)
        return slow(*arguments)

    monkeypatch.setattr(load, "stack_of", slowly)
    ranks = shares(folders("bf16"), 2)
    try:
        held = together(ranks, memory, LOADERS["packed"])
        is_wrong = any(
            digests(w) != digests(PLAIN["packed"](own)) for own, w in zip(ranks, held, strict=True)
        )
    except CheckpointError:
        is_wrong = True
    assert is_wrong


def test_a_lost_rank_ends_the_wait(
    folders: Callable,
    memory: int,
    small_batches: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 1 never comes; the other one names it, and is told so while it waits for its bytes."""
    monkeypatch.setattr(feed, "LATE_SECONDS", 0.05)
    own = shares(folders("modelopt"), 2)[0]
    start = time.monotonic()

    def check() -> None:
        if time.monotonic() > start + 0.2:
            raise LostError("rank 1 has died (signal 9)")

    with pytest.raises(LostError, match="rank 1 has died"):
        own.load(False, share=Share(memory, 0, 2, check))
    assert time.monotonic() < start + 10 and not readers()
    assert "still waiting for rank 1 to read" in caplog.text and "rank 0" not in caplog.text


def test_who_is_behind(memory: int) -> None:
    ranks = [Share(memory, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.open(2, 100)
    for rank, read, released in ((0, 3, 2), (1, 3, 1), (2, 3, 2)):
        ranks[rank].tell(read, released)
    assert ranks[0].behind(3, 2) == [1], "which has not given its buffer back"
    ranks[1].tell(3, 2)
    ranks[2].tell(4, 2)
    assert ranks[2].behind(3, 2) == [0, 1], "which have not read their pieces"


def test_files_that_change_before_the_other_rank_looks(tmp_path: Path) -> None:
    """One whose bytes the other rank reads alone too: its header may say by now that they lie elsewhere."""
    with mock.patch("dsv4.lab.init.write_checkpoint", partial(write_checkpoint, limit=200_000)):
        folder = write_model(tmp_path / "model", "modelopt", replace(WIDE, num_experts=4))
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        first = Checkpoint.open(folder).shard(0, 2)
        os.utime(file)
        ranks = [first, Checkpoint.open(folder).shard(1, 2)]
        held, ended = Memory(), threading.Event()

        def check(ended: threading.Event = ended) -> None:
            if ended.is_set():
                raise LostError("rank 0 has died")

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(ranks[1].load, False, share=Share(held.fileno(), 1, 2, check))
            with pytest.raises(CheckpointError, match=f"{file.name} was changed while it was read"):
                ranks[0].load(False, share=Share(held.fileno(), 0, 2))
            ended.set()
            assert isinstance(other.exception(), LostError | None)


def test_memory_is_given_back() -> None:
    memory = Memory()
    descriptor = memory.fileno()
    for buffer in Share(descriptor, 0, 2).open(3, 10_000):
        buffer.fill_(1)
    assert os.fstat(descriptor).st_size == 4096 + 3 * 12288 and os.fstat(descriptor).st_blocks
    memory.empty()
    assert not os.fstat(descriptor).st_blocks
    del memory
    with pytest.raises(OSError):
        os.fstat(descriptor)


RANK = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/support"]
from dsv4.parallel.reading import Share
from dsv4.weights import load
from dsv4.weights.load import Checkpoint
from tests.support.held import digests
folder, rank, size, memory = sys.argv[2], *map(int, sys.argv[3:])
load.CPU_BATCH_BYTES = 100_000
own = Checkpoint.open(folder).shard(rank, size)
weights = own.load(False, share=Share(memory, rank, size))
print(json.dumps([own.reader.num_read, digests(weights)]))
"""


def test_in_processes_of_their_own(folders: Callable, memory: int) -> None:
    folder = folders("modelopt")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(ROOT), str(folder), str(rank), "2", str(memory)],
            pass_fds=(memory,),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    for rank, (_, found) in enumerate(said):
        assert found == digests(PLAIN["packed"](Checkpoint.open(folder).shard(rank, 2)))
    assert sum(read for read, _ in said) <= 1.05 * Checkpoint.open(folder).inventory.num_bytes
