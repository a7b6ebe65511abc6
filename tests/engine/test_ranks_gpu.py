"""Two ranks as processes: decode graphs whose sums go through each other's memory. On one GPU they take
turns, slowly: a rank that waits keeps the other from running until its turn ends. Right all the same."""

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.config import LayerSpec, preset
from dsv4.engine.settings import _Needs
from dsv4.errors import DeviceError
from dsv4.lab.score import score_ids
from dsv4.weights.load import Checkpoint
from tests.parallel.ranks_support import rank_pids, wait
from tests.parallel.test_shards import WIDE
from tests.support.checkpoints import write_model
from tests.support.stress import cases, stress, truth

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
SMALL = replace(WIDE, num_streams=4, hidden_size=256, num_experts=6)
WHOLE = {"expert_parallel": True}
FLASH = replace(
    preset("flash"),
    **{"vocab_size": 2048, "num_experts": 8, "num_mtp_layers": 0, "index_topk": 16},
    layers=(LayerSpec("csa", 4, False), LayerSpec("hca", 128, False)),
)


@contextmanager
def engine_on(folder: Path, ranks: int, **options: object) -> Iterator[Engine]:
    """Ranks share a GPU where there are fewer; torch and `--gpus` refuse that but for tests."""
    settings = {"max_context": 1024, "max_batch": 8, "device": "cuda", "rank_seconds": 60.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks)]
        patch.setattr("dsv4.engine.engine.rank_devices", lambda config, world: devices)
        engine = Engine.load(folder, EngineConfig(**settings | options))  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "small", "modelopt", SMALL)


def test_logits_of_one_and_two(small: Path) -> None:
    """In float32: the sums have another order on two ranks, by width or with whole experts, and nothing else
    differs."""
    ids = [random.Random(5).randrange(SMALL.vocab_size) for _ in range(180)]
    found = []
    for ranks, how in ((1, {}), (2, {}), (2, WHOLE)):
        with engine_on(small, ranks, compute_dtype="float32", **how) as engine:
            assert type(engine.runner.executor).__name__ == "Graphs"
            found.append(score_ids(engine, ids, 140))
    for name in ("prefill_logits", "decode_logits"):
        want = found[0][name]
        for how, scores in (("by width", found[1]), ("whole experts", found[2])):
            error = float(((scores[name] - want).norm(dim=1) / want.norm(dim=1)).max())
            print(f"{name}, {how}: {error:.1e}")
            assert error < 2e-3, (name, how)


def arrive(folder: Path, vocab: int, requests: int, tokens: int, **options: object) -> None:
    """Batches of eight, random arrivals: every answer is that of the request alone, on two ranks as well."""
    with engine_on(folder, 2, **options) as engine:
        wanted = cases(6, vocab, page=256)
        wanted = [(ids, replace(params, max_tokens=min(params.max_tokens, 60))) for ids, params in wanted]
        answers = truth(engine, wanted)
        begin = time.perf_counter()
        compared = stress(engine, wanted, answers, requests)
        done = sum(len(answers[i % len(answers)].tokens) for i in range(compared))
        print(f"{compared} answers, about {done} tokens in {time.perf_counter() - begin:.1f} s")
        params = SamplingParams(max_tokens=-(-tokens // 8), temperature=1.0, seed=7, ignore_eos=True)
        begin = time.perf_counter()
        made = engine.generate([[5 + i, 9, 7 * i % vocab] for i in range(8)], params)
        count = sum(len(completion.ids) for completion in made)
        print(f"{count} tokens of eight in {time.perf_counter() - begin:.1f} s: chosen alike by both ranks")
        assert count >= tokens


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "flash", "modelopt", FLASH)


@pytest.mark.parametrize("how", [{}, WHOLE], ids=["width", "whole experts"])
def test_random_arrivals(small: Path, how: dict[str, bool]) -> None:
    arrive(small, SMALL.vocab_size, requests=12, tokens=400, **how)


@pytest.mark.parametrize("how", [{}, WHOLE], ids=["width", "whole experts"])
def test_flash_widths(flash: Path, how: dict[str, bool]) -> None:
    arrive(flash, FLASH.vocab_size, requests=12, tokens=2000, **how)


def test_a_rank_takes_what_was_counted(tmp_path: Path) -> None:
    """Wide enough that no part is lost in the allocator's rounding to 512 bytes."""
    sizes = {"hidden_size": 2048, "expert_width": 1024, "num_heads": 16, "vocab_size": 32768, "o_rank": 128}
    shape = replace(preset("tiny"), **sizes)  # type: ignore[arg-type]
    folder = write_model(tmp_path / "model", "modelopt", shape)
    checkpoint = Checkpoint.open(folder)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with engine_on(folder, 2) as engine:
        peers = engine.runner.executor.peers  # type: ignore[attr-defined]
        taken = torch.cuda.memory_allocated() - before + peers.inbox.nbytes  # which torch does not count
        share = checkpoint.shard(0, 2)
        counted = _Needs(engine.settings, engine.config, share, 2).memory(spills=False).at_rest
    print(f"at rest: counted {counted:,}, taken {taken:,}")
    assert abs(counted - taken) <= 0.03 * taken


@pytest.mark.parametrize(
    ("number", "words", "most"),
    [(signal.SIGKILL, r"rank 1 has died \(signal 9\)", 5), (signal.SIGSTOP, "rank 1 did not answer", 16)],
)
def test_a_lost_rank(small: Path, number: int, words: str, most: float) -> None:
    """Its peer's graph waits for it on the GPU: an error soon after, and nobody is left."""
    with engine_on(small, 2, rank_seconds=8.0, max_batch=1, max_context=512) as engine:
        (rank,) = rank_pids()
        began: list[float] = []

        def act() -> None:
            began.append(time.monotonic())
            os.kill(rank, number)

        engine.submit(engine.request([1, 2, 3], SamplingParams(max_tokens=480, ignore_eos=True)))
        for _ in range(3):
            engine.step()
        threading.Timer(0.3, act).start()
        with pytest.raises(DeviceError, match=words):
            while True:
                engine.step()
        took = time.monotonic() - began[0]
        print(f"{took:.2f} s")
        assert took < most
        wait(lambda: rank_pids() == [], 5)
        torch.cuda.synchronize()  # no kernel is left waiting
