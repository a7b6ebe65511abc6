"""Prefixes kept in files: a hit from disk is a miss, bit for bit, whatever became of the files."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4 import Engine, SamplingParams
from dsv4.cache.folder import HEADER_BYTES
from dsv4.engine import keep
from dsv4.engine.keep import folder_name
from dsv4.engine.request import Completion, Request
from dsv4.errors import ConfigError
from dsv4.weights.checksum import checksum
from dsv4.weights.load import Checkpoint
from tests.support.feeding import cache_of

PAGE, VOCAB = 256, 300
GREEDY = SamplingParams(max_tokens=3, temperature=0, logprobs=5)
OPTIONS = {"max_context": 1100, "max_batch": 3, "chunk": 300}


def text(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(length)]


def values(done: Completion) -> tuple[object, ...]:
    return done.tokens, done.finish_reason


def flushed(engine: Engine) -> Engine:
    assert engine.prefix.shelf is not None
    engine.prefix.shelf.flush()
    return engine


@pytest.fixture(scope="module")
def alone(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("official", max_context=1100, max_batch=1, prefix_snapshots=0)


@pytest.fixture
def kept(engine_for: Callable[..., Engine], tmp_path: Path) -> Callable[..., Engine]:
    """A new engine on the test's folder: what a restart gives."""
    return lambda **more: engine_for("official", **OPTIONS | {"prefix_dir": str(tmp_path / "kept")} | more)


def run(engine: Engine, ids: list[int], params: SamplingParams = GREEDY) -> Completion:
    (done,) = engine.generate([ids], params)
    pool = engine.slots.pool
    assert pool.num_available == pool.num_pages
    return done


def test_a_conversation_goes_on_after_a_restart(kept: Callable[..., Engine], alone: Engine) -> None:
    first = text(520, 1)
    done = run(flushed(kept()), first, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    ids = first + done.ids + text(300, 2)
    engine = kept()
    second = run(engine, ids)
    assert second.cached_tokens == 512 and values(second) == values(run(alone, ids))
    third = run(flushed(engine), ids)
    assert third.cached_tokens == 768, "from memory, which now has what was on disk"
    last = run(kept(), ids)
    assert last.cached_tokens == 768 and values(last) == values(second) and engine.notices == []


def test_one_token_answers_are_kept_too(kept: Callable[..., Engine]) -> None:
    """Nothing follows the step that fills the last page: its copies must not wait for a next one."""
    ids = text(300, 3)
    flushed(kept()).generate([ids], replace(GREEDY, max_tokens=1))
    assert run(kept(), ids).cached_tokens == 256


def test_owners_share_nothing_on_disk(kept: Callable[..., Engine], tmp_path: Path) -> None:
    ids, engine = tuple(text(600, 4)), kept()
    found = []
    for turn, owner in enumerate(("key-ann", "key-bob", "key-ann", "", "key-bob")):
        engine.prefix.clear()
        (done,) = flushed(engine).generate([Request(f"r-{turn}", ids, GREEDY, owner)])
        flushed(engine)
        found.append(done.cached_tokens)
    assert found == [0, 0, 512, 0, 512]
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"key-" not in stored and not any("key-" in path.name for path in tmp_path.rglob("*"))


def test_scored_prompts_do_not_wait_for_files(kept: Callable[..., Engine]) -> None:
    ids = text(600, 5)
    run(flushed(kept()), ids)
    done = run(kept(), ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    assert done.cached_tokens == 0 and len(done.prompt) == 599


@pytest.mark.parametrize(
    "other",
    [
        {"cache": "f32"},
        {"activations": "a8"},
        {"weights": "packed"},
        {"format": "modelopt"},
        {"speculate": "off"},
    ],
    ids=str,
)
def test_other_models_and_settings_find_nothing(
    engine_for: Callable[..., Engine], kept: Callable[..., Engine], tmp_path: Path, other: dict[str, Any]
) -> None:
    ids = text(300, 6)
    run(flushed(kept(weights="dense")), ids)
    options = OPTIONS | {"prefix_dir": str(tmp_path / "kept"), "weights": "dense"} | other
    engine = engine_for(options.pop("format", "official"), **options)
    assert run(engine, ids).cached_tokens == 0
    assert "are of another model, version or setting" in engine.notices[0]
    assert run(kept(weights="dense"), ids).cached_tokens == 256


def test_an_engine_that_has_run_finds_the_same_files(
    kept: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's runs before its folder is opened: what its ops have looked up by then is no part."""
    seen: list[tuple[Any, ...]] = []

    def noted(*facts: Any) -> str:
        seen.append(facts)
        return folder_name(*facts)

    monkeypatch.setattr(keep, "folder_name", noted)
    engine = kept()
    (facts,) = seen
    before = folder_name(*facts)
    run(engine, text(20, 8))
    assert folder_name(*facts) == before


def test_sizes_that_change_no_bit_share_files(kept: Callable[..., Engine]) -> None:
    ids = text(600, 7)
    want = run(flushed(kept()), ids)
    other = run(kept(max_context=900, max_batch=1, chunk=64, cache_pages=5, prefix_snapshots=2), ids)
    assert other.cached_tokens == 512 and values(other) == values(want)


def test_the_checksum_sees_one_bit(checkpoint: Callable[..., Path]) -> None:
    opened = Checkpoint.open(checkpoint("official"))
    weights = opened.load(dense=False)
    before = checksum(weights)
    assert checksum(weights) == before
    for name in ("embed", "layers.1.attn.wq_a", "layers.2.ffn.experts.3.w2", "norm"):
        held = next(weights.tensors[key] for key in weights.tensors if key.startswith(name))
        data = held if torch.is_tensor(held) else held.data
        raw = data.view(-1).view(torch.uint8)
        raw[-1] ^= 1
        assert checksum(weights) != before, name
        raw[-1] ^= 1
    assert checksum(weights) == before


def test_damaged_files_are_misses_and_made_again(
    kept: Callable[..., Engine], alone: Engine, tmp_path: Path
) -> None:
    """Each file in turn, at the header and the contents, and cut (all places: tests/cache)."""
    ids = text(600, 8)
    want = values(run(alone, ids))
    run(flushed(kept()), ids)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 4, "two pages and two snapshots"
    engine, unread = kept(), 0
    for path in files:
        raw = path.read_bytes()
        flips = [raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :] for at in (7, HEADER_BYTES, len(raw) - 1)]
        for bad in (*flips, raw[: len(raw) // 2]):
            path.write_bytes(bad)
            engine.prefix.clear()
            done = run(flushed(engine), ids)
            assert values(done) == want
            flushed(engine)
            if done.cached_tokens == 512:  # the first page's snapshot: that of the second was there
                unread += 1
                path.write_bytes(raw)
            assert path.read_bytes() == raw, "made again"
    assert unread == 4
    engine.prefix.clear()
    assert run(engine, ids).cached_tokens == 512
    assert len(engine.notices) == 1 and "counts as a miss" in engine.notices[0]


def test_a_folder_that_fails_later_is_a_miss(
    kept: Callable[..., Engine], alone: Engine, tmp_path: Path
) -> None:
    """As a disk does, or a server of files that is gone: neither the engine nor a request ends with it."""
    engine, ids = kept(), text(600, 21)
    assert engine.prefix.shelf is not None
    engine.prefix.shelf.folder._own = tmp_path / ("x" * 300)  # no file system has such a name
    done = run(engine, ids)
    assert values(done) == values(run(alone, ids)) and done.cached_tokens == 0
    flushed(engine)
    assert len([line for line in engine.notices if "cannot be read (File name too long)" in line]) == 1
    assert len([line for line in engine.notices if "cannot be written (File name too long)" in line]) == 1


def test_two_engines_on_one_folder(kept: Callable[..., Engine], alone: Engine) -> None:
    """What one writes the other finds, also while it runs; both evict."""
    limit = 2_500_000
    one, two = kept(prefix_dir_bytes=limit), kept(prefix_dir_bytes=limit)
    cached = 0
    assert one.prefix.shelf is not None
    folder = one.prefix.shelf.folder.folder
    for turn in range(6):
        ids = text(600, 100 + turn // 2)
        engine = (one, two)[turn % 2]
        done = run(engine, ids)
        assert values(done) == values(run(alone, ids))
        cached += done.cached_tokens
        flushed(engine)
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= limit
    assert cached == 3 * 512
    assert one.notices == two.notices == []


def test_evicted_while_it_is_read(kept: Callable[..., Engine], alone: Engine, tmp_path: Path) -> None:
    """Somebody removes files between looking and reading: less is found, nothing goes wrong."""
    ids = text(900, 9)
    want = values(run(alone, ids))
    run(flushed(kept()), ids)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in files[::2]:
        raw, engine = path.read_bytes(), kept()
        assert engine.prefix.shelf is not None
        folder = engine.prefix.shelf.folder
        has = folder.has

        def then_gone(key: bytes, kind: str, path: Path = path, has: Callable[..., bool] = has) -> bool:
            there = has(key, kind)
            if kind == "snapshot":  # the last thing that is looked for
                path.unlink(missing_ok=True)
            return there

        folder.has = then_gone  # type: ignore[method-assign, assignment]
        done = run(engine, ids)
        assert values(done) == want and done.cached_tokens in (0, 256, 512, 768)
        flushed(engine)
        path.write_bytes(raw)


def test_cancelled_while_files_are_read(kept: Callable[..., Engine]) -> None:
    ids = text(900, 10)
    run(flushed(kept()), ids)
    engine = kept()
    for steps in range(4):
        stream = engine.stream(engine.request(ids, GREEDY))
        for _ in range(steps):
            engine.step()
        stream.close()
        assert engine.num_unfinished == 0 and not engine.arrivals.waiting
        assert engine.slots.num_free == 3
    assert run(engine, ids).cached_tokens == 768


def test_an_interrupted_plan_leaves_files_whole(kept: Callable[..., Engine], alone: Engine) -> None:
    """A step that raises: nothing of it is written, what was found is not lost to the next."""
    ids = text(700, 11)
    run(flushed(kept()), ids[:520])
    engine = kept()
    want = values(run(alone, ids))
    executor = engine.runner.executor
    write_pages, calls = executor.write_pages, []

    def fail(pages: tuple[int, ...], rows: torch.Tensor) -> None:
        calls.append(pages)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write_pages(pages, rows)

    executor.write_pages = fail  # type: ignore[method-assign]
    stream = engine.stream(engine.request(ids, GREEDY))
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            engine.step()
    assert values(stream.completion()) == want and calls
    flushed(engine)
    again = run(kept(), ids)
    assert again.cached_tokens == 512 and values(again) == want


def test_a_slow_disk_keeps_less_and_slows_nobody(
    kept: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4.cache.shelf.MAX_UNWRITTEN_BYTES", 100)
    engine = kept()
    run(engine, text(700, 12))
    assert engine.prefix.shelf is not None and engine.prefix.shelf.num_unkept > 2
    assert len(engine.notices) == 1 and "the disk is too slow" in engine.notices[0]


def test_a_disk_that_hangs_takes_no_memory(
    kept: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt marks its files as used, in the thread that hangs."""
    monkeypatch.setattr("dsv4.cache.shelf.MAX_UNMARKED", 10)
    engine = kept()
    shelf, answers = engine.prefix.shelf, threading.Event()
    assert shelf is not None
    marked: list[bytes] = []
    monkeypatch.setattr(shelf.folder, "touch", lambda key, *_: answers.wait(60) and marked.append(key))
    for number in range(100):
        shelf.use([bytes([number]) * 32], [1], None)
    assert len(engine.notices) == 1 and "the disk is too slow" in engine.notices[0]
    answers.set()
    flushed(engine)
    assert len(marked) == 10
    shelf.use([bytes(32)], [1], None)
    flushed(engine)
    assert len(marked) == 11, "and it goes on when the disk does"


def test_what_was_read_for_prompts_without_a_slot_is_limited(
    kept: Callable[..., Engine], alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot, three prompts: what the first has found leaves no room, and the others do without."""
    monkeypatch.setattr("dsv4.cache.shelf.MAX_FOUND_BYTES", 1000)
    monkeypatch.setattr("dsv4.cache.shelf.MAX_FOUND_SECONDS", 0.05)
    prompts = [text(300, seed) for seed in (14, 15, 16)]
    flushed(kept()).generate(prompts, GREEDY)
    engine = kept(max_batch=1)
    streams = [engine.stream(engine.request(ids, GREEDY)) for ids in prompts]
    for _, found in list(engine.arrivals._reading.items()):
        found.result()
    done = [stream.completion() for stream in streams]
    assert [one.cached_tokens for one in done] == [256, 0, 0]
    assert [values(one) for one in done] == [values(run(alone, ids)) for ids in prompts]
    assert len(engine.notices) == 1 and "bytes of others wait for slots" in engine.notices[0]


def test_settings_that_keep_nothing_are_refused(kept: Callable[..., Engine], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_snapshots 0 is none"):
        kept(prefix_snapshots=0)
    with pytest.raises(ConfigError, match="prefix_dir_bytes is 0"):
        kept(prefix_dir_bytes=0)
    (tmp_path / "kept").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        kept()


def test_snapshots_and_pages_come_back_bit_for_bit(kept: Callable[..., Engine]) -> None:
    engine = kept()
    run(engine, text(300, 13))
    cache = cache_of(engine)
    handle, snapshot = next(iter(cache.snapshots.items()))
    cache.write_snapshot(10**6, snapshot.position, cache.read_snapshot(handle))
    copy = cache.snapshots[10**6]
    assert copy.num_bytes == snapshot.num_bytes == cache.snapshot_bytes(snapshot.position)
    for a, b in zip(snapshot.parts, copy.parts, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    pages = torch.tensor([2, 0])
    before = cache.read_pages(pages)
    cache.write_pages(torch.tensor([1, 3]), before)
    assert torch.equal(cache.read_pages(torch.tensor([1, 3])), before)
    assert torch.equal(cache.read_pages(pages), before) and before.shape == (2, cache.page_bytes)


STEMS = [text(1000, seed) for seed in (30, 31)]
CUTS = st.sampled_from([1, 255, 256, 257, 511, 512, 513, 780])
PROMPTS = st.tuples(st.integers(0, 1), CUTS, st.integers(0, 2), st.sampled_from([0, 1, 70, 256]))
# "restart", "forget" (memory only), or a batch of prompts that run together.
EVENTS = st.one_of(st.sampled_from(["restart", "forget"]), st.lists(PROMPTS, min_size=1, max_size=3))


@pytest.fixture(scope="module")
def truth(alone: Engine) -> Callable[[tuple[int, ...]], tuple[object, ...]]:
    known: dict[tuple[int, ...], tuple[object, ...]] = {}

    def of(ids: tuple[int, ...]) -> tuple[object, ...]:
        if ids not in known:
            known[ids] = values(alone.generate([list(ids)], GREEDY)[0])
        return known[ids]

    return of


@pytest.fixture(scope="module")
def restarted(
    engine_for: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Engine]]:
    """Few pages, few snapshots, a small folder: everything is evicted everywhere."""
    folder = str(tmp_path_factory.mktemp("kept"))
    more = {"prefix_snapshots": 4, "cache_pages": 7, "prefix_dir": folder, "prefix_dir_bytes": 2_000_000}
    yield lambda: engine_for("official", **OPTIONS | more)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(EVENTS, min_size=2, max_size=5))
def test_hits_from_disk_equal_misses(
    restarted: Callable[[], Engine],
    truth: Callable[[tuple[int, ...]], tuple[object, ...]],
    events: list[str | list[tuple[int, int, int, int]]],
) -> None:
    engine = restarted()
    for event in events:
        if event == "restart":
            engine = restarted()
        elif event == "forget":
            engine.prefix.clear()
        else:
            prompts = [STEMS[stem][:cut] + text(more, 40 + branch) for stem, cut, branch, more in event]
            for ids, done in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
                assert values(done) == truth(tuple(ids))
            assert engine.slots.pool.num_available == engine.slots.pool.num_pages
    assert [notice for notice in engine.notices if "other users" not in notice] == []


RUN = """
import sys
from dsv4 import Engine, EngineConfig, SamplingParams
options = dict(max_context=1100, max_batch=3, chunk=300, threads=1, prefix_dir=sys.argv[2])
engine = Engine.load(sys.argv[1], EngineConfig(**options))
print("ready", flush=True)
seed = int(sys.argv[3])
while True:
    ids = [(seed * 7919 + i * i) % 300 for i in range(1000)]
    (done,) = engine.generate([ids], SamplingParams(max_tokens=2, temperature=0))
    print(seed, done.cached_tokens, *done.ids, flush=True)
    seed += 1
"""


def test_killed_engines_leave_only_whole_files(
    kept: Callable[..., Engine], alone: Engine, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Real processes, kill -9 while they compute and write; the next one goes on from what is there."""
    seen: dict[int, list[int]] = {}
    for turn in range(2):
        command = [sys.executable, "-c", RUN, str(checkpoint("official")), str(tmp_path / "kept"), "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        lines = [process.stdout.readline() for _ in range(turn + 1)]
        time.sleep(0.05 * turn)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for line in lines:
            seed, _, *ids = map(int, line.split())
            assert seen.setdefault(seed, ids) == ids
        assert turn == 0 or int(lines[0].split()[1]) > 0, "what the first has written helps the next"
    engine = kept()
    for seed, want in seen.items():
        ids = [(seed * 7919 + i * i) % 300 for i in range(1000)]
        done = run(engine, ids, SamplingParams(max_tokens=2, temperature=0))
        assert done.ids == want == run(alone, ids, SamplingParams(max_tokens=2, temperature=0)).ids
    assert engine.notices == []
