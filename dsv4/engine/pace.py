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
# Chunks after which a larger recorded step may be tried again, and the share of the budget that one may take
# beyond it: sizes are coarse.
_MEMORY, _OVER = 16, 0.04


class Pace:
    """`limit`: prompt tokens of a step such that it takes `budget` seconds; at most `chunk`.

    A mean for each size of chunk, in powers of two; between them the time is a straight line. A larger chunk
    takes no less time than a smaller one, and no more per token: the means of other sizes are moved to where
    the latest one allows. So an outlier, or a long context that has come or gone, is soon forgotten.

    `sizes`, rising: steps that are recorded as graphs. A smaller chunk is padded to the next of them and
    takes its time, so a limit below the largest is one of them, and each has a mean of its own. One that was
    too large is forgotten after a while: no chunk in between would show that it is not any more.
    """

    def __init__(self, budget: float, chunk: int, sizes: Sequence[int] = ()) -> None:
        self.budget, self.chunk, self.sizes = budget, chunk, [size for size in sizes if size <= chunk]
        self.limit = min(LEAST, chunk)
        self._decode = 0.0  # seconds of a step without prompts
        self._chunks: dict[int, tuple[float, float]] = {}  # by size at most: mean tokens, mean seconds
        self._ages: dict[int, int] = {}  # by size: chunks since the last one of it

    def note(self, tokens: int, num_decoded: int, seconds: float) -> None:
        """A step of so many prompt tokens and generated ones took so long."""
        if not tokens:
            self._decode = min(seconds, _towards(self._decode, seconds))
            return
        at = bisect_left(self.sizes, tokens)
        if at < len(self.sizes):
            size = tokens = self.sizes[at]
        else:
            size = 1 << tokens.bit_length()
        # However long a decode step is thought to be, a chunk is not free.
        cost = max(seconds / 4, seconds - (self._decode if num_decoded else 0.0))
        mean_tokens, mean_cost = self._chunks.get(size, (float(tokens), 0.0))
        self._chunks[size] = (mean_tokens + tokens) / 2, _towards(mean_cost, cost)
        if self.sizes:
            self._forget(size)
        points = self._agree(size)
        # Where generated tokens alone take most of the budget, prompts get as much time as they.
        budget = self.budget * (1 + _OVER) if self.sizes else self.budget
        left = max(budget - self._decode, self._decode)
        fits = bisect_right(range(1, self.chunk + 1), left, key=lambda size: _seconds(points, size))
        if self.sizes and fits < self.sizes[-1]:
            fits = self._recorded(fits, left, points)
        self.limit = max(fits, min(LEAST, self.chunk))

    def _forget(self, latest: int) -> None:
        self._ages = {size: self._ages.get(size, 0) + 1 for size in self._chunks} | {latest: 0}
        for size in [size for size, age in self._ages.items() if size > latest and age > _MEMORY]:
            del self._chunks[size], self._ages[size]

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

    def _agree(self, latest: int) -> list[tuple[float, float]]:
        """(tokens, seconds) of all sizes, in order, from the latest outwards each in agreement with the one
        before it."""
        sizes = sorted(self._chunks)
        at = sizes.index(latest)
        for known, size in pairwise(reversed(sizes[: at + 1])):
            (more, longer), (tokens, seconds) = self._chunks[known], self._chunks[size]
            self._chunks[size] = tokens, min(max(seconds, longer * tokens / more), longer)
        for known, size in pairwise(sizes[at:]):
            (fewer, less), (tokens, seconds) = self._chunks[known], self._chunks[size]
            self._chunks[size] = tokens, min(max(seconds, less), less * tokens / fewer)
        return [self._chunks[size] for size in sizes]


def _towards(mean: float, value: float) -> float:
    return (mean + min(value, _TRUST * mean)) / 2 if mean else value


def _seconds(points: list[tuple[float, float]], tokens: int) -> float:
    """What so many tokens take, at most."""
    if tokens <= points[0][0]:
        return points[0][1]
    for (fewer, less), (more, longer) in pairwise(points):
        if tokens <= more:
            return less + (longer - less) * (tokens - fewer) / (more - fewer)
    return points[-1][1] * tokens / points[-1][0]
