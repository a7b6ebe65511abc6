"""What is asked (Request, SamplingParams: frozen) and how far it has come (Sequence: mutable)."""

from dataclasses import dataclass, field
from typing import Literal

from dsv4.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to end. The defaults: temperature 1, nothing filtered."""

    max_tokens: int | None = None  # None: until the context is full
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn once per request
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside each token; None: no logprobs at all

    def __post_init__(self) -> None:
        rules = [
            (self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1"),
            (0 <= self.temperature < float("inf"), "temperature", "a number >= 0"),
            (self.top_k >= 0, "top_k", "0 (all) or more"),
            (0 < self.top_p <= 1, "top_p", "more than 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", "between 0 and 1"),
            (self.seed is None or 0 <= self.seed < 1 << 64, "seed", "an integer of 64 bits"),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more alternatives"),
            (not isinstance(self.stop, str) and all(self.stop), "stop", "non-empty strings"),
        ]
        for holds, name, expected in rules:
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected {expected}")


@dataclass(frozen=True)
class Request:
    id: str
    ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Token:
    """One generated token; logprobs are of the model's own distribution, before temperature and filters."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """What one step added to one request. `text`: complete characters only, ends before a stop string."""

    request_id: str
    token: Token | None
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    request_id: str
    tokens: tuple[Token, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(eq=False)
class Sequence:
    """A request on its way: where it lives in the cache, what is processed, what came out."""

    request: Request
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    slot: int | None = None
    num_processed: int = 0
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.request.ids + tuple(token.id for token in self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.request.ids)

    @property
    def in_prompt(self) -> bool:
        """Prompt tokens remain to be processed."""
        return self.num_processed < self.num_prompt

    def span(self, start: int, stop: int) -> list[int]:
        prompt = list(self.request.ids[start:stop])
        first = max(start, self.num_prompt) - self.num_prompt
        return prompt + [token.id for token in self.tokens[first : max(0, stop - self.num_prompt)]]
