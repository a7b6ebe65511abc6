"""Who runs in this step. Knows slots and pages as integers, and writes plans; touches no tensor."""

from collections import deque
from dataclasses import replace

from dsv4.cache.prefix import PrefixCache
from dsv4.cache.slots import Slots
from dsv4.engine.plan import Claim, Copy, Penalise, Plan, Restore, Save, Span
from dsv4.engine.request import Sequence
from dsv4.engine.speculation import NO_WISH, Speculation, Wish

# Tokens a sequence must have room for beyond what it has to process, so that it does not soon have to pause.
HEADROOM = 64
# How many later requests may be admitted before one that waits, for each doubling of its prompt's pages.
OVERTAKING = 16
# The share of a step's prompt tokens that the oldest of those who read is sure of: one in so many.
OLDEST_SHARE = 2


class Scheduler:
    """Short prompts go first, with a bound. A sequence takes pages as it grows; when none is left, the
    youngest pauses.

    Of those that wait, a shorter prompt is admitted before one that came earlier, but no prompt lets more
    than OVERTAKING later requests pass for each doubling of its pages. Of those admitted, the one with the
    least left to read goes first, but a share of each step is the oldest one's. A prompt has pages for all of
    it before its first token is read, so several that are half read never wait for each other.

    A paused sequence gives up its slot and waits in front of all others; what it had processed is processed
    again later, as far as the prefix cache has not kept it.

    `same_bits`: a token gives the same bits whether it was read in a prompt or generated. Where it does not,
    a token is always processed the way it was first: generated ones one by one, after a pause too, and what
    they left in pages is not offered to prompts.
    """

    def __init__(
        self,
        slots: Slots,
        prefix: PrefixCache,
        chunk: int,
        same_bits: bool,
        speculation: Speculation | None = None,
        ahead_drafts: int = 0,
    ) -> None:
        self.slots, self.prefix, self.chunk, self.same_bits = slots, prefix, chunk, same_bits
        self.speculation = speculation  # None: nothing is drafted
        self.ahead_drafts = ahead_drafts  # most that a step launched ahead verifies
        self._wishes: dict[int, Wish] = {}  # of the plan being made, by sequence
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_pauses = 0
        self._is_tight = False  # somebody was paused, and nobody has ended since
        self._restores: dict[int, int] = {}  # slot -> snapshot, not yet in a plan
        self._penalties: dict[int, Penalise] = {}  # by slot, not yet in a plan

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self, limit: int | None = None) -> Plan:
        """`limit`: prompt tokens of a step that somebody waits for; None: `chunk`, as of all other steps."""
        self._admit()
        self._grow()
        if not self.running:
            self._admit()
        ends = {s.number: self._end_of_prompt(s) for s in self.running}
        reading = [s for s in self.running if s.num_processed < ends[s.number]]
        if self.speculation is not None:
            decoding = [s.number for s in self.running if s.num_processed >= ends[s.number]]
            self._wishes = self.speculation.wishes(decoding, [s.number for s in reading])
        decode = tuple(
            self._span(s, s.num_processed + 1) for s in self.running if s.num_processed >= ends[s.number]
        )
        left = {s.number: ends[s.number] - s.num_processed for s in reading}
        budget = self.chunk
        if limit is not None and (decode or (len(reading) > 1 and min(left.values()) <= limit)):
            budget = min(budget, limit)
        oldest = min(left, default=-1)
        kept = min(left.get(oldest, 0), -(-budget // OLDEST_SHARE))
        prefill: list[Span] = []
        for s in sorted(reading, key=lambda s: (left[s.number], s.number)):
            kept = 0 if s.number == oldest else kept
            if budget == kept:
                continue
            start, can_mark = s.num_processed, not any(span.mark for span in prefill)
            stop, mark = self._cut(s, min(ends[s.number], start + budget - kept), can_mark)
            prefill.append(self._span(s, stop, mark))
            budget -= stop - start
        return replace(self.changes(), prefill=tuple(prefill), decode=decode)

    def _cut(self, s: Sequence, stop: int, can_mark: bool) -> tuple[int, int]:
        """Where a run up to `stop` should end instead, for its pages to be of use to others, and the page's
        end within it at which its state is marked (0: none). One run of a step can have a mark."""
        start, layout = s.num_processed, self.slots.layout
        if not self.prefix.max_snapshots:
            return stop, 0
        if start < s.fork < stop:
            return s.fork, 0
        boundary = stop // layout.page_tokens * layout.page_tokens
        if not start < boundary < stop or not self._is_worth_saving(s, boundary):
            return stop, 0
        if can_mark and boundary - start >= layout.least_before_mark:
            return stop, boundary
        return boundary, 0

    def changes(self) -> Plan:
        """What has changed in the cache since the last plan: one without spans."""
        restores = tuple(Restore(slot, handle) for slot, handle in self._restores.items())
        penalties = tuple(self._penalties.values())
        self._restores.clear()
        self._penalties.clear()
        return Plan(
            saves=tuple(Save(*save) for save in self.prefix.take_saves()),
            copies_out=tuple(Copy(*copy) for copy in self.prefix.take_copies_out()),
            free=self.slots.take_freed(),
            claims=tuple(Claim(*claim) for claim in self.slots.take_claims()),
            copies_in=tuple(Copy(*copy) for copy in self.prefix.take_copies_in()),
            restores=restores,
            penalties=penalties,
            drops=self.prefix.take_drops(),
        )

    def _end_of_prompt(self, s: Sequence) -> int:
        """Where the tokens end that are read together: the prompt's and, after a pause, all there are."""
        if not self.same_bits:
            return s.num_prompt
        is_reading = s.num_processed < max(s.num_prompt, s.num_known - 1)
        return s.num_known if is_reading else s.num_processed

    def _span(self, s: Sequence, stop: int, mark: int = 0) -> Span:
        assert s.slot is not None
        start = s.num_processed
        score, first = s.to_score(start, stop)
        is_last, is_generated = stop == s.num_known, start >= s.num_prompt
        wish = self._wishes.get(s.number, NO_WISH) if is_last else NO_WISH
        num_drafts = self._num_drafts(s, stop, wish.verify) if is_generated else 0
        # A step launched ahead processes the token after all that may come out, and must find a page for it;
        # for drafts that the device verifies by itself if there are some. The last token is never processed.
        end = s.num_prompt + s.max_tokens - 1
        reach = min(stop + num_drafts, end - 1)
        ahead = is_last and stop < end and self.slots.grow(s.slot, reach + 1)
        if ahead:
            wanted = (min(reach + 1 + n, end) for n in range(self.ahead_drafts, 0, -1))
            next((tokens for tokens in wanted if self.slots.grow(s.slot, tokens)), None)
        return Span(
            sequence=s.number,
            slot=s.slot,
            start=start,
            ids=tuple(s.span(start, stop)),
            # Graphs of generated tokens always choose; where the token is known already, nobody looks.
            sampling=s.sampling(stop) if is_last or (is_generated and not self.same_bits) else None,
            num_drafts=num_drafts,
            proposes=wish.propose,
            room=min(self.slots.capacity(s.slot), end),
            ahead=ahead,
            mark=mark,
            score=score,
            score_from=first,
            score_top=s.request.params.prompt_logprobs or 0,
        )

    def _num_drafts(self, s: Sequence, stop: int, wanted: int) -> int:
        """Proposals to verify with the last token: each may be followed by one more, and needs a page."""
        assert s.slot is not None
        most = min(wanted, s.max_tokens - len(s.tokens) - 1)
        return next((n for n in range(most, 0, -1) if self.slots.grow(s.slot, stop + n)), 0)

    def commit(self, plan: Plan) -> None:
        """The spans of the plan are processed, with accepted proposals: count them, and keep the pages they
        have filled."""
        size, running = self.slots.layout.page_tokens, {s.number: s for s in self.running}
        for span in plan.spans:
            s = running.get(span.sequence)
            if s is None:  # it failed, and was taken out
                continue
            # What came out follows what was accepted; a stop may have cut it short.
            s.num_processed = s.num_known - 1 if span.num_drafts else span.end
            assert s.slot is not None and s.node is not None
            limit = s.num_processed if self.same_bits else min(s.num_processed, s.num_prompt)
            for end in range((span.start // size + 1) * size, limit + 1, size):
                ids = tuple(s.span(end - size, end))
                s.node = self.prefix.keep(
                    slot=s.slot,
                    node=s.node,
                    ids=ids,
                    end=end,
                    position=s.num_processed,
                    saves=self._is_worth_saving(s, end),
                    is_marked=end == span.mark,
                )
                if self.prefix.is_saved(s.node):
                    s.num_saved = end

    def _is_worth_saving(self, s: Sequence, end: int) -> bool:
        """At the prompt's last page and after it, where prompts part, and otherwise once in a whole chunk:
        small chunks beside others must not drive out everybody else's snapshots."""
        size = self.slots.layout.page_tokens
        stride = max(size, self.chunk // size * size)
        return end + size > s.num_prompt or end == s.fork or end - s.num_saved >= stride

    def _admit(self) -> None:
        while self.waiting and self.slots.num_free and not (self._is_tight and self.running):
            s = self._next()
            tokens = min(s.num_prompt + s.max_tokens, s.num_known + HEADROOM)
            # A prompt whose tokens are to be scored is processed in full, once.
            reuse = s.request.params.prompt_logprobs is None or bool(s.tokens)
            ids = s.span(0, s.num_known if self.same_bits else s.num_prompt)
            hit = self.prefix.claim(s.number, s.request.owner, ids, tokens, reuse, s.found)
            if hit is None:
                return
            s.found = None
            s.slot, s.num_processed, s.node, s.fork = hit.slot, hit.position, hit.node, hit.fork
            s.num_saved = hit.position
            if hit.snapshot is not None:
                self._restores[hit.slot] = hit.snapshot
            if s.request.params.is_penalised:
                self._penalties[hit.slot] = s.penalties()
            if s.num_cached is None:
                s.num_cached = hit.position
            self.waiting.remove(s)
            self.running.append(s)

    def _next(self) -> Sequence:
        """The first one, if it was paused; else by the number of the last request that may pass it."""
        first = self.waiting[0]
        if first.num_cached is not None:
            return first
        return min(self.waiting, key=lambda s: s.number + OVERTAKING * self._doublings(s))

    def _doublings(self, s: Sequence) -> int:
        """A few tokens are no reason to overtake: 0 for one page, 1 for two or three, and so on."""
        return self.slots.pages_for(s.num_prompt).bit_length() - 1

    def _grow(self) -> None:
        """A page for every sequence that has filled its last one."""
        for s in list(self.running):
            while s.slot is not None and not self.slots.grow(s.slot, s.num_known):
                self._pause(self.running[-1])

    def _pause(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.num_processed = 0
        self.waiting.appendleft(sequence)
        self.num_pauses += 1
        self._is_tight = True

    def restart(self) -> None:
        """After a plan that was interrupted: nothing in the cache can be trusted, everybody begins anew."""
        while self.running:
            self._pause(self.running[-1])
        self._is_tight = False
        self.prefix.clear()

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.slots.release(sequence.slot)
        self._restores.pop(sequence.slot, None)
        self._penalties.pop(sequence.slot, None)
        sequence.slot = sequence.node = None
        if self.speculation is not None:
            self.speculation.pause(sequence.number)

    def finish(self, sequence: Sequence) -> None:
        """Take the sequence out, wherever it is; its slot and pages are free at once."""
        if sequence.num_cached is not None:  # else it never held anything
            self._is_tight = False
        if sequence.slot is not None:
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence.number)
