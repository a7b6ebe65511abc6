"""Every kind of record, its share of the training tokens, and how a draft becomes a record."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from recipes.tiny.everyday import everyday
from recipes.tiny.extract import extraction
from recipes.tiny.reading import story_questions, summary, tale_questions
from recipes.tiny.recall import recall
from recipes.tiny.records import Draft, Exchange, Record
from recipes.tiny.requests import story_request
from recipes.tiny.stories import quoted
from recipes.tiny.sums import numbers, plain_sum, word_problem
from recipes.tiny.talk import NEUTRAL_SYSTEMS, about_itself, small_talk, small_talk_in_a_manner, told_before
from recipes.tiny.tasks import (
    copying,
    counting,
    first_and_last,
    in_the_list,
    one_sentence,
    sorting,
    spelling,
    who_is_where,
)
from recipes.tiny.tools import tool
from recipes.tiny.unknown import unknown
from recipes.tiny.world import World

THINKING_SHARE = 0.6
SYSTEM_SHARE = 0.1
SLOPPY_SHARE = 0.1
CHARACTERS_PER_TOKEN = 4.3  # above every source's measure, so that a window of plain text fills its row


@dataclass(frozen=True)
class Kind:
    """One kind of conversation.

    `share` is its per cent of the training tokens. `num_records` says how many different ones the collection
    gives, None where they are made fresh; `grows` marks those that take over what repetition limits leave.
    """

    name: str
    share: float
    make: Callable[[World, Random, int], Draft]
    num_records: Callable[[World], int] | None = None
    grows: bool = False


def _num_questions(world: World, persona: str = "") -> int:
    records = world.corpus["chitchat_smalltalk"]
    return sum(len(r["questions"]) for r in records if persona in ("", r["persona"]))


def mixed(world: World, rng: Random, max_tokens: int) -> Draft:
    """A conversation that changes its subject, as people's do: two to four short drafts in a row."""
    makers = (
        story_request,
        small_talk,
        small_talk,
        plain_sum,
        everyday,
        unknown,
        spelling,
        about_itself,
        told_before,
    )
    exchanges: tuple[Exchange, ...] = ()
    for make in rng.sample(makers, rng.choice((2, 3, 3, 4))):
        exchanges += make(world, rng, max_tokens // 2).exchanges
    return Draft(exchanges)


KINDS = (
    Kind("story", 13, story_request, lambda w: w.weights[-1]),
    Kind("small_talk", 3, small_talk, lambda w: 25 * _num_questions(w, "friendly")),
    Kind("manner", 0.7, small_talk_in_a_manner, lambda w: 25 * _num_questions(w)),
    Kind("itself", 0.8, about_itself),
    Kind("told", 1.5, told_before),
    Kind("mixed", 3, mixed, lambda w: w.weights[-1]),
    Kind("unknown", 4, unknown),
    Kind("tale", 2.5, tale_questions, lambda w: sum(len(r["qa"]) for r in w.corpus["fairytale_qa"])),
    Kind("about_story", 2, story_questions, lambda w: 3 * len(w.stories)),
    Kind("summary", 2, summary, lambda w: 3 * len(w.stories)),
    Kind("tool", 30, tool, grows=True),
    Kind("json", 10, extraction, grows=True),
    Kind("sum", 9, plain_sum, grows=True),
    Kind("problem", 2, word_problem, grows=True),
    Kind("number", 0.5, numbers),
    Kind("everyday", 4, everyday, grows=True),
    Kind("recall", 13, recall, grows=True),
    Kind("copy", 1, copying, grows=True),
    Kind("sort", 1.2, sorting, grows=True),
    Kind("spell", 0.8, spelling, grows=True),
    Kind("count", 0.8, counting, grows=True),
    Kind("place", 0.4, first_and_last, grows=True),
    Kind("in_list", 0.3, in_the_list),
    Kind("sentence", 0.3, one_sentence),
    Kind("where", 1, who_is_where, grows=True),
)
PLAIN_SHARE = 4.0
PHASES = ("main", "long", "final")


def plain_text(world: World, rng: Random, max_tokens: int) -> Record:
    """Text to go on with: a window of a book, a fairy tale or a story; only a whole text has an end mark."""
    roll = rng.random()
    if roll < 0.25:
        return Record("plain", text=world.story(rng, max_tokens).text)
    if roll < 0.5:
        text = "\n\n".join(rng.choice(world.corpus["fairytale_qa"])["sections"].values())
    else:
        text = rng.choice(world.corpus["childrens_books_pd"])["text"]
    room = int(CHARACTERS_PER_TOKEN * max_tokens)
    paragraphs = text.split("\n\n")
    # Any paragraph may be the first, but a row should be filled where the text is long enough.
    latest, left = 0, len(text)
    while latest < len(paragraphs) - 1 and left > room:
        left -= len(paragraphs[latest]) + 2
        latest += 1
    window = "\n\n".join(paragraphs[rng.randrange(latest + 1) :])
    return Record("plain", text=window[:room], ends=roll < 0.5 and len(window) <= room)


def make_record(kind: Kind, world: World, rng: Random, max_tokens: int) -> Record:
    """A draft of this kind, with or without a thought, as carefully typed as people type."""
    draft = kind.make(world, rng, max_tokens)
    exchanges = draft.exchanges
    # Not in longer conversations, where a later thought may quote what was said.
    if len(exchanges) == 1 and rng.random() < SLOPPY_SHARE:
        exchanges = (_sloppy(exchanges[0]),)
    system = draft.system
    if not system and rng.random() < SYSTEM_SHARE:
        system = rng.choice(NEUTRAL_SYSTEMS)
    thinking = rng.random() < THINKING_SHARE
    return Record(kind.name, exchanges, system, thinking, tools=draft.tools, schema=draft.schema)


def _sloppy(exchange: Exchange) -> Exchange:
    """A short request without its capital letter and end mark; a name in front keeps its capital."""
    user = exchange.user
    if len(user) > 80 or "\n" in user or any(user.startswith(item) for item in exchange.items):
        return exchange
    lower = user if user.startswith(("I ", "I'")) else user[0].lower() + user[1:]
    typed = lower.rstrip(".?!") or user
    said = quoted(typed) + ("." if user[-1] in ".?!" else "")
    return replace(exchange, user=typed, thought=exchange.thought.replace(quoted(user), said))


def shares(
    phase: str, sizes: dict[str, float], world: World, total_tokens: int, max_passes: float
) -> dict[str, float]:
    """Each kind's part of the tokens of a phase; together 1.

    `sizes` is the mean tokens of each kind's records. No kind repeats its part of the collection more than
    `max_passes` times in `total_tokens`; what that takes away goes to the kinds made fresh.
    """
    wanted = {kind.name: kind.share for kind in KINDS} | {"plain": 0.0 if phase == "final" else PLAIN_SHARE}
    if phase == "long":
        wanted["recall"] *= 2
    total = sum(wanted.values())
    parts = {name: share / total for name, share in wanted.items()}
    for kind in KINDS:
        if kind.num_records is not None:
            limit = max_passes * kind.num_records(world) * sizes[kind.name] / total_tokens
            parts[kind.name] = min(parts[kind.name], limit)
    num_characters = sum(len(r["text"]) for r in world.corpus["childrens_books_pd"])
    num_characters += sum(len(s) for r in world.corpus["fairytale_qa"] for s in r["sections"].values())
    parts["plain"] = min(parts["plain"], max_passes * num_characters / CHARACTERS_PER_TOKEN / total_tokens)
    growing = sum(parts[kind.name] for kind in KINDS if kind.grows)
    factor = (growing + 1 - sum(parts.values())) / growing
    return {name: part * (factor if name in _GROWING else 1.0) for name, part in parts.items()}


_GROWING = frozenset(kind.name for kind in KINDS if kind.grows)
