"""Whether an answer is right, by numbers or whole words, and how sure a share of right answers is."""

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"(?<!\w)-?\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True)
class Rate:
    """So many of so many."""

    hits: int
    total: int

    @classmethod
    def of(cls, outcomes: "list[bool]") -> "Rate":
        return cls(sum(outcomes), len(outcomes))

    @property
    def share(self) -> float:
        return self.hits / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval: sensible for few trials, and at 0 and 1."""
        z, n, p = 1.959964, self.total, self.share
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
        # At 0 and 1 the bound is the share itself, which rounding may miss.
        return min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"share": self.share, "low": low, "high": high, "hits": self.hits, "total": self.total}


def as_number(text: str) -> Decimal | None:
    """The text as a number (`1,024` is one), or None."""
    try:
        number = Decimal(_THOUSANDS.sub("", text.strip().replace("−", "-")))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def last_number(text: str) -> Decimal | None:
    """The number an answer ends with: `7 x 8 = 56.` -> 56; a minus between two numbers is not a sign."""
    found = _NUMBER.findall(_THOUSANDS.sub("", text.replace("−", "-")))
    return Decimal(found[-1]) if found else None


def says(text: str, expected: str) -> bool:
    """Whether the expected words stand in the text as whole words, in any case and spacing."""
    return _has(text, re.escape(_plain(expected)))


def uses(text: str, word: str) -> bool:
    """Whether the word stands in the text as a whole word, a plural s allowed."""
    return _has(text, re.escape(_plain(word)) + "s?")


_ADMITS = re.compile(
    r"\b(do not|don't|does not|doesn't) know\b|\bcan(not|'t| not)\b|\bno tool\b|\bnone of my tools\b"
    r"|\btoo (hard|difficult)\b"
)


def admits(text: str) -> bool:
    """Whether the answer says that the model does not know or cannot do it."""
    return _ADMITS.search(_plain(text)) is not None


def same_calls(got: list[tuple[str, str]], expected: list[dict[str, Any]]) -> bool:
    """Whether these calls, names and arguments as JSON text, are those expected, in any order."""
    left = [(call["name"], call["arguments"]) for call in expected]
    for name, text in got:
        try:
            left.remove((name, json.loads(text)))
        except ValueError:
            return False
    return not left


def same_json(text: str, expected: Any) -> bool:
    """Whether the whole text is JSON of this value."""
    try:
        return bool(json.loads(text) == expected)
    except ValueError:
        return False


def _has(text: str, pattern: str) -> bool:
    # Not \b: an expected text may begin or end with a sign.
    return re.search(rf"(?<!\w){pattern}(?!\w)", _plain(text)) is not None


def _plain(text: str) -> str:
    return " ".join(text.replace("’", "'").casefold().split())
