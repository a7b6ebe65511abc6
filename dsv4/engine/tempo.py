"""How many drafts a round should have room for: what gave most tokens per second of late. Pure arithmetic.

Within a round the device takes only the drafts that it trusts (ops/draft/round.py). Here whole rounds are
weighed against each other and against plain steps, which are rounds without drafts, by their measured times.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MEMORY = 1 / 32  # weight of the last round among all those before
FIRST, AGAIN = 6, 3  # rounds of a kind that are tried at the start, and from time to time
PERIOD = 192  # rounds after which another kind is tried: wrong ones must cost less than 2 %


@dataclass
class _Kind:
    """Sums over the last rounds, older ones fading."""

    tokens: float = 0.0
    milliseconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.milliseconds if self.milliseconds else 0.0


@dataclass
class _Seats:
    kinds: dict[int, _Kind]  # by drafts
    trials: list[int]  # drafts of rounds to come, in reverse
    since: int = 0  # rounds since the last trial
    turn: int = 0
    current: int = -1


@dataclass
class Tempo:
    """Of rounds with so many seats and drafts."""

    sizes: Iterable[tuple[int, int]]
    _seats: dict[int, _Seats] = field(init=False)

    def __post_init__(self) -> None:
        drafts: dict[int, list[int]] = {}
        for seats, number in self.sizes:
            drafts.setdefault(seats, []).append(number)
        self._seats = {
            seats: _Seats({n: _Kind() for n in numbers}, [n for n in sorted(numbers) for _ in range(FIRST)])
            for seats, numbers in drafts.items()
        }

    def choose(self, seats: int) -> int:
        """Drafts of the next round with so many seats. The most are tried first."""
        it = self._seats[seats]
        best = max(it.kinds, key=lambda drafts: it.kinds[drafts].rate)
        if it.trials:
            it.current = it.trials.pop()
        elif it.since >= PERIOD and len(it.kinds) > 1:
            others = sorted(it.kinds.keys() - {best})
            it.turn, it.since = it.turn + 1, 0
            it.trials = [others[it.turn % len(others)]] * (AGAIN - 1)
            it.current = others[it.turn % len(others)]
        else:
            it.since, it.current = it.since + 1, best
        return it.current

    def note(self, size: tuple[int, int], tokens: float, milliseconds: float) -> None:
        """A round that followed one of its own kind: the first has no drafts to verify."""
        kind = self._seats[size[0]].kinds[size[1]]
        kind.tokens += MEMORY * (tokens - kind.tokens)
        kind.milliseconds += MEMORY * (milliseconds - kind.milliseconds)
