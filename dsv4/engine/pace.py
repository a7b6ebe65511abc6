"""How many prompt tokens fit into a step that others wait for: measured, never assumed.

Nothing computed depends on it: chunks change no bit. The scheduler gets one integer, so plans stay data.
"""

from bisect import bisect_right
from itertools import pairwise

# Read in any case, whatever the budget: a prompt must come to its end.
LEAST = 16
# What one measurement may count, as a multiple of the mean: a pause of the machine is no pace.
_TRUST = 2.0


class Pace:
    """`limit`: prompt tokens of a step such that it takes `budget` seconds; at most `chunk`.

    A mean for each size of chunk, in powers of two; between them the time is a straight line. A larger chunk
    takes no less time than a smaller one, and no more per token: the means of other sizes are moved to where
    the latest one allows. So an outlier, or a long context that has come or gone, is soon forgotten.
    """

    def __init__(self, budget: float, chunk: int) -> None:
        self.budget, self.chunk = budget, chunk
        self.limit = min(LEAST, chunk)
        self._decode = 0.0  # seconds of a step without prompts
        self._chunks: dict[int, tuple[float, float]] = {}  # by size: mean tokens, mean seconds

    def note(self, tokens: int, num_decoded: int, seconds: float) -> None:
        """A step of so many prompt tokens and generated ones took so long."""
        if not tokens:
            self._decode = min(seconds, _towards(self._decode, seconds))
            return
        size = tokens.bit_length()
        # However long a decode step is thought to be, a chunk is not free.
        cost = max(seconds / 4, seconds - (self._decode if num_decoded else 0.0))
        mean_tokens, mean_cost = self._chunks.get(size, (float(tokens), 0.0))
        self._chunks[size] = (mean_tokens + tokens) / 2, _towards(mean_cost, cost)
        points = self._agree(size)
        # Where generated tokens alone take most of the budget, prompts get as much time as they.
        left = max(self.budget - self._decode, self._decode)
        fits = bisect_right(range(1, self.chunk + 1), left, key=lambda size: _seconds(points, size))
        self.limit = max(fits, min(LEAST, self.chunk))

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
