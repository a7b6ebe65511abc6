"""Several threads of one process: one engine for all of them, or an engine for each."""

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsv4 import Engine, SamplingParams
from dsv4.engine.output import Output
from dsv4.engine.request import Delta, Request, Sequence, Token
from dsv4.engine.stream import Stream

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(300) for _ in range(DRAW.randrange(1, 60))] for _ in range(16)]
PARAMS = SamplingParams(max_tokens=7, seed=3, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, seed=3, ignore_eos=True)
ENDS: dict[str, Callable[[Output], object]] = {
    "token": lambda output: output.advance([Token(5)]),
    "cancelled": lambda output: output.end("cancelled"),
}
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


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_the_last_delta_is_not_missed(ends: Callable[[Output], object]) -> None:
    """Another thread's step ends the sequence at the two moments at which a reader could miss its delta."""
    sequence = Sequence(0, Request("r", (1,), ONE), seed=0, max_tokens=1, stop_ids=frozenset())
    output = Output(sequence, None)

    class Deltas(deque[Delta]):
        def append(self, delta: Delta) -> None:
            assert not stream.is_done, "before its delta is there"
            super().append(delta)

        def __len__(self) -> int:
            found = super().__len__()
            if waiting:
                waiting.pop()
                ends(output)
            return found

    waiting = [1]
    output.deltas = Deltas()
    stream = Stream(None, output)  # type: ignore[arg-type] - runs no step
    assert not stream.is_done, "as it was when it was asked"
    assert not output.deltas, "and now there is one"
    assert next(stream).finish_reason and stream.is_done
