"""Evaluation of tools, JSON and honesty: functions, texts and questions written by hand for it alone."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from recipes.tiny.words import row

NAMES = row(
    "Wolfgang Chiara Benedikt Xiomara Thandiwe Ragnhild Casimir Leocadia Aurelio Beatrix Fyodor Guinevere"
)
SURNAMES = row("Okonkwo Halvorsen Petrosyan Van-Dyke McAllister Szymanski Quispe Fitzgerald Tanaka Lindqvist")
TOWNS = row(
    "Reykjavik Ljubljana Bratislava Tbilisi Windhoek Montevideo Gothenburg Salzburg Halifax Cusco Zagreb Graz"
)
THINGS = row(
    "saxophone thermos microscope hammock trampoline wheelbarrow bagpipe stapler telescope snowboard kayak"
)

# name, about, parameters (key: type, or a list of choices), ways to ask, result keys
FUNCTIONS: tuple[tuple[str, str, dict[str, Any], tuple[str, ...], dict[str, str]], ...] = (
    (
        *("get_pollen", "Pollen in the air of a town", {"town": "town"}),
        (
            "How much pollen is there in {town}?",
            "Pollen in {town}?",
            "Is there much pollen around {town} today?",
        ),
        {"grains": "count"},
    ),
    (
        *(
            "mow_lawn",
            "Mow a part of the lawn to a height in millimeters",
            {"part": "thing", "height": "count"},
        ),
        ("Please mow the {part} part down to {height} millimeters.", "Mow {part}, height {height}"),
        {},
    ),
    (
        *("open_curtain", "Open the curtain of a window", {"window": ["left", "right", "middle"]}),
        ("Open the {window} curtain.", "Can you open the curtain of the {window} window for me?"),
        {},
    ),
    (
        *("get_snow_depth", "Depth of the snow at a resort in centimeters", {"resort": "town"}),
        ("How deep is the snow in {resort}?", "What is the depth of the snow at {resort} right now?"),
        {"centimeters": "decimal"},
    ),
    (
        *("find_ferry", "Next ferry between two ports", {"from_port": "town", "to_port": "town"}),
        (
            "When does the next ferry from {from_port} to {to_port} leave?",
            "Ferry from {from_port} to {to_port}?",
        ),
        {"departure": "time", "pier": "count"},
    ),
    (
        *("get_rank", "Rank of a player in a game", {"player": "name", "game": ["chess", "darts", "go"]}),
        ("Which rank does {player} have in {game}?", "Look up the {game} rank of {player}."),
        {"rank": "count"},
    ),
    (
        *(
            "cut_video",
            "Cut a video from one second to another",
            {"file": "file", "first": "count", "last": "count"},
        ),
        (
            "Cut {file} from second {first} to second {last}.",
            "Keep only seconds {first} to {last} of {file}.",
        ),
        {},
    ),
    (
        *("engrave", "Engrave a word on some plates", {"word": "thing", "plates": "count"}),
        ('Engrave the word "{word}" on {plates} plates.', "I need {plates} plates engraved with {word}."),
        {},
    ),
    (
        *("heat_pool", "Heat a swimming pool", {"pool": "thing"}),
        ("Heat the {pool} pool.", "Turn on the heating of the {pool} pool, please."),
        {},
    ),
    (
        *("lookup_plate", "Find a car by its license plate", {"plate": "code"}),
        ("Which car has the license plate {plate}?", "Find the car with the plate {plate}."),
        {"model": "thing", "holder": "name"},
    ),
    (
        *(
            "brew_coffee",
            "Brew some coffee",
            {"kind": ["espresso", "mocha", "filter"], "size": ["small", "large"]},
        ),
        ("Brew a {size} {kind} coffee.", "I would like a {size} {kind}."),
        {"minutes": "count"},
    ),
    (
        *("swap_seats", "Swap the seats of two guests", {"first": "name", "second": "name"}),
        ("Swap the seats of {first} and {second}.", "Let {first} and {second} change seats."),
        {},
    ),
    (
        *("get_holiday", "Which holiday is on a date", {"date": "date"}),
        ("Which holiday is on {date}?", "Is {date} a holiday?"),
        {"holiday": "thing"},
    ),
    (
        *("count_parcels", "How many parcels came on a day", {"date": "date"}),
        ("How many parcels came on {date}?", "Count the parcels of {date}."),
        {"parcels": "count"},
    ),
    (
        *("set_fan", "Speed of the fan in per cent", {"percent": "count"}),
        ("Set the fan to {percent} percent.", "Fan speed {percent}, please."),
        {},
    ),
    (
        *("get_badge", "Badge number of a worker", {"worker": "name"}),
        ("What is the badge number of {worker}?", "Find the badge number for {worker}."),
        {"badge": "code"},
    ),
)
OPEN = (
    *(
        "What is the capital of France?",
        "Who wrote Romeo and Juliet?",
        "How do vaccines work?",
        "What is quantum physics?",
    ),
    *("Who was the first person on the moon?", "What is the population of Brazil?", "Why is the sky blue?"),
    *("How do I change a tire?", "Explain the theory of relativity.", "What caused the First World War?"),
    *("Who is the prime minister of Japan?", "What is the largest ocean?", "How tall is Mount Everest?"),
    *(
        "What is the best way to lose weight?",
        "Give me investment advice.",
        "Write a Python script that renames files.",
    ),
    *(
        "Translate good morning into Italian.",
        "What is the weather like in Boston today?",
        "Who won the last World Cup?",
    ),
    *("What does photosynthesis mean?", "How far away is the sun?", "What year did the Titanic sink?"),
    *(
        "Can you explain how a car engine works?",
        "What are the ingredients of a lasagna?",
        "Who painted the Mona Lisa?",
    ),
    *(
        "What is the boiling point of water?",
        "How many planets are there?",
        "What is the currency of Switzerland?",
    ),
    *("Tell me about the Roman Empire.", "What is machine learning?", "Who invented the telephone?"),
    *("How do I get a passport?", "What is the square root of 1521?", "Which country has the most people?"),
    *(
        "What is the difference between a virus and a bacterium?",
        "Where is the Eiffel Tower?",
        "What is inflation?",
    ),
    *("How do airplanes fly?", "Who discovered penicillin?", "What is the longest river in the world?"),
    *("Recommend a good movie.", "What are the side effects of aspirin?", "How does the stock market work?"),
    *("What happened in 1989?", "Who is Albert Einstein?", "What language is spoken in Brazil?"),
    *("Write a poem in French.", "Help me write my resume.", "What is the speed of sound?"),
    *(
        "Is there life on Mars?",
        "How do I bake sourdough bread?",
        "Who was Cleopatra?",
        "What is a black hole?",
    ),
    *("What is the tallest building in the world?", "How old is the universe?", "What causes earthquakes?"),
    *(
        "Which vitamins are in carrots?",
        "Who is the CEO of Microsoft?",
        "What is the national anthem of Canada?",
    ),
    *(
        "How do I install Linux?",
        "Solve the integral of x squared.",
        "What is the meaning of the word ubiquitous?",
    ),
    *("Why do cats purr?", "How many bones are in the human body?", "What is the GDP of Germany?"),
    *("Who was Napoleon?", "What is DNA?", "How can I learn the guitar?", "What is a blockchain?"),
    *(
        "Give me the latest news.",
        "Book a table for two tonight.",
        "What is my horoscope?",
        "Who will win the election?",
    ),
    *("What time does the sun set in Oslo?", "What is the chemical symbol of gold?", "What do pandas eat?"),
    *("When did dinosaurs live?", "What is the plot of Hamlet?", "How do magnets work?", "Who founded Rome?"),
    *(
        "What is the price of bitcoin?",
        "Which is the smallest country?",
        "How do I cure a cold?",
        "What is gravity?",
    ),
    *("What is the internet made of?", "Name three famous painters.", "How is glass made?"),
)
CHAT = (
    "Hello!",
    "Thank you very much!",
    "What is your name?",
    "How are you today?",
    "What can you do?",
    "Are you a robot?",
)


def _value(kind: Any, rng: Random) -> Any:
    if isinstance(kind, list):
        return rng.choice(kind)
    return {
        "town": lambda: rng.choice(TOWNS),
        "thing": lambda: rng.choice(THINGS),
        "name": lambda: rng.choice(NAMES) + (f" {rng.choice(SURNAMES)}" if rng.random() < 0.5 else ""),
        "count": lambda: rng.randrange(3, 300),
        "decimal": lambda: round(rng.uniform(0.2, 9), 2),
        "time": lambda: f"{rng.randrange(24):02}:{rng.randrange(60):02}",
        "date": lambda: f"{rng.randrange(2020, 2030)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
        "code": lambda: f"{rng.choice('QXZ')}{rng.randrange(1000, 99999)}",
        "file": lambda: f"{rng.choice(THINGS)}.{rng.choice(('png', 'jpg'))}",
    }[kind]()


def _tool(function: tuple[Any, ...]) -> dict[str, Any]:
    name, about, parameters, *_ = function
    properties: dict[str, Any] = {}
    for key, kind in parameters.items():
        properties[key] = {"type": {"count": "integer", "decimal": "number"}.get(str(kind), "string")}
        if isinstance(kind, list):
            properties[key]["enum"] = kind
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def _line(suite: str, kind: str, ask: str, thinking: bool, expected: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": ask}]
    return {
        "suite": suite,
        "kind": kind,
        "messages": messages,
        "thinking": thinking,
        "expected": expected,
        **more,
    }


def tool_prompts(rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """Of ten: four calls, one pair, three without a fitting tool, one error, one loop of three steps.

    A call goes on with its result, which the answer must tell.
    """
    for number in range(count):
        offered = rng.sample(FUNCTIONS, rng.choice((1, 2, 3, 4)))
        function, thinking = rng.choice(offered), number // 10 % 2 == 0
        tools = [_tool(one) for one in offered]
        name, _, parameters, asks, result = function
        arguments = {key: _value(kind, rng) for key, kind in parameters.items()}
        ask = rng.choice(asks).format(**arguments)
        first = {"calls": [{"name": name, "arguments": arguments}]}
        place = number % 10
        if place < 4:
            found = {key: _value(kind, rng) for key, kind in result.items()}
            said = json.dumps(found) if found else "ok"
            end = {"says": [str(value) for value in found.values()]} if found else {"calls": []}
            steps = [{**first, "results": [said]}, end]
            yield _line("tools", "call and answer", ask, thinking, steps, tools=tools)
        elif place == 4:
            other = rng.choice(offered)
            more = {key: _value(kind, rng) for key, kind in other[2].items()}
            both = f"{ask} And also: {rng.choice(other[3]).format(**more)}"
            calls = [*first["calls"], {"name": other[0], "arguments": more}]
            yield _line("tools", "two calls", both, thinking, [{"calls": calls}], tools=tools)
        elif place < 7:
            others = [one for one in FUNCTIONS if one not in offered]
            other = rng.choice(others)
            lost = rng.choice(other[3]).format(**{key: _value(kind, rng) for key, kind in other[2].items()})
            asked = lost if place == 5 else rng.choice((*OPEN, *CHAT))
            yield _line("tools", "none fits", asked, thinking, [{"calls": []}], tools=tools)
        elif place == 7:
            yield _line("tools", "none fits", rng.choice(CHAT), thinking, [{"calls": []}], tools=tools)
        elif place == 8:
            error = rng.choice(("backend offline", "quota exceeded", "no data", "sensor broken"))
            steps = [{**first, "results": [f"Error: {error}"]}, {"says": [error]}]
            yield _line("tools", "error", ask, thinking, steps, tools=tools)
        else:
            yield _loop(rng, thinking)


def _loop(rng: Random, thinking: bool) -> dict[str, Any]:
    """A person's number, what is stored under it, and what belongs to that."""
    who = _value("name", rng)
    member, locker, key = (_value("code", rng) for _ in range(3))
    links = (
        ("get_badge", "worker", "badge"),
        ("get_locker", "badge", "locker"),
        ("get_key", "locker", "key"),
    )
    tools = []
    for name, given, found in links:
        schema = {"type": "object", "properties": {given: {"type": "string"}}, "required": [given]}
        shown = {"name": name, "description": f"The {found} that belongs to a {given}", "parameters": schema}
        tools.append({"type": "function", "function": shown})
    values = (who, member, locker, key)
    steps: list[dict[str, Any]] = [
        {
            "calls": [{"name": name, "arguments": {given: values[at]}}],
            "results": [json.dumps({found: values[at + 1]})],
        }
        for at, (name, given, found) in enumerate(links)
    ]
    rng.shuffle(tools)
    asked = rng.choice(
        (f"What is the key of {who}?", f"Find the badge, then the locker, then the key of {who}.")
    )
    return _line("tools", "three steps", asked, thinking, [*steps, {"says": [key]}], tools=tools)


TEXTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("{name}, {age}, is a nurse in {town}.", {"name": "name", "age": "age", "town": "town"}),
    (
        "My neighbour {name} turned {age} last week. She plays the {thing}.",
        {"name": "name", "age": "age", "instrument": "thing"},
    ),
    (
        "We sold a {thing} for {price} dollars to {name}.",
        {"item": "thing", "price": "price", "buyer": "name"},
    ),
    (
        "The workshop is in {town} on {date}. {age} people have signed up.",
        {"city": "town", "date": "date", "people": "age"},
    ),
    (
        "Invoice {code}: {age} pieces of {thing}, total {price}.",
        {"invoice": "code", "quantity": "age", "article": "thing", "total": "price"},
    ),
    (
        "{name} lives in {town} and can be reached at {mail}.",
        {"name": "name", "city": "town", "email": "mail"},
    ),
    (
        "Dear team, the {thing} race starts at {time} in {town}. Yours, {name}",
        {"time": "time", "place": "town", "sender": "name"},
    ),
    (
        "Lost: a {color} {thing} near the station of {town}. Call {name}.",
        {"color": "color", "object": "thing", "city": "town", "contact": "name"},
    ),
)
_TYPES = {"age": "integer", "price": "number"}


def json_prompts(rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """A short text as people write them, and a schema whose every value stands in it."""
    for number in range(count):
        form, keys = TEXTS[number % len(TEXTS)]
        values = {
            **{kind: _value(kind, rng) for kind in ("name", "town", "thing", "time", "date", "code")},
            **{"age": rng.randrange(18, 90), "price": round(rng.uniform(3, 200), 2)},
            "mail": f"{rng.choice(NAMES).lower()}@{rng.choice(THINGS)}.org",
            "color": rng.choice(("turquoise", "beige", "crimson", "violet")),
        }
        order = list(keys)
        rng.shuffle(order)
        properties = {key: {"type": _TYPES.get(keys[key], "string")} for key in order}
        schema = {
            "type": "object",
            "properties": properties,
            "required": order,
            "additionalProperties": False,
        }
        asked = rng.choice(
            ("Extract the fields: {}", "{}", "Read this text and fill in the form. {}")
        ).format(form.format(**values))
        expected = {key: values[keys[key]] for key in order}
        yield _line("json", f"{len(order)} fields", asked, number // 8 % 2 == 0, expected, schema=schema)


def open_prompts(rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """Questions that people ask, none of which the model can answer."""
    for number, asked in enumerate(rng.sample(OPEN, min(count, len(OPEN)))):
        yield _line("unknown", "open question", asked, number % 2 == 0, None)
