"""How fast answers come: seconds to the first token, tokens per second, seconds since the program's start."""

import os
import time
from pathlib import Path

_IMPORTED = time.perf_counter()


def seconds_since_start() -> float:
    """Since this process was started; where the system does not tell (no /proc), since this import."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if round(seconds, 4) >= 1 else f"{1e3 * seconds:.1f} ms"


def _tokens(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


class Stopwatch:
    """Times one answer, or several that run together; starts when it is made."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens, self.tokens = prompt_tokens, 0
        self.begun = self.first = self.last = time.perf_counter()
        self.first_since_start = 0.0
        self._at_first = 0

    def count(self, tokens: int = 1) -> None:
        """So many tokens came just now."""
        if not tokens:
            return
        self.last = time.perf_counter()
        if not self.tokens:
            self.first, self.first_since_start, self._at_first = self.last, seconds_since_start(), tokens
        self.tokens += tokens

    def rate(self) -> float:
        """Tokens per second of the whole, prompt included."""
        return self.tokens / max(1e-9, time.perf_counter() - self.begun)

    def overall(self) -> str:
        return f"{_tokens(self.tokens, 'token')}, {self.rate():.1f}/s"

    def since_prompt(self, drafts: str = "") -> str:
        """With what came of drafts, if there were any."""
        return self._line(_duration(self.first - self.begun), drafts)

    def since_start(self, drafts: str = "") -> str:
        """With the time from the program's start, loading included, to the first token too."""
        since_start = f"{_duration(self.first_since_start)} after the program's start"
        to_first = f"{_duration(self.first - self.begun)}, {since_start}"
        return self._line(to_first, drafts)

    def _line(self, to_first: str, drafts: str) -> str:
        prompt = _tokens(self.prompt_tokens, "prompt token")
        if not self.tokens:
            return f"{prompt}, no answer"
        line = f"{prompt}, first token after {to_first}; {_tokens(self.tokens, 'token')}"
        # What came at once, as a single token does, has no rate.
        later = self.tokens - self._at_first
        line += f" at {later / max(1e-9, self.last - self.first):.1f}/s" if later else ""
        return f"{line}; {drafts}" if drafts else line
