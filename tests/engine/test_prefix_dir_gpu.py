"""Prefixes kept in files on a GPU: a hit from disk is one from memory, bit for bit, while others generate."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.weights.checksum import checksum
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)


def text(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300) for _ in range(length)]


def busy(engine: Engine, prompts: list[list[int]]) -> list[tuple[object, int]]:
    """The prompts, each arriving while another sequence generates: (tokens, cached tokens) of each."""
    noise = SamplingParams(max_tokens=60, temperature=0.9, seed=5, ignore_eos=True)
    streams = [engine.stream(engine.request(text(30, 1), noise))]
    for ids in prompts:
        for _ in range(3):
            engine.step()
        streams.append(engine.stream(engine.request(ids, PARAMS)))
    done = [stream.completion() for stream in streams]
    if engine.prefix.shelf is not None:
        engine.prefix.shelf.flush()
    return [(one.tokens, one.cached_tokens) for one in done[1:]]


def test_hits_from_files_equal_hits_from_memory(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def started() -> Engine:
        options = {"max_context": 1024, "max_batch": 4, "chunk": 300, "prefix_dir": str(tmp_path / "kept")}
        return Engine.load(checkpoint("modelopt"), EngineConfig(device="cuda", **options))  # type: ignore[arg-type]

    prompts = [text(length, seed) for seed, length in enumerate((700, 513, 900))]
    engine = started()
    cold = busy(engine, prompts)
    assert [cached for _, cached in cold] == [0, 0, 0]
    memory = busy(engine, prompts)
    assert [cached for _, cached in memory] == [512, 512, 768]
    again = started()
    assert busy(again, prompts) == memory and again.notices == []
    again.prefix.clear()
    assert busy(again, prompts) == memory, "from files into pages that others have used"


def test_the_checksum_of_tiles_sees_one_bit(checkpoint: Callable[..., Path]) -> None:
    weights = load_tiled(Checkpoint.open(checkpoint("modelopt")), "cuda")
    before = checksum(weights)
    bank = next(held for name, held in weights.tensors.items() if name.endswith("experts"))
    data = bank.w2.data.view(-1)
    data[-1] ^= 1
    assert checksum(weights) != before
    data[-1] ^= 1
    assert checksum(weights) == before
