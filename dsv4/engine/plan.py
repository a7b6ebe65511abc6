"""One step as data: what to move in the cache, which tokens to process, how to sample. Host integers only.

A plan is all that the scheduler tells the device. It is frozen and serialisable, so that the same bytes can
drive one device or several. A sequence is named by its number, which is never used twice; its slot is.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Sampling:
    """How the token after a span is chosen. `index` is the generated token's, whose noise it gives."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    num_top: int = -1  # alternatives to report; -1: no log-probabilities at all
    masked: bool = False  # a grammar's mask comes before the choice is made
    penalties: int = -1  # the slot whose penalties apply; -1: none


@dataclass(frozen=True)
class Span:
    """Tokens [start, start + len(ids)) of one sequence, to be processed now."""

    sequence: int
    slot: int
    start: int
    ids: tuple[int, ...]
    sampling: Sampling | None = None  # None: no token is wanted after the last one (inside a prompt)
    wants_logits: bool = False  # the row's logits beside the token
    num_drafts: int = 0  # of what the executor itself proposed to follow the one id: to be verified with it
    proposes: int = 0  # tokens to draft after it, for the step that comes next
    room: int = 0  # tokens that the sequence has pages for, and may process at most
    ahead: bool = False  # the sequence has pages for one token more: the next step may be launched ahead
    mark: int = 0  # a position within, whose state is to be left in the slot after all others; 0: none
    # Prompt log-probabilities: the token that followed each scored one, from row `score_from` on.
    score: tuple[int, ...] = ()
    score_from: int = 0
    score_top: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Save:
    """Keep what `slot` needs to go on at `position`, under a handle that is new."""

    handle: int
    slot: int
    position: int


@dataclass(frozen=True)
class Claim:
    """The slot belongs to this sequence from now on (or still), with these pages, in order."""

    slot: int
    sequence: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Restore:
    slot: int
    handle: int


@dataclass(frozen=True)
class Penalise:
    """What the slot's new owner is penalised by. The device notes further tokens by itself, by position.

    `ids` are the tokens there are, where they count; `bias_ids` and `biases` go together.
    """

    slot: int
    presence: float
    frequency: float
    repetition: float
    bias_ids: tuple[int, ...]
    biases: tuple[float, ...]
    num_prompt: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Between the cache and the shelf (cache/shelf.py), where it has a number that is never used twice: the
    contents of pages, or those of a snapshot at a position."""

    number: int
    pages: tuple[int, ...] = ()
    snapshot: int = -1
    position: int = 0


@dataclass(frozen=True)
class Plan:
    """Carried out in the order of the fields, on one stream.

    Saves and copies out come first: what an earlier step left in a slot or a page is kept before anybody else
    gets it.
    """

    saves: tuple[Save, ...] = ()
    copies_out: tuple[Copy, ...] = ()
    free: tuple[int, ...] = ()  # slots whose sequences have ended or paused
    claims: tuple[Claim, ...] = ()
    copies_in: tuple[Copy, ...] = ()
    restores: tuple[Restore, ...] = ()
    penalties: tuple[Penalise, ...] = ()
    drops: tuple[int, ...] = ()  # handles of snapshots
    prefill: tuple[Span, ...] = ()
    decode: tuple[Span, ...] = ()  # one generated token each

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.prefill + self.decode

    def to_bytes(self) -> bytes:
        return json.dumps(self, separators=(",", ":"), default=_values).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Plan":
        made = _typed(cls, json.loads(data))
        assert isinstance(made, Plan)
        return made


def _values(part: object) -> list[object]:
    kind: type = type(part)
    return [getattr(part, name) for name, _ in _fields(kind)]


@cache
def _fields(kind: type) -> tuple[tuple[str, object], ...]:
    """Names and annotated types; a plan is read in every step of every rank, and typing is slow."""
    return tuple(get_type_hints(kind).items())


@cache
def _item_of(kind: object) -> object:
    """The item of a tuple[item, ...]; None for all else."""
    arguments = get_args(kind)
    return arguments[0] if get_origin(kind) is tuple else None


def _typed(kind: object, value: object) -> object:
    """A value of that annotated type from what JSON made of it; nothing else passes."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    if kind == Sampling | None:
        return None if value is None else _typed(Sampling, value)
    item = _item_of(kind)
    assert isinstance(value, list), (kind, value)
    if item is None:
        assert isinstance(kind, type), kind
        parts = zip(_fields(kind), value, strict=True)
        return kind(*[one if type(one) is hint else _typed(hint, one) for (_, hint), one in parts])
    if item is int:
        assert {*map(type, value)} <= {int}, (kind, value)
        return tuple(value)
    return tuple([_typed(item, one) for one in value])
