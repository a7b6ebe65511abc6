"""How many prompt tokens fit into a step that others wait for: measured, never assumed.

Nothing computed depends on it: chunks change no bit. The scheduler gets one integer, so plans stay data.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

# Read in any case, whatever the budget: a prompt must come to its end.
LEAST = 16
# What one measurement may count, as a multiple of the mean: a pause of the machine is no pace.
_TRUST = 2.0
# Chunks after which a larger recorded step may be tried again, or the least one where that was too large; and
# the share of the budget that a recorded step may take beyond it: sizes are coarse.
_MEMORY, _OVER = 16, 0.04
# Chunks beside generated tokens after which a step without prompts is measured again.
PROBE = 32


class Pace:
    """`limit`: prompt tokens of a step such that it takes `budget` seconds; at most `chunk`.

    A budget that cannot be met must not starve prompts. Where generated tokens alone take more than half of
    it, prompts get as much time as they. Where not even the least chunk fits, a step may take twice as long
    as with that: small chunks are slow, and whoever waits for a first token waits too. Where prompts never
    cease, no step would show what generated tokens alone take, as many as there are: once in a while `limit`
    is 0 near the budget, and the least beyond it.

    `sizes`, rising: steps that are recorded as graphs. A smaller chunk is padded to the next of them and
    takes its time, so a limit below the largest is one of them, and each has a mean of its own. One that was
    too large is forgotten after a while: no chunk in between would show that it is not any more.
    """

    def __init__(self, budget: float, chunk: int, sizes: Sequence[int] = ()) -> None:
        self.budget, self.chunk, self.sizes = budget, chunk, [size for size in sizes if size <= chunk]
        self.limit = min(LEAST, chunk)
        self._decode, self._chunks = _Times(), _Times()  # of steps without prompts; of chunks
        self._since: dict[int, int] = {}  # by size of such a step: chunks since it was measured
        self._since_least = _MEMORY  # chunks
        self._ages: dict[int, int] = {}  # by size of chunk: chunks since the last one of it

    def note(self, tokens: int, num_decoded: int, seconds: float) -> None:
        """A step of so many prompt tokens and generated ones took so long."""
        rows = _power(num_decoded)
        if not tokens:
            if num_decoded:
                self._decode.note(rows, num_decoded, seconds, falls_at_once=True)
                self._since[rows] = 0
            if self.limit:
                return
        else:
            since = self._since.get(rows, PROBE)
            if num_decoded and since >= PROBE and seconds > self.budget / 2:
                self._since[rows] = self.limit = 0
                return
            self._since[rows] = since + 1
            # However long a decode step is thought to be, a chunk is not free.
            decode = self._decode.seconds(num_decoded) if num_decoded else 0.0
            self._note_chunk(tokens, max(seconds / 4, seconds - decode))
        self.limit = max(min(LEAST, self.chunk), self._fitting(num_decoded))

    def _note_chunk(self, tokens: int, seconds: float) -> None:
        self._since_least = 0 if tokens <= LEAST else self._since_least + 1
        at = bisect_left(self.sizes, tokens)
        if at < len(self.sizes):
            size = tokens = self.sizes[at]
        else:
            size = _power(tokens)
        self._chunks.note(size, tokens, seconds)
        if self.sizes:
            self._forget(size)

    def _forget(self, latest: int) -> None:
        self._ages = {size: self._ages.get(size, 0) + 1 for size in self._chunks.means} | {latest: 0}
        for size in [size for size, age in self._ages.items() if size > latest and age > _MEMORY]:
            del self._chunks.means[size], self._ages[size]

    def _fitting(self, num_decoded: int) -> int:
        """The largest chunk for a step of so many generated tokens; 0: the least must be tried."""
        points, decode = self._chunks.points, self._decode.seconds(num_decoded)
        if not points:
            return 0
        budget = self.budget * (1 + _OVER) if self.sizes else self.budget
        left = max(budget - decode, decode)
        tokens, least = points[0]
        least = least * LEAST / tokens if tokens > LEAST else _seconds(points, LEAST)
        if least > budget - decode:
            if self._since_least >= _MEMORY:
                return 0
            left = decode + 2 * least
        fits = bisect_right(range(1, self.chunk + 1), left, key=lambda size: _seconds(points, size))
        if self.sizes and fits < self.sizes[-1]:
            return self._recorded(fits, left, points)
        return fits

    def _recorded(self, fits: int, left: float, points: list[tuple[float, float]]) -> int:
        """The largest size that fits. Of those never tried the next one, if the line through the two largest
        that were says that it does: in proportion to the largest alone it hardly ever would."""
        at = max(0, bisect_right(self.sizes, fits) - 1)
        (tokens, seconds), more = points[-1], self.sizes[at + 1]
        if self.sizes[at] < tokens:
            return self.sizes[at]
        fewer, less = points[-2] if len(points) > 1 else (0.0, 0.0)
        expected = seconds + (seconds - less) * (more - tokens) / (tokens - fewer)
        return more if expected <= left else self.sizes[at]


class _Times:
    """What so many tokens take: a mean for each size, and a straight line between them.

    More tokens take no less time than fewer, and no more per token: the means of other sizes are moved to
    where the latest one allows. So an outlier, or a long context that has come or gone, is soon forgotten.
    """

    def __init__(self) -> None:
        self.means: dict[int, tuple[float, float]] = {}  # by size: tokens, seconds

    def note(self, size: int, tokens: int, seconds: float, falls_at_once: bool = False) -> None:
        mean_tokens, mean = self.means.get(size, (float(tokens), seconds))
        towards = (mean + min(seconds, _TRUST * mean)) / 2
        self.means[size] = (mean_tokens + tokens) / 2, min(seconds, towards) if falls_at_once else towards
        self._agree(size)

    def _agree(self, latest: int) -> None:
        """From the latest outwards, each mean with the one before it."""
        sizes = sorted(self.means)
        at = sizes.index(latest)
        for known, size in pairwise(reversed(sizes[: at + 1])):
            (more, longer), (tokens, seconds) = self.means[known], self.means[size]
            self.means[size] = tokens, min(max(seconds, longer * tokens / more), longer)
        for known, size in pairwise(sizes[at:]):
            (fewer, less), (tokens, seconds) = self.means[known], self.means[size]
            self.means[size] = tokens, min(max(seconds, less), less * tokens / fewer)

    @property
    def points(self) -> list[tuple[float, float]]:
        """(tokens, seconds) of all sizes, in order."""
        return [self.means[size] for size in sorted(self.means)]

    def seconds(self, tokens: int) -> float:
        return _seconds(self.points, tokens) if self.means else 0.0


def _power(tokens: int) -> int:
    return 1 << tokens.bit_length()


def _seconds(points: list[tuple[float, float]], tokens: int) -> float:
    """What so many tokens take, at most."""
    if tokens <= points[0][0]:
        return points[0][1]
    for (fewer, less), (more, longer) in pairwise(points):
        if tokens <= more:
            return less + (longer - less) * (tokens - fewer) / (more - fewer)
    return points[-1][1] * tokens / points[-1][0]
