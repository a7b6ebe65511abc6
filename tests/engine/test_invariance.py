"""A token's logits depend on its own sequence alone: not on chunks, batch-mates or arrival."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.engine.request import Request
from dsv4.lab.score import score_ids
from dsv4.model.step import Step

TEXT = [random.Random(5).randrange(300) for _ in range(300)]


@pytest.fixture(scope="module")
def engine(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("modelopt", chunk=512)


@pytest.fixture(scope="module")
def one_shot(engine: Engine) -> Tensor:
    """Logits of all 300 positions from one prefill."""
    return score_ids(engine, TEXT, 300)["prefill_logits"]


def feed(engine: Engine, slot: int, start: int, ids: list[int]) -> Tensor:
    model = engine.runner.model
    return model.logits(model.forward(Step.build([(slot, start, ids)], "cpu"), engine.cache))


@pytest.mark.parametrize("block", range(10))
def test_every_prompt_length(engine: Engine, one_shot: Tensor, block: int) -> None:
    """A prompt of every length, then a generated token; 3 mod 4 is where others are known to fail."""
    for length in range(block * 30 + 1, block * 30 + 31):
        slot = engine.cache.claim(300)
        assert slot is not None
        try:
            assert torch.equal(feed(engine, slot, 0, TEXT[:length]), one_shot[:length]), length
            for position in range(length, min(300, length + 1)):
                got = feed(engine, slot, position, TEXT[position : position + 1])
                assert torch.equal(got[0], one_shot[position]), (length, position)
        finally:
            engine.cache.release(slot)


@pytest.mark.parametrize("prompt", [1, 3, 4, 7, 41, 127, 128, 131, 255, 256, 299])
def test_every_split_into_prompt_and_generated(engine: Engine, one_shot: Tensor, prompt: int) -> None:
    parts = score_ids(engine, TEXT, prompt)
    assert torch.equal(parts["prefill_logits"], one_shot[:prompt])
    assert torch.equal(parts["decode_logits"], one_shot[prompt:])


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (10, 17, 5, 30, 7), (127, 1), (128,), (131,)], ids=str)
def test_any_chunking(engine: Engine, one_shot: Tensor, sizes: tuple[int, ...]) -> None:
    slot = engine.cache.claim(300)
    assert slot is not None
    start, turn = 0, 0
    while start < 300:
        size = min(sizes[turn % len(sizes)], 300 - start)
        stop = start + size
        assert torch.equal(feed(engine, slot, start, TEXT[start:stop]), one_shot[start:stop])
        start, turn = stop, turn + 1
    engine.cache.release(slot)


@pytest.mark.parametrize("options", [{}, {"activations": "a8"}, {"activations": "a4"}, {"qat": "off"},
                                     {"compute_dtype": "bfloat16"}, {"cache": "bf16"}], ids=str)  # fmt: skip
def test_alone_and_among_seven_others(engine_for: Callable[..., Engine], options: dict[str, str]) -> None:
    """Mixed steps: each sequence is at another position, some in their prompt, some generating."""
    engine = engine_for("modelopt", **options)
    rng = random.Random(1)
    texts = [[rng.randrange(300) for _ in range(rng.randrange(130, 200))] for _ in range(8)]
    alone = [score_ids(engine, ids, len(ids))["prefill_logits"] for ids in texts]
    model, cache = engine.runner.model, engine.cache
    slots = [cache.claim(200) for _ in texts]
    done = [0] * 8
    while any(done[i] < len(texts[i]) for i in range(8)):
        order = rng.sample(range(8), rng.randrange(1, 9))
        spans = []
        for i in order:
            count = min(rng.choice((1, 1, 1, 2, 5, 40)), len(texts[i]) - done[i])
            if count:
                spans.append((slots[i], done[i], texts[i][done[i] : done[i] + count]))
        if not spans:
            continue
        logits = model.logits(model.forward(Step.build(spans, "cpu"), cache))
        row = 0
        for slot, start, ids in spans:
            i = slots.index(slot)
            assert torch.equal(logits[row : row + len(ids)], alone[i][start : start + len(ids)]), (i, start)
            row, done[i] = row + len(ids), start + len(ids)
    for slot in slots:
        cache.release(slot)


def test_requests_do_not_see_each_other(engine_for: Callable[..., Engine]) -> None:
    """The public path: sampled tokens and logprobs of 12 requests, in any order, equal each alone."""
    rng = random.Random(2)
    params = [SamplingParams(max_tokens=12, temperature=t, seed=s, top_p=0.9, logprobs=3, ignore_eos=True)
              for s, t in enumerate((0.0, 0.7, 1.0, 1.5) * 3)]  # fmt: skip
    prompts = [tuple(rng.randrange(300) for _ in range(rng.randrange(1, 90))) for _ in params]
    requests = [Request(f"q{i}", ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    engine = engine_for("modelopt", max_batch=3, chunk=16)
    alone = {r.id: engine.generate([r])[0] for r in requests}
    for order in (requests, requests[::-1], rng.sample(requests, 12)):
        for done in engine.generate(order):
            assert done == alone[done.request_id]
    assert engine.cache.pool.num_available == engine.cache.pool.num_pages
