"""Arrivals, cancels, failures and limits as hypothesis finds them: all end, in time, and nothing is lost.

The bound, in steps. Before request i are: all that came earlier, and those of the OVERTAKING later ones for
each doubling of its pages. With R(j) = tokens of j / half of a step's + pages of j + 2, i has its first token
within

    R(i) + the sum of R(j) + max_tokens(j) over those before it.

For until i has its slot, either the oldest that reads has its share of a step, or all that run generate; and
then the oldest is i or came earlier. A step without prompts (limit 0) adds one, and a pause what is processed
again. Whoever generates has a token in every step, unless it is paused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from fake_device import PAGE, VOCAB
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from loop import Loop, expected

from dsv4.engine.plan import Span
from dsv4.engine.request import Sequence
from dsv4.engine.scheduler import OLDEST_SHARE, OVERTAKING

CONTEXT, CHUNK = 96, 20


class Interrupt(BaseException):
    """As a signal's: the plan was not carried out to its end."""


@dataclass(frozen=True)
class Arrive:
    stem: int
    shared: int
    own: int
    max_tokens: int
    temperature: float
    grammar: bool
    presence: float


@dataclass(frozen=True)
class Cancel:
    which: int


@dataclass(frozen=True)
class Go:
    limit: int | None
    fails: str  # "", prefill or decode: the pass cannot be launched; interrupt: neither can


ARRIVALS = st.builds(
    Arrive,
    stem=st.integers(0, 1),
    shared=st.sampled_from([0, 1, PAGE, 2 * PAGE + 1, 5 * PAGE]),
    own=st.sampled_from([1, 2, PAGE, 20]),
    max_tokens=st.sampled_from([1, 9, 25, 36, 36]),
    temperature=st.sampled_from([0.0, 0.7]),
    grammar=st.booleans(),
    presence=st.sampled_from([0.0, 0.5]),
)
LIMITS = st.sampled_from([None, 0, 1, 4, 7, 19])
STEPS = st.builds(Go, limit=LIMITS, fails=st.sampled_from([""] * 12 + ["prefill", "decode", "interrupt"]))
CANCELS = st.builds(Cancel, which=st.integers(0, 30))


@st.composite
def lives(draw: st.DrawFn, most: int) -> tuple[Loop, list[Arrive | Cancel | Go]]:
    slots = draw(st.integers(1, 6))
    loop = Loop(
        slots=slots,
        context=CONTEXT,
        pages=draw(st.sampled_from([CONTEXT // PAGE, CONTEXT // PAGE + 3, None])),
        snapshots=draw(st.sampled_from([0, 1, 5])),
        same_bits=draw(st.booleans()),
    )
    arrivals = draw(st.lists(ARRIVALS, min_size=slots, max_size=slots + 3))
    return loop, [
        *arrivals,
        *draw(st.lists(st.one_of(ARRIVALS, STEPS, STEPS, STEPS, CANCELS), max_size=most)),
    ]


class Bounds:
    """How many steps each request may still wait for its first token, counted down."""

    def __init__(self, loop: Loop, least: int) -> None:
        self.loop, self.share = loop, -(-least // OLDEST_SHARE)
        self.left: dict[int, int] = {}

    def turns(self, tokens: int) -> int:
        return -(-tokens // self.share) + tokens // PAGE + 2

    def whole(self, s: Sequence) -> int:
        return self.turns(s.num_prompt) + s.max_tokens

    def arrive(self, s: Sequence) -> None:
        earlier = [other for other in self.loop.alive.values() if other is not s]
        self.left[s.number] = self.turns(s.num_prompt) + sum(map(self.whole, earlier))
        for other in earlier:
            doublings = self.loop.slots.pages_for(other.num_prompt).bit_length() - 1
            if s.number < other.number + OVERTAKING * doublings:
                self.left[other.number] += self.whole(s)

    def step(self, limit: int | None, do: Callable[[], None]) -> None:
        known = {s.number: (s.num_known, len(s.tokens)) for s in self.loop.scheduler.running}
        do()
        paused = [known[s.number] for s in self.loop.scheduler.waiting if s.number in known]
        again = sum(self.turns(tokens) + generated for tokens, generated in paused)
        for s in self.loop.alive.values():
            if not s.tokens:
                self.left[s.number] += again - (limit != 0)
                assert self.left[s.number] >= 0, f"{s.number} waits for longer than those before it can take"


def check(loop: Loop) -> None:
    """Slots and pages belong to whoever runs, and to nobody else."""
    running, waiting = loop.scheduler.running, loop.scheduler.waiting
    assert {s.number for s in [*running, *waiting]} == loop.alive.keys()
    assert len({s.slot for s in running}) == len(running) == len(loop.slots._pages) - loop.slots.num_free
    assert all(s.slot is None and s.node is None and s.num_processed == 0 for s in waiting)
    assert all(loop.slots.capacity(s.slot) >= s.num_processed for s in running)  # type: ignore[arg-type]
    held = [loop.slots._pages[s.slot] for s in running]  # type: ignore[index]
    pool = loop.slots.pool
    assert len({page for pages in held for page in pages or ()}) == pool.num_pages - pool.num_available


def live(loop: Loop, events: list[Arrive | Cancel | Go]) -> None:
    """With pages for two tokens ahead, sequences pause often."""
    with patch("dsv4.engine.scheduler.HEADROOM", 2):
        _live(loop, events)


def _live(loop: Loop, events: list[Arrive | Cancel | Go]) -> None:
    limits = [each.limit or CHUNK for each in events if isinstance(each, Go)]
    bounds = Bounds(loop, least=min([*limits, CHUNK]))
    submitted: list[Sequence] = []
    slots = loop.slots.num_free

    def go(event: Go) -> None:
        def fails(what: str, spans: tuple[Span, ...]) -> bool:
            if event.fails == "interrupt":
                raise Interrupt
            return what == event.fails

        def do() -> None:
            loop.device.fails = fails
            try:
                loop.step(event.limit)
            except Interrupt:
                return
            assert loop.plans[-1].spans, "somebody waits and nobody runs"

        running = loop.scheduler.running
        generating = [s for s in running if s.num_processed >= loop.scheduler._end_of_prompt(s)]
        due = {s: s.num_processed + 1 for s in generating}
        bounds.step(event.limit, do)
        if not event.fails:
            assert all(s.num_processed == due.get(s, s.num_processed) for s in loop.scheduler.running)
        check(loop)

    for each in events:
        if isinstance(each, Arrive):
            ids = [(each.stem * 31 + at * at) % VOCAB for at in range(each.shared)]
            ids += [(len(submitted) * 17 + at) % VOCAB for at in range(each.own)]
            s = loop.add(ids, each.max_tokens, each.temperature, each.grammar, each.presence)
            submitted.append(s)
            bounds.arrive(s)
        elif isinstance(each, Cancel):
            if each.which in loop.alive:
                loop.end(loop.alive[each.which], "cancelled")
                check(loop)
        elif loop.alive:
            go(each)
    while loop.alive:
        go(Go(limit=None, fails=""))
    event(f"{min(3, loop.scheduler.num_pauses)} pauses")
    for s in submitted:
        assert [token.id for token in s.tokens] == expected(s), (s.number, s.finish_reason)
    pool = loop.slots.pool
    assert pool.num_available == pool.num_pages and loop.slots.num_free == slots
    loop.runner.apply(loop.scheduler.changes(), loop.mask)
    loop.device.finish()
    assert loop.device.snapshots.keys() == set(loop.prefix._snapshots.values())


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(life=lives(most=40))
def test_all_end_in_time(life: tuple[Loop, list[Arrive | Cancel | Go]]) -> None:
    live(*life)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(life=lives(most=150))
def test_all_end_in_time_at_length(life: tuple[Loop, list[Arrive | Cancel | Go]]) -> None:
    live(*life)
