"""Where a text ends at a stop string. Knows no markup."""

from dsv4.errors import TextError
from dsv4.text.dsml import overlap


class StopStrings:
    """Cuts a text before the stop string that is complete first (the longest, if several end together).

    With `includes`, behind it.
    """

    def __init__(self, stops: tuple[str, ...], includes: bool = False) -> None:
        if not all(stops):
            raise TextError("a stop string is empty; expected at least one character")
        self._stops, self._includes, self._held = stops, includes, ""
        self.found: str | None = None  # the stop string that was met

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to give out, and whether a stop string was met; after that there is no more."""
        if self.found is not None:
            return "", True
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        end, safe, self.found = min(matches, default=(0, len(text) - overlap(text, self._stops), None))
        self._held = "" if matches else text[safe:]
        return text[: end if matches and self._includes else safe], bool(matches)

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text
