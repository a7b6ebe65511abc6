"""A token's logits depend on its own sequence alone: not on chunks, batch-mates or arrival."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.config import LayerSpec, preset
from dsv4.engine.request import Request
from dsv4.lab.init import make
from dsv4.lab.score import score_ids
from tests.conftest import THREADS
from tests.support.feeding import claim, feed, feed_all, release

TEXT = [random.Random(5).randrange(300) for _ in range(300)]


# One layer of each kind and few heads: 300 prompts of up to 300 tokens take long even so.
NARROW = replace(
    preset("tiny"),
    **{"hidden_size": 96, "vocab_size": 300, "num_heads": 2, "head_dim": 80, "rope_dim": 16, "q_rank": 48},
    **{"o_groups": 2, "o_rank": 32, "window": 40, "index_heads": 2, "index_dim": 32, "index_topk": 12},
    **{"num_experts": 3, "expert_width": 64, "num_streams": 2, "num_mtp_layers": 0, "max_positions": 4096},
    layers=(LayerSpec("sliding", 0, True), LayerSpec("csa", 4, False), LayerSpec("hca", 128, False)),
)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow") / "model"
    for _ in make(folder, NARROW, "modelopt", seed=3):
        pass
    return folder


@pytest.fixture(scope="module")
def engine(narrow: Path) -> Engine:
    return Engine.load(narrow, EngineConfig(max_batch=16, max_context=512, chunk=512))


@pytest.fixture(scope="module")
def one_shot(engine: Engine) -> Tensor:
    """Logits of all 300 positions from one prefill."""
    return score_ids(engine, TEXT, 300)["prefill_logits"]


# Around the window's and the blocks' ends each length, elsewhere one in seven: each remainder of 4.
LENGTHS = [n for n in range(1, 301) if n <= 48 or abs(n - 128) <= 6 or abs(n - 256) <= 6 or n % 7 == 0]
REST = sorted({*range(1, 301)} - {*LENGTHS})


@pytest.mark.parametrize(
    "lengths",
    [
        *(LENGTHS[at::4] for at in range(4)),
        *(pytest.param(REST[at::8], marks=pytest.mark.slow) for at in range(8)),
    ],
    ids=lambda lengths: f"{len(lengths)} from {lengths[0]}",
)
def test_every_prompt_length(engine: Engine, one_shot: Tensor, lengths: list[int]) -> None:
    """A prompt of every length, then a generated token; 3 mod 4 is where others are known to fail."""
    for length in lengths:
        slot = claim(engine, 300)
        try:
            assert torch.equal(feed(engine, slot, 0, TEXT[:length]), one_shot[:length]), length
            for position in range(length, min(300, length + 1)):
                got = feed(engine, slot, position, TEXT[position : position + 1])
                assert torch.equal(got[0], one_shot[position]), (length, position)
        finally:
            release(engine, slot)


def test_every_split_into_prompt_and_generated(engine: Engine, one_shot: Tensor) -> None:
    """Each prompt in a step of its own; then the generated parts side by side, a token of each in a step,
    until each has passed the end of a block and the next prompt's beginning."""
    slots = {prompt: claim(engine, 300) for prompt in (1, 3, 4, 7, 41, 127, 128, 131, 255, 256, 299)}
    for prompt, slot in slots.items():
        assert torch.equal(feed(engine, slot, 0, TEXT[:prompt]), one_shot[:prompt]), prompt
    for step in range(140):
        spans = [(slot, p + step, [TEXT[p + step]]) for p, slot in slots.items() if p + step < 300]
        got = feed_all(engine, spans)
        want = one_shot[[position for _, position, _ in spans]]
        assert torch.equal(got, want), [position for _, position, _ in spans]
    release(engine, *slots.values())


# Token by token is how test_every_split_into_prompt_and_generated goes on after its prompts.
@pytest.mark.parametrize(
    "sizes",
    [
        *(pytest.param((n,), marks=pytest.mark.slow) for n in (1, 2)),
        (3,),
        (10, 17, 5, 30, 7),
        (127, 1),
        (128,),
        (131,),
    ],
    ids=str,
)
def test_any_chunking(engine: Engine, one_shot: Tensor, sizes: tuple[int, ...]) -> None:
    slot = claim(engine, 300)
    start, turn = 0, 0
    while start < 300:
        size = min(sizes[turn % len(sizes)], 300 - start)
        stop = start + size
        assert torch.equal(feed(engine, slot, start, TEXT[start:stop]), one_shot[start:stop])
        start, turn = stop, turn + 1
    release(engine, slot)


@pytest.mark.parametrize("options", [{}, {"activations": "a8"}, {"activations": "a4"}, {"qat": "off"},
                                     {"compute_dtype": "bfloat16"}, {"cache": "bf16"}], ids=str)  # fmt: skip
def test_alone_and_among_seven_others(
    engine_for: Callable[..., Engine], narrow: Path, options: dict[str, Any]
) -> None:
    """Mixed steps: each sequence is at another position, some in their prompt, some generating."""
    if options:
        engine = Engine.load(narrow, EngineConfig(max_context=512, threads=THREADS, **options))
    else:
        engine = engine_for("modelopt")
    rng = random.Random(1)
    texts = [[rng.randrange(300) for _ in range(rng.randrange(130, 160))] for _ in range(8)]
    alone = [score_ids(engine, ids, len(ids))["prefill_logits"] for ids in texts]
    slots = [claim(engine, 160) for _ in texts]
    done = [0] * 8
    while any(done[i] < len(texts[i]) for i in range(8)):
        order = rng.sample(range(8), rng.randrange(1, 9))
        spans = []
        for i in order:
            count = min(rng.choice((1, 1, 2, 5, 40)), len(texts[i]) - done[i])
            if count:
                spans.append((slots[i], done[i], texts[i][done[i] : done[i] + count]))
        if not spans:
            continue
        logits = feed_all(engine, spans)
        row = 0
        for slot, start, ids in spans:
            i = slots.index(slot)
            assert torch.equal(logits[row : row + len(ids)], alone[i][start : start + len(ids)]), (i, start)
            row, done[i] = row + len(ids), start + len(ids)
    release(engine, *slots)


def test_requests_do_not_see_each_other(engine_for: Callable[..., Engine]) -> None:
    """The public path: sampled tokens and logprobs of 8 requests, in any order, equal each alone."""
    rng = random.Random(2)
    params = [SamplingParams(max_tokens=6, temperature=t, seed=s, top_p=0.9, logprobs=3, ignore_eos=True)
              for s, t in enumerate((0.0, 0.7, 1.0, 1.5) * 2)]  # fmt: skip
    prompts = [tuple(rng.randrange(300) for _ in range(rng.randrange(1, 90))) for _ in params]
    requests = [Request(f"q{i}", ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    engine = engine_for("modelopt", max_batch=3, chunk=16)
    alone = {r.id: engine.generate([r])[0] for r in requests}
    for order in (requests[::-1], rng.sample(requests, 8)):
        for done in engine.generate(order):
            assert done == alone[done.request_id]
    assert engine.slots.pool.num_available == engine.slots.pool.num_pages
