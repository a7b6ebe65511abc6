"""Who reads when, in plans alone: short prompts pass long ones, within bounds, and nothing locks up."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from queueing import PAGE, Queue

from dsv4.engine.scheduler import OLDEST_SHARE, OVERTAKING


def test_a_short_prompt_passes_a_long_one() -> None:
    queue = Queue(context=1 << 17)
    long = queue.add(100_000)
    queue.step(limit=64)
    short = queue.add(20)
    queue.step(limit=64)
    assert queue.first_step[short.number] == 2, "read in the very next step"
    assert long.num_processed > 512, "and the long one has what was left of that step"
    # One after the other, each as long as a whole step may be: the long one still has its turns.
    read = long.num_processed
    for _ in range(40):
        queue.add(64, max_tokens=1)
        queue.step(limit=64)
    assert long.num_processed - read >= 40 * (64 // OLDEST_SHARE) - 5 * 32, "or less before a page's end"


def test_short_prompts_that_never_cease_pass_a_long_one_so_often_and_no_more() -> None:
    """Two slots and more arrivals than they can serve: a prompt of 16 pages waits, and then is read."""
    queue = Queue(slots=2, context=32 * PAGE)
    for _ in range(2):
        queue.add(30, max_tokens=3)
    queue.step(limit=64)
    long = queue.add(16 * PAGE)
    admitted = read = 0
    for _ in range(1000):
        if long.number not in queue.alive:
            break
        queue.add(30, max_tokens=2)
        queue.step(limit=64)
        admitted = admitted or (long.slot is not None and queue.num_steps)
        read = read or (len(long.tokens) > 0 and queue.num_steps)
    before = queue.admitted[: queue.admitted.index(long.number)]
    passed = [number for number in before if number > long.number]
    assert len(passed) == 4 * OVERTAKING - 1, "four doublings; the last of those requests would be its equal"
    assert passed == sorted(passed), "those of one size keep their order"
    # Two slots, three steps each; and half of a step's 64 tokens, or less at the ends of 16 pages.
    assert admitted <= 1 + 2 * (len(passed) + 2)
    assert read - admitted <= 16 * PAGE // (64 // OLDEST_SHARE) + 16 + 1


def test_whoever_reads_alone_reads_whole_chunks() -> None:
    queue = Queue(chunk=2048)
    queue.add(6000)
    queue.add(9000)
    assert sum(len(span.ids) for span in queue.step(limit=64).prefill) > 1024, "nobody is about to answer"
    queue.add(30, max_tokens=3)
    for _ in range(3):
        assert sum(len(span.ids) for span in queue.step(limit=64).prefill) <= 64
    assert sum(len(span.ids) for span in queue.step(limit=64).prefill) > 1024


@pytest.mark.parametrize("seed", range(12))
def test_no_prompt_is_passed_for_ever(seed: int) -> None:
    """Any arrivals, cancels, limits and page counts: each of the two rules keeps its bound, and all end.

    The oldest that is read has a share of each step, so it is read to its end in a number of steps that
    depends on its length alone; and whoever waits lets a number of later ones pass that depends on it too.
    """
    chance = random.Random(seed)
    least = chance.choice([16, 100, 300])
    queue = Queue(slots=chance.randint(1, 6), pages=chance.choice([None, 40, 60]), chunk=512)
    began: dict[int, tuple[int, int]] = {}  # of a reader, since it is the oldest: step, tokens left
    passed: Counter[int] = Counter()  # of those that waited: how many later ones were admitted before them
    for _ in range(700):
        if chance.random() < 0.4 and len(queue.alive) < 30:
            queue.add(chance.choice([5, 60, 300, 460, 2000, 9000]), chance.choice([1, 5, 40, 250]))
        if queue.alive and chance.random() < 0.02:
            queue.scheduler.finish(queue.alive.pop(chance.choice(list(queue.alive))))
        if not queue.alive:
            continue
        pauses, before = queue.scheduler.num_pauses, len(queue.admitted)
        queue.step(chance.choice([least, least, 2 * least, None]))
        for s in queue.scheduler.waiting:
            if s.num_cached is None:
                passed[s.number] += sum(number > s.number for number in queue.admitted[before:])
                doublings = (-(-s.num_prompt // PAGE)).bit_length() - 1
                assert passed[s.number] <= OVERTAKING * doublings, s
        readers = [s for s in queue.scheduler.running if s.num_processed < s.num_prompt]
        if queue.scheduler.num_pauses != pauses:
            began.clear()
        if readers:
            s = min(readers, key=lambda s: s.number)
            step, left = began.setdefault(s.number, (queue.num_steps, s.num_prompt - s.num_processed))
            # A run may also end at a page's end, or where prompts part.
            turns = -(-left // -(-least // OLDEST_SHARE)) + left // PAGE + 2
            assert queue.num_steps - step <= turns, (s.number, left)
            began = {s.number: began[s.number]}
    while queue.alive:
        queue.step(least)
    assert queue.slots.pool.num_available == queue.slots.pool.num_pages


def test_half_read_prompts_do_not_wait_for_each_others_pages() -> None:
    """Three prompts that fill the cache between them, read in turns, and a fourth that waits for pages."""
    queue = Queue(slots=6, pages=3 * 40)
    long = [queue.add(10_000, max_tokens=100) for _ in range(4)]
    queue.step(limit=300)
    assert [s.slot is not None for s in long] == [True, True, True, False]
    for _ in range(200):
        queue.add(chance := 30 + queue.num_steps % 50, max_tokens=2)
        queue.step(limit=100 + chance)
    while queue.alive:
        queue.step(limit=300)
    assert queue.slots.pool.num_available == queue.slots.pool.num_pages


def test_small_chunks_make_no_more_snapshots() -> None:
    """A long prompt beside others keeps as many places to resume from as alone, its last page among them."""
    found = []
    for limit in (None, 256, 64):
        queue = Queue(chunk=2048, snapshots=64)
        beside = queue.add(10, max_tokens=1000)
        queue.step()
        s = queue.add(9000, max_tokens=1)
        while s.number in queue.alive:
            queue.step(limit)
        prefix = queue.scheduler.prefix
        again = prefix.claim(99, "", s.request.ids, 9001)
        assert again is not None and again.position == 9000 // PAGE * PAGE
        found.append(prefix.num_snapshots)
        queue.scheduler.finish(beside)
    assert found == [5, 5, 5]


def test_a_kept_page_above_one_in_use_is_no_reason_to_pause() -> None:
    """Two read the same prompt at once, each into pages of its own. The first one's is kept, and below it the
    second one's next page: when the first has ended, its page is idle and yet has somebody below it."""
    queue = Queue(slots=2, pages=6, context=6 * PAGE, chunk=2 * PAGE)
    first, second = (queue.add(2 * PAGE - 70, max_tokens=limit) for limit in (71, 4 * PAGE))
    second.request = replace(second.request, ids=first.request.ids)
    while second.number in queue.alive:
        queue.step()
    assert queue.scheduler.num_pauses == 0
    assert queue.slots.pool.num_available == queue.slots.pool.num_pages


def test_a_cancel_in_the_queue_does_not_bring_back_who_was_paused() -> None:
    """It frees nothing: the one that was paused for lack of pages would soon be paused again."""
    queue = Queue(slots=3, pages=6, context=6 * PAGE, chunk=2 * PAGE)
    first = queue.add(2 * PAGE - 70, max_tokens=3 * PAGE)
    queue.add(PAGE + 40, max_tokens=PAGE)
    for _ in range(40):
        queue.step()
    again = queue.add(2 * PAGE - 70, max_tokens=PAGE)
    again.request = replace(again.request, ids=first.request.ids)
    while not queue.scheduler.num_pauses:
        queue.step()
    assert again.slot is None and queue.scheduler.waiting[0] is again
    queue.scheduler.finish(queue.alive.pop(queue.add(20).number))
    queue.step()
    assert again.slot is None, "no page has come free"
