"""JSON: what a text says, by a schema that the user gives; every value stands in the text."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.values import JSON_TYPES, MAKERS, in_words, made_up, noun, person
from recipes.tiny.words import JOBS
from recipes.tiny.world import World

# key names, type of value, how a text says it of {s} (a name or thing)
PERSON = """
age,years=age: {s} is {v} years old. | {s}, {v}, | {s} has turned {v}.
city,town,home,place,location=city: {s} lives in {v}. | {s} comes from {v}. | The home of {s} is {v}.
job,profession,occupation,work=job: {s} works as a {v}. | {s} is a {v}. | By profession {s} is a {v}.
email,mail,contact=email: The email of {s} is {v}. | Write to {s} at {v}. | {s} can be reached at {v}.
phone,telephone,number=phone: The phone number of {s} is {v}. | Call {s} at {v}.
birthday,born,birth_date=date: {s} was born on {v}. | The birthday of {s} is {v}.
color,favorite_color=color: {s} likes {v} best. | The favorite color of {s} is {v}.
hobbies,likes,interests=items: {s} likes {v}. | The hobbies of {s} are {v}.
pet,animal=word: {s} has a {v} at home. | The pet of {s} is a {v}.
member,is_member=flag: {s} is a member. / {s} is not a member. | {s} has joined us. / {s} has left us.
company,employer=title: {s} works for {v}. | The company of {s} is called {v}.
language,speaks=language: {s} speaks {v}. | The language of {s} is {v}.
"""
ORDER = """
quantity,count,amount=int: {v} pieces of {s} were ordered. | The order is for {v} {s}. | {s}: {v} pieces.
price,cost,unit_price=number: {s} costs {v}. | The price of {s} is {v} dollars. | You pay {v} for {s}.
color,colour=color: The color of {s} is {v}. | {s} comes in {v}.
order_id,id,code=id: The order number is {v}. | Order {v}. | The code of {s} is {v}.
date,delivery_date,day=date: It comes on {v}. | Delivery on {v}. | The date is {v}.
city,shop,store=city: It is sent from {v}. | The shop is in {v}.
in_stock,available=flag: {s} is in stock. / {s} is sold out. | {s} is available. / {s} is not available.
weight,kilos=number: {s} weighs {v} kg. | The weight is {v} kg.
customer,buyer,name=person: The customer is {v}. | {v} ordered it. | It is for {v}.
parts,contains,extras=items: {s} comes with {v}. | In the box there are {v}.
rating,stars=small: It has {v} stars. | {v} of 5 stars. | People give {s} {v} stars.
"""
EVENT = """
date,day,when=date: {s} is on {v}. | {s} takes place on {v}. | The date of {s} is {v}.
time,start,begins=time: {s} begins at {v}. | Start: {v}. | It starts at {v}.
city,place,location,where=city: {s} is in {v}. | We meet in {v}. | {s} takes place in {v}.
guests,people,attendees=int: {v} people will come. | There are {v} guests.
organizer,host,contact=person: {v} is the host. | {v} plans {s}. | Ask {v}.
speakers,topics,program=items: The program has {v}. | There will be {v}.
price,fee,ticket=number: A ticket costs {v}. | The fee is {v}.
online,is_online=flag: {s} is online. / {s} is not online. | You can join online. / You cannot join online.
duration,minutes,length=int: It takes {v} minutes. | {s} lasts {v} minutes.
"""
FILLERS = (
    *(
        "Hello!",
        "This is a short note.",
        "Here is what I know.",
        "Thank you for reading.",
        "More news will follow.",
    ),
    *(
        "The sun was shining.",
        "Everybody was happy.",
        "Please keep this.",
        "It was a good day.",
        "See you soon.",
    ),
)
ASKS = (
    *(
        "Extract the data from this text: {}",
        "{}",
        "Give me JSON for this text: {}",
        "Read this and answer in JSON: {}",
    ),
    *(
        "Text: {}",
        "Fill in the fields: {}",
        "What does this text say? {}",
        "{}\n\nAnswer in JSON.",
        "Parse: {}",
    ),
    *(
        "Make a JSON object of this: {}",
        "Extract the fields. {}",
        "Turn this into JSON:\n\n{}",
        "{}\nExtract this as JSON.",
    ),
)


# Short notes as people write them, several values in a sentence; a value's part -> its keys and type.
NOTES = Path(__file__).with_name("notes.txt").read_text(encoding="utf-8").splitlines()
PARTS = {
    **{"name": (("name", "person", "who", "full_name"), "person"), "age": (("age", "years"), "age")},
    **{"city": (("city", "town", "location"), "city"), "place": (("to", "destination", "place"), "city")},
    **{
        "job": (("job", "profession", "occupation", "role"), "job"),
        "date": (("date", "day", "when"), "date"),
    },
    **{
        "item": (("item", "product", "article", "thing", "object"), "item"),
        "color": (("color", "colour"), "color"),
    },
    **{
        "price": (("price", "cost", "total", "amount"), "number"),
        "time": (("time", "start", "hour"), "time"),
    },
    **{"count": (("count", "quantity", "number", "pieces"), "int"), "email": (("email", "mail"), "email")},
    **{"code": (("code", "id", "reference", "key"), "id"), "phone": (("phone", "telephone"), "phone")},
    **{"event": (("event", "title", "subject"), "word"), "language": (("language", "speaks"), "language")},
    **{
        "buyer": (("buyer", "customer", "recipient", "receiver"), "person"),
        "company": (("company", "firm"), "title"),
    },
    **{
        "seller": (("seller", "owner", "vendor"), "person"),
        "sender": (("sender", "contact", "author"), "person"),
    },
}


@dataclass(frozen=True)
class Field:
    keys: tuple[str, ...]
    type: str
    forms: tuple[str, ...]


def _read(text: str) -> tuple[Field, ...]:
    found = []
    for line in text.strip().split("\n"):
        head, forms = line.split(": ", 1)
        keys, type = head.split("=")
        found.append(Field(tuple(keys.split(",")), type, tuple(form.strip() for form in forms.split("|"))))
    return tuple(found)


TOPICS = (
    ("name", "person", _read(PERSON)),
    ("product", "item", _read(ORDER)),
    ("title", "event", _read(EVENT)),
)


def _value(type: str, world: World, rng: Random) -> Any:
    if type == "age":
        return rng.randrange(3, 99)
    if type == "small":
        return rng.randrange(1, 6)
    if type == "job":
        return rng.choice(JOBS)
    return MAKERS[type](world, rng)


def _note(world: World, rng: Random) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """As `_object`, of one sentence with several values."""
    form = rng.choice(NOTES)
    parts = re.findall(r"{(\w+)}", form)
    said = {part: _value(PARTS[part][1], world, rng) for part in parts}
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    wanted = parts if rng.random() < 0.7 or len(parts) < 3 else rng.sample(parts, len(parts) - 1)
    for part in wanted:
        keys, type = PARTS[part]
        key = keys[0] if rng.random() < 0.5 else rng.choice(keys)
        properties[key], values[key] = {"type": _json_type(type)}, said[part]
    text = form.format(**{part: in_words(value) for part, value in said.items()})
    return properties, values, [text]


def _json_type(type: str) -> str:
    return "integer" if type in ("age", "small") else JSON_TYPES.get(type, "string")


def _subject(kind: str, world: World, rng: Random) -> str:
    if kind == "person":
        return person(world, rng)
    if kind == "event":
        event = rng.choice(("party", "meeting", "concert", "fair", "market", "race", noun(world, rng)))
        return f"The {noun(world, rng)} {event}"
    return f"The {MAKERS['item'](world, rng)}"


def _invented(world: World, rng: Random) -> Field:
    """A field that nobody knows: `the bakor of Tom is 14`."""
    key = noun(world, rng) if rng.random() < 0.6 else f"{noun(world, rng)}_{noun(world, rng)}"
    type = rng.choice(("int", "word", "number", "id", "city", "title", "date", "color", "person"))
    shown = key.replace("_", " ")
    forms = (
        f"The {shown} of {{s}} is {{v}}.",
        f"The {shown} is {{v}}.",
        f"{shown.capitalize()}: {{v}}.",
        f"{{s}} has the {shown} {{v}}.",
    )
    return Field((key,), type, forms)


def _object(
    world: World, rng: Random, fewest: int, most: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """-> properties, values and the sentences that say them."""
    name_key, kind, known = rng.choice(TOPICS)
    subject = _subject(kind, world, rng)
    fields = rng.sample(known, rng.randrange(fewest, most))
    fields = [_invented(world, rng) if rng.random() < 0.25 else field for field in fields]
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    sentences: list[str] = []
    if rng.random() < 0.75:
        key = (
            name_key
            if rng.random() < 0.7
            else rng.choice(("name", "title", "item", "who", "what", "subject"))
        )
        properties[key], values[key] = {"type": "string"}, subject.removeprefix("The ")
    for field in fields:
        key = rng.choice(field.keys)
        if key in properties:
            continue
        value = _value(field.type, world, rng)
        form = rng.choice(field.forms)
        if field.type == "flag":
            form = form.split(" / ")[0 if value else 1]
        sentences.append(form.format(s=subject, v=in_words(value)))
        if sentences[-1].endswith(","):
            sentences[-1] = f"{sentences[-1]} is well."
        properties[key] = {"type": _json_type(field.type)}
        if field.type == "items":
            properties[key]["items"] = {"type": "string"}
        if field.type == "color" and rng.random() < 0.3:
            others = {MAKERS["color"](world, rng) for _ in range(3)} - {value}
            choices = [value, *sorted(others)]
            rng.shuffle(choices)
            properties[key]["enum"] = choices
        values[key] = value
    if not any(subject in sentence for sentence in sentences):
        sentences.insert(0, rng.choice((f"This is about {subject}.", f"{subject}:", f"Name: {subject}.")))
    rng.shuffle(sentences)
    return properties, values, sentences


def extraction(world: World, rng: Random, max_tokens: int) -> Draft:
    """A text and a schema -> the object; now and then a list, an object in an object, or no schema."""
    roll = rng.random()
    if roll < 0.12:
        return _several(world, rng)
    if rng.random() < 0.55:
        properties, values, sentences = _note(world, rng)
    else:
        properties, values, sentences = _object(world, rng, 2, 6)
    if roll < 0.20:
        inner_properties, inner, more = _object(world, rng, 2, 3)
        key = rng.choice(("details", "info", "other", made_up(world, rng)))
        if key not in properties:
            properties[key] = {"type": "object", "properties": inner_properties, "required": list(inner)}
            values[key] = inner
            sentences += more
    order = list(properties)
    rng.shuffle(order)
    values = {key: values[key] for key in order}
    properties = {key: properties[key] for key in order}
    for _ in range(rng.choice((0, 0, 1, 2))):
        sentences.insert(rng.randrange(len(sentences) + 1), rng.choice(FILLERS))
    text = rng.choice((" ", " ", "\n")).join(_with_pronouns(sentences, rng))
    thought = " ".join(f"{key}: {_said(value)}." for key, value in values.items())
    answer = json.dumps(values, ensure_ascii=False)
    if roll > 0.8:
        keys = ", ".join(order)
        asked = rng.choice(
            (
                "Give me a JSON object with the keys {keys}. {text}",
                "{text}\n\nAnswer as JSON with {keys}.",
                "Extract {keys} as JSON: {text}",
                "Return only JSON with the fields {keys}.\n\n{text}",
            )
        ).format(keys=keys, text=text)
        schema = {"type": "object"} if rng.random() < 0.3 else None
        return Draft((Exchange(asked, thought, answer),), schema=schema)
    for key, shown in properties.items():
        if rng.random() < 0.15:
            shown["description"] = rng.choice((f"The {key}", f"the {key.replace('_', ' ')}"))
    return Draft((Exchange(rng.choice(ASKS).format(text), thought, answer),), schema=_schema(properties, rng))


def _with_pronouns(sentences: list[str], rng: Random) -> list[str]:
    """Now and then say `She lives in Oslo.` behind a sentence that begins with the same two words."""
    if rng.random() < 0.6:
        return sentences
    pronoun, out, last = rng.choice(("He", "She", "It", "This")), list(sentences), ""
    for at, sentence in enumerate(sentences):
        first = re.match(
            r"(?:The )?\w+(?: [A-Z]\w+)?(?= (?:is|has|lives|comes|works|likes|speaks|costs|begins) )",
            sentence,
        )
        if first and first[0] == last:
            out[at] = pronoun + sentence[first.end() :]
        last = first[0] if first else last
    return out


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(one)}" for key, one in value.items())
    return in_words(value)


def _schema(properties: dict[str, Any], rng: Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    if rng.random() < 0.25:
        schema = {"title": rng.choice(("Person", "Order", "Event", "Data", "Result", "Answer")), **schema}
    return schema


def _several(world: World, rng: Random) -> Draft:
    """Some people or things with the same two or three fields."""
    name_key, kind, known = rng.choice(TOPICS)
    plain = [
        field
        for field in known
        if field.type not in ("items", "flag") and any("{s}" in f for f in field.forms)
    ]
    fields = rng.sample(plain, rng.choice((1, 1, 2)))
    keys = [rng.choice(field.keys) for field in fields]
    if len({name_key, *keys}) <= len(keys):
        return _several(world, rng)
    objects, lines = [], []
    for _ in range(rng.choice((2, 2, 3))):
        subject = _subject(kind, world, rng)
        one: dict[str, Any] = {name_key: subject.removeprefix("The ")}
        said = []
        for key, field in zip(keys, fields, strict=True):
            one[key] = _value(field.type, world, rng)
            form = rng.choice([form for form in field.forms if "{s}" in form and form.endswith(".")])
            said.append(form.format(s=subject, v=in_words(one[key])))
        objects.append(one)
        lines.append(" ".join(said))
    properties: dict[str, Any] = {name_key: {"type": "string"}}
    properties |= {key: {"type": _json_type(field.type)} for key, field in zip(keys, fields, strict=True)}
    outer = rng.choice(("items", "people", "entries", "list", "results"))
    inner = {"type": "object", "properties": properties, "required": list(properties)}
    schema = _schema({outer: {"type": "array", "items": inner}}, rng)
    thought = " ".join(
        " ".join(f"{key}: {in_words(value)}." for key, value in one.items()) for one in objects
    )
    answer = json.dumps({outer: objects}, ensure_ascii=False)
    text = rng.choice((" ", "\n")).join(lines)
    return Draft(
        (Exchange(rng.choice(ASKS).format(text), f"There are {len(objects)}. {thought}", answer),),
        schema=schema,
    )
