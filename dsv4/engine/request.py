"""What is asked (Request, SamplingParams: frozen) and how far it has come (Sequence: mutable)."""

import math
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Literal

from dsv4.cache.node import Node
from dsv4.engine.plan import Penalise, Sampling
from dsv4.errors import RequestError

if TYPE_CHECKING:
    from dsv4.cache.shelf import Found
    from dsv4.engine.grammar import Bounds, Matcher

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_BIAS = 1024  # entries of a request's logit_bias


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. The defaults: temperature 1, nothing filtered.

    max_tokens: length of an answer; default: until the context is full
    temperature: randomness; 0 always takes the likeliest token
    seed: the same seed gives the same answer; default: a new one each time

    Sampling
    top_k: choose among the N likeliest tokens; 0: all
    top_p: choose among the likeliest tokens that together have this probability
    min_p: drop tokens less likely than this share of the likeliest
    presence_penalty: subtracted once from every token already present
    frequency_penalty: subtracted per earlier occurrence
    repetition_penalty: above 1 makes seen tokens (prompt included) less likely
    logit_bias: added to a token's logit before all this, e.g. 17=-100
    bad_words: token sequences that are never completed
    allowed_ids: choose among these tokens only; none: all

    Where an answer ends
    stop: end before this text
    stop_ids: end after this token id
    ignore_eos: go on after the end-of-text token
    min_tokens: no answer ends before this many tokens
    include_stop: the text ends behind what stopped it, not before

    Output
    logprobs: also give log-probabilities, with N alternatives per token
    prompt_logprobs: the same for the prompt's tokens
    grammar: what the whole output must match (llguidance's Lark)
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: str | None = None
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    include_stop: bool = False

    def __post_init__(self) -> None:
        rules = [
            (self.max_tokens is None or _integer(self.max_tokens, 1), "max_tokens", "a positive integer"),
            (_number(self.temperature) and 0 <= self.temperature < math.inf, "temperature", "a number >= 0"),
            (_integer(self.top_k, 0), "top_k", "0 (all) or a larger integer"),
            (_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1"),
            (_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number from 0 to 1"),
            (self.seed is None or _integer(self.seed, 0, 1 << 64), "seed", "an integer from 0 to 2**64 - 1"),
            (self.logprobs is None or _integer(self.logprobs, 0), "logprobs", "0 or more alternatives"),
            (
                self.prompt_logprobs is None or _integer(self.prompt_logprobs, 0),
                *("prompt_logprobs", "0 or more alternatives"),
            ),
            (_within(self.presence_penalty, -2, 2), "presence_penalty", "a number from -2 to 2"),
            (_within(self.frequency_penalty, -2, 2), "frequency_penalty", "a number from -2 to 2"),
            (_within(self.repetition_penalty, 0.01, 100), "repetition_penalty", "a number from 0.01 to 100"),
            (_integer(self.min_tokens, 0), "min_tokens", "0 or more tokens"),
            (
                _all(self.bad_words, tuple | list) and all(w and _all(w, int) for w in self.bad_words),
                *("bad_words", "a tuple of tuples of ids, none empty"),
            ),
            (_all(self.allowed_ids, int), "allowed_ids", "a tuple of ids"),
            (_all(self.stop_ids, int) and all(i >= 0 for i in self.stop_ids), "stop_ids", "a tuple of ids"),
            (self.grammar is None or isinstance(self.grammar, str), "grammar", "a grammar as text"),
            (_all(self.stop, str) and all(self.stop), "stop", "a tuple of non-empty strings"),
        ]
        for holds, name, expected in rules:
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected {expected}")
        if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_BIAS:
            found = len(self.logit_bias) if isinstance(self.logit_bias, dict) else repr(self.logit_bias)
            raise RequestError(f"logit_bias has {found} entries, expected a dict of at most {MAX_BIAS}")
        for id, bias in self.logit_bias.items():
            if not _integer(id, 0) or not _within(bias, -100, 100):
                raise RequestError(
                    f"logit_bias has {id!r}: {bias!r}, expected token ids and numbers from -100 to 100"
                )

    @property
    def is_bounded(self) -> bool:
        """Whether a mask says what may come next, beside a grammar."""
        return bool(self.min_tokens or self.bad_words or self.allowed_ids)

    @property
    def is_penalised(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1) or any(self.logit_bias.values())


def _integer(value: object, low: int, end: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _all(values: object, kind: "type | UnionType") -> bool:
    return isinstance(values, tuple | list) and all(isinstance(value, kind) for value in values)


@dataclass(frozen=True)
class Request:
    """`owner`: cached prefixes are shared among requests of the same owner only."""

    id: str
    ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    owner: str = ""


@dataclass(frozen=True)
class Token:
    """One generated token; logprobs are of the model's own distribution, before temperature and filters."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """What one step added to one request. `text`: complete characters only, ends before a stop string.

    `token` is None when the request was cancelled or failed; `error` says why it failed. `cached_tokens` of
    the prompt were not processed, since they were in the cache. `prompt`, with the first token and if asked
    for: the prompt's tokens from the second on.
    """

    request_id: str
    token: Token | None
    text: str
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0
    prompt: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Completion:
    request_id: str
    tokens: tuple[Token, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    cached_tokens: int = 0
    prompt: tuple[Token, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(eq=False)
class Sequence:
    """A request on its way: where it lives in the cache, what is processed, what came out."""

    number: int  # of all sequences of the engine; never used again
    request: Request
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    slot: int | None = None
    num_processed: int = 0
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)  # from its second token on, if asked for
    finish_reason: FinishReason | None = None
    # Set by the scheduler: where the sequence stands among the cached prefixes, and what it found there.
    node: Node | None = None
    fork: int = 0
    num_cached: int | None = None  # None: never admitted
    num_saved: int = 0  # where its last snapshot was made or found
    found: "Found | None" = None  # what files have of its prompt
    matcher: "Matcher | Bounds | None" = None  # for a request with a grammar or bounds

    @property
    def num_prompt(self) -> int:
        return len(self.request.ids)

    @property
    def num_known(self) -> int:
        """Tokens there are: of the prompt, and those that came out."""
        return self.num_prompt + len(self.tokens)

    def span(self, start: int, stop: int) -> list[int]:
        prompt = list(self.request.ids[start:stop])
        first = max(start, self.num_prompt) - self.num_prompt
        return prompt + [token.id for token in self.tokens[first : max(0, stop - self.num_prompt)]]

    def sampling(self, position: int) -> Sampling:
        """How the token of that position is chosen. A grammar knows the next one only."""
        p = self.request.params
        return Sampling(
            temperature=float(p.temperature),
            top_k=p.top_k,
            top_p=float(p.top_p),
            min_p=float(p.min_p),
            seed=self.seed,
            index=position - self.num_prompt,
            num_top=-1 if p.logprobs is None else p.logprobs,
            masked=self.matcher is not None and position == self.num_known,
            penalties=self.slot if p.is_penalised and self.slot is not None else -1,
        )

    def penalties(self) -> Penalise:
        """Of a sequence that has just got its slot."""
        p = self.request.params
        assert self.slot is not None
        counts = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0, 0, 1)
        return Penalise(
            slot=self.slot,
            presence=float(p.presence_penalty),
            frequency=float(p.frequency_penalty),
            repetition=float(p.repetition_penalty),
            bias_ids=tuple(p.logit_bias),
            biases=tuple(map(float, p.logit_bias.values())),
            num_prompt=self.num_prompt,
            ids=tuple(self.span(0, self.num_known)) if counts else (),
        )

    def to_score(self, start: int, stop: int) -> tuple[tuple[int, ...], int]:
        """Of the prompt's tokens after those of [start, stop): the ones not yet scored, and their first row.

        What a pause has undone is processed again, and not scored again.
        """
        if self.request.params.prompt_logprobs is None:
            return (), 0
        first = max(start, len(self.prompt))
        last = min(stop, self.num_prompt - 1)
        return self.request.ids[first + 1 : last + 1], first - start
