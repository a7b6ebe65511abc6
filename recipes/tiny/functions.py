"""Functions that a model may be offered: families with many names and wordings, and ones made up wholly.

functions.txt has the families as lines of `part: a | b | c`; a line that begins with a space goes on. Slots
are `key1,key2=type`; an optional one has `?`. An ask may leave out optional slots only. Results are
`key=type` and answers name the keys of slots and results.
"""

import re
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from random import Random
from typing import Any

from recipes.tiny.values import JSON_TYPES, MAKERS, in_words, made_up, noun
from recipes.tiny.words import is_held_out_word, row
from recipes.tiny.world import World

FAMILIES = Path(__file__).with_name("functions.txt").read_text(encoding="utf-8")
SKIES = row("sunny cloudy rainy windy foggy clear snowy stormy")
UNITS = row("km miles meters feet inches cm kg pounds grams ounces liters gallons cups hours minutes seconds")
STATUSES = row("shipped delivered packed waiting cancelled late paid sent lost returned")
ROOMS = row("kitchen bedroom garage hall office garden bathroom attic cellar nursery")
VERBS = row(
    "get find set make check update remove count open close start stop list show print paint wash move copy "
    "rename send fetch load save pick plan draw mark lock unlock fill clean fix build measure test read store"
)
_MORE_TYPES = row("city person date time int number id item color flag word title text email language items")
_ABOUT = ("{Verb} the {thing}.", "{Verb} a {thing}.", "Use this to {verb} a {thing}.", "{verb} {thing}")
_NEEDS = (
    "{Verb} the {thing}",
    "Please {verb} the {thing}",
    "Can you {verb} the {thing}",
    "I want to {verb} the {thing}",
)
# What is wanted, without the words of the function's name in their order.
_SHORT = (
    "I need the {thing}",
    "The {thing} please",
    "What about the {thing}? {Verb} it",
    "There is a {thing} to {verb}",
    "{thing}: {verb} it",
    "Somebody should {verb} the {thing}",
)
_WITH = (
    "with {key} {value}",
    "{key} {value}",
    "{key}: {value}",
    "where {key} is {value}",
    "with the {key} {value}",
)
_NATURAL = {
    **{
        "city": ("in {value}", "for {value}"),
        "person": ("for {value}", "of {value}"),
        "date": ("on {value}",),
    },
    **{
        "time": ("at {value}",),
        "color": ("in {value}",),
        "language": ("in {value}",),
        "int": ("{value} times",),
    },
}


@dataclass(frozen=True)
class Slot:
    keys: tuple[str, ...]
    type: str
    choices: tuple[str, ...]
    is_optional: bool


@dataclass(frozen=True)
class Family:
    names: tuple[str, ...]
    about: tuple[str, ...]
    slots: tuple[Slot, ...]
    asks: tuple[str, ...]
    result: tuple[tuple[str, str], ...]  # key (none: the value alone) and type; nothing: it only works
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """One offered function: the object that the model is shown, and by slot the key of its parameter."""

    family: Family
    name: str
    shown: dict[str, Any]
    keys: dict[str, str]
    types: dict[str, str]

    @property
    def is_calculator(self) -> bool:
        return any("sum" in slot.type for slot in self.family.slots) or self.family.names[0] in CALCULATORS


CALCULATORS = ("add", "multiply", "subtract", "calculate")


@dataclass(frozen=True)
class Use:
    """A wish for a function: the question, the arguments, a result and what to answer then."""

    function: Function
    ask: str
    arguments: dict[str, Any]
    result: str
    answer: str
    subject: str  # what the first argument was, for a follow-up


def _read(text: str) -> tuple[Family, ...]:
    found = []
    for block in text.strip().replace("\n  |", " |").split("\n\n"):
        parts = dict(line.split(": ", 1) for line in block.split("\n"))
        lists = {key: tuple(p.strip() for p in value.split("|")) for key, value in parts.items()}
        slots = []
        for slot in parts["slots"].split("; "):
            keys, kind = slot.strip().split("=")
            type, *choices = kind.split()
            names = tuple(key.rstrip("?") for key in keys.split(","))
            slots.append(Slot(names, type, tuple(choices), "?" in keys))
        result = (
            ()
            if parts["result"] == "ok"
            else tuple(tuple(p.strip().split("=")) for p in parts["result"].split("; "))
        )
        found.append(
            Family(lists["names"], lists["about"], tuple(slots), lists["asks"], result, lists["answers"])
        )  # type: ignore[arg-type]
    return tuple(found)


KNOWN = _read(FAMILIES)


def _value(slot_type: str, choices: tuple[str, ...], world: World, rng: Random) -> Any:
    if slot_type == "enum":
        return rng.choice(choices)
    own = {
        **{
            "degrees": lambda: rng.randrange(-12, 39),
            "sky": lambda: rng.choice(SKIES),
            "unit": lambda: rng.choice(UNITS),
        },
        **{
            "status": lambda: rng.choice(STATUSES),
            "room": lambda: rng.choice((rng.choice(ROOMS), noun(world, rng))),
        },
        **{"place": lambda: rng.choice((f"the {noun(world, rng)}", MAKERS["city"](world, rng)))},
        **{
            "company": lambda: rng.choice((made_up(world, rng).capitalize(), made_up(world, rng).upper()[:4]))
        },
        **{"folder": lambda: rng.choice((noun(world, rng), f"/{noun(world, rng)}/{made_up(world, rng)}"))},
        **{"integer": lambda: rng.randrange(1, 1000)},
    }
    return own[slot_type]() if slot_type in own else MAKERS[slot_type](world, rng)


def invented(world: World, rng: Random) -> Family:
    """A function that nobody knows: some verb, some thing, some parameters."""
    while True:
        verb = rng.choice(VERBS) if rng.random() < 0.8 else rng.choice(world.words.known)
        if is_held_out_word(verb) == world.words.held_out or not world.words.held_out:
            break
    words = [noun(world, rng) for _ in range(rng.choice((1, 1, 2)))]
    thing, names = " ".join(words), "_".join((verb, *words))
    slots, phrases = [], []
    for type in rng.sample(_MORE_TYPES, rng.choices((0, 1, 2, 3), weights=(1, 5, 4, 2))[0]):
        choices: tuple[str, ...] = ()
        key = type if rng.random() < 0.4 and type not in ("int", "flag") else noun(world, rng)
        if rng.random() < 0.12:
            type, choices = "enum", tuple(dict.fromkeys(noun(world, rng) for _ in range(3)))
        if any(key in slot.keys for slot in slots):
            continue
        phrase = rng.choice(_NATURAL[type] if type in _NATURAL and rng.random() < 0.6 else _WITH)
        slots.append(Slot((key,), type, choices, False))
        phrases.append(phrase.replace("{key}", key).replace("{value}", "{" + key + "}"))
    end = rng.choice((".", "", "?"))
    if rng.random() < 0.25:
        names = "_".join(
            made_up(world, rng) for _ in range(rng.choice((1, 2)))
        )  # only its text says what it does
    fill = {"verb": verb, "Verb": verb.capitalize(), "thing": thing}
    needs = _NEEDS if rng.random() < 0.7 else _SHORT
    asks = tuple(" ".join([need.format(**fill), *phrases]) + end for need in needs)
    about = tuple(form.format(**fill) for form in _ABOUT)
    roll = rng.random()
    if roll < 0.4:
        return Family((names,), about, tuple(slots), asks, (), (f"Done: {verb} {thing}.", "It is done."))
    keys = list(dict.fromkeys(noun(world, rng) for _ in range(rng.choice((1, 1, 2, 3)))))
    result = tuple(
        (key, rng.choice(_MORE_TYPES)) for key in keys if all(key not in slot.keys for slot in slots)
    )
    answer = f"The {thing}: " + ", ".join(f"{key} {{{key}}}" for key, _ in result) + "."
    return Family((names,), about, tuple(slots), asks, result, (answer,) if result else ("It is done.",))


def offered(family: Family, world: World, rng: Random) -> Function:
    """The function as one program would declare it."""
    name = rng.choice(family.names)
    if "_" in name and rng.random() < 0.15:
        first, *rest = name.split("_")
        name = first + "".join(part.capitalize() for part in rest)
    keys, types, properties, required = {}, {}, {}, []
    says = rng.random()
    for slot in family.slots:
        key = slot.keys[0] if rng.random() < 0.4 else rng.choice(slot.keys)
        if key in properties:
            key = slot.keys[0]
        type = "large" if slot.type == "id" and rng.random() < 0.3 else slot.type
        keys[slot.keys[0]], types[slot.keys[0]] = key, type
        shown: dict[str, Any] = {"type": JSON_TYPES.get(type, "integer" if type == "degrees" else "string")}
        if shown["type"] == "integer" and rng.random() < 0.25:
            shown["type"] = "number"
        if slot.type == "enum":
            shown["enum"] = list(slot.choices)
        if slot.type == "items":
            shown["items"] = {"type": "string"}
        if says < 0.45:
            shown["description"] = rng.choice(
                (f"The {slot.keys[0].replace('_', ' ')}", f"the {key}", key.capitalize())
            )
        properties[key] = shown
        if not slot.is_optional:
            required.append(key)
    about = rng.choice(family.about)
    if rng.random() < 0.12:
        # As programs write them from a typed function.
        for key, one in properties.items():
            properties[key] = {"title": key.replace("_", " ").title(), **one}
        parameters = {
            "properties": properties,
            "required": required,
            "title": f"{name}_args",
            "type": "object",
        }
        if properties and rng.random() < 0.5:
            about += "\n\nArgs:\n" + "\n".join(
                f"    {key}: The {key.replace('_', ' ')}" for key in properties
            )
    else:
        parameters = {"type": "object", "properties": properties}
        if required or rng.random() < 0.5:
            parameters["required"] = required
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    shown = {"name": name, "description": about, "parameters": parameters}
    return Function(family, name, shown, keys, types)


def use(function: Function, world: World, rng: Random, ask: str | None = None) -> Use:
    """A question that this function answers, in the family's words."""
    family = function.family
    form = ask or rng.choice(family.asks)
    values = {
        slot.keys[0]: _value(function.types[slot.keys[0]], slot.choices, world, rng)
        for slot in family.slots
        if f"{{{slot.keys[0]}}}" in form or not slot.is_optional
    }
    said = {key: in_words(value) for key, value in values.items()}
    found, result = _result(family, values, world, rng)
    fill = {**said, **found, "on": "", "Day": ""}
    if "day" in said:
        plain = said["day"] in ("today", "tomorrow") or said["day"].startswith("next")
        fill |= {
            "on": "" if plain else "on ",
            "Day": said["day"].capitalize() if plain else f"On {said['day']}",
        }
    arguments = {function.keys[key]: value for key, value in values.items()}
    asked = _with_manners(form, form.format(**fill), function, rng)
    subject = said.get(family.slots[0].keys[0], "") if family.slots else ""
    return Use(function, asked, arguments, result, rng.choice(family.answers).format(**fill), subject)


TAILS = (" right now", " today", " please", " for me", ", thanks", ", please", " if you can", " now", " then")
HEADS = ("Hi! ", "Hello, ", "Hey, ", "Please help: ", "One question: ", "Ok. ", "Now ", "So, ")
# Behind values of other types a tail could be taken for part of them.
_CLOSED = frozenset(row("city person date day time int large id room number currency degrees enum color"))


def _with_manners(form: str, asked: str, function: Function, rng: Random) -> str:
    """Now and then words around the wish that belong to no value."""
    last = re.search(r"{(\w+)}([.?!]?)$", form)
    if last and last[1] in function.types and function.types[last[1]] in _CLOSED and rng.random() < 0.2:
        asked = asked.removesuffix(last[2]) + rng.choice(TAILS) + last[2]
    if asked[0].isupper() and rng.random() < 0.06:
        asked = rng.choice(HEADS) + asked
    return asked


def _result(family: Family, values: dict[str, Any], world: World, rng: Random) -> tuple[dict[str, str], str]:
    """The values that the answer names, and the text that the function gave."""
    if not family.result:
        return {}, rng.choice(("ok", "done", "true", '{"status": "ok"}', '{"ok": true}', "success", "null"))
    if family.result[0][0] == "":
        kind = family.result[0][1]
        if kind in ("sum", "product", "difference"):
            a, b = (values[slot.keys[0]] for slot in family.slots)
            value = round({"sum": a + b, "product": a * b, "difference": a - b}[kind], 4)
        else:
            value = _value(kind, (), world, rng)
        form = rng.choice(("{}", "{}", '{{"result": {}}}'))
        return {"result": in_words(value)}, form.format(
            value if not isinstance(value, str) or form == "{}" else dumps(value)
        )
    found = {key: _value(type, (), world, rng) for key, type in family.result}
    said = {key: in_words(value) for key, value in found.items()}
    if rng.random() < 0.7:
        return said, dumps(found, ensure_ascii=False)
    return said, rng.choice((", ", "\n", "; ")).join(f"{key}: {value}" for key, value in said.items())
