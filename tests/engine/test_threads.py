"""Several threads of one process: one engine for all of them, or an engine for each."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsv4 import Engine, SamplingParams

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(300) for _ in range(DRAW.randrange(1, 60))] for _ in range(16)]
PARAMS = SamplingParams(max_tokens=7, seed=3, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, seed=3, ignore_eos=True)
THREADS = 4
pytestmark = pytest.mark.usefixtures("impatient")


def answers(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in engine.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def want(engine_for: Callable[..., Engine]) -> list[tuple[int, ...]]:
    return answers(engine_for("modelopt", max_batch=3), PROMPTS)


def test_one_engine_for_all(engine_for: Callable[..., Engine], want: list[tuple[int, ...]]) -> None:
    engine = engine_for("modelopt", max_batch=3)

    def run(number: int) -> list[tuple[int, ...]]:
        with engine.stream(engine.request(PROMPTS[number], PARAMS)) as stream:
            next(stream)  # and is closed early, while others run steps
        for _ in range(20):  # ended by the step that begins with it, which may be another's
            assert len(engine.generate([PROMPTS[0]], ONE)[0].tokens) == 1
        return answers(engine, PROMPTS[number::THREADS])

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(run, range(THREADS)))
    assert found == [want[number::THREADS] for number in range(THREADS)]
    assert engine.num_unfinished == 0 and engine.slots.num_free == 3


def test_an_engine_for_each(engine_for: Callable[..., Engine], want: list[tuple[int, ...]]) -> None:
    """Built at once and run at once, with threads of their own."""

    def run(number: int) -> list[tuple[int, ...]]:
        engine = engine_for("modelopt", max_batch=3, threads=1 + number % 2)
        return answers(engine, PROMPTS[:4])

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(run, range(THREADS))) == [want[:4]] * THREADS
