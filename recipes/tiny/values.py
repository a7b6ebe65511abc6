"""Values of every type that a question or a text may name, made without limit: people, places, codes."""

from collections.abc import Callable
from random import Random
from typing import Any

from recipes.tiny.stories import listed
from recipes.tiny.words import COLORS, is_held_out_word, row
from recipes.tiny.world import World

DAYS = row("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = row("January February March April May June July August September October November December")
CITIES = row(
    "London Paris Berlin Rome Madrid Oslo Vienna Boston Chicago Dallas Denver Tokyo Cairo Delhi Lima Athens "
    "Dublin Moscow Prague Warsaw Zurich Geneva Munich Hamburg Milan Venice Naples Porto Seville Lyon Nice "
    "Bern Austin Seattle Miami Phoenix Toronto Montreal Sydney Perth Beijing Shanghai Seoul Mumbai Bangkok "
    "Istanbul Tehran Jakarta Manila Havana Bogota Santiago Quito Accra Lagos Kyoto Osaka Oxford York Leeds"
)
HELD_OUT_CITIES = row(
    "Lisbon Nairobi Helsinki Stockholm Budapest Krakow Marseille Valencia Houston Atlanta Vancouver "
    "Melbourne Auckland Singapore Dakar Tunis Riga Tallinn Brussels Antwerp Glasgow Cardiff Turin Bologna"
)
LANGUAGES = row(
    "French German Spanish Italian Dutch Polish Greek Turkish Arabic Chinese Japanese Swedish Latin"
)
CURRENCIES = row("USD EUR GBP JPY CHF CAD AUD SEK NOK DKK PLN INR CNY BRL MXN")
_SYLLABLES = row(
    "ba be bo da de di do ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re ri ro sa se si so "
    "ta te ti to va ve vi vo za zo bra dri fle gro kle plu sta tri sho cha the wen lun mar tor ven dal bur"
)
_ENDS = ("", "", "n", "r", "s", "l", "m", "th", "ck", "nd", "rt", "sk", "ville", "burg", "ton", "field")


def made_up(world: World, rng: Random) -> str:
    """A word that nobody knows, in lower case."""
    while True:
        count = rng.choices((1, 2, 3), weights=(2, 5, 2))[0]
        word = "".join(rng.choice(_SYLLABLES) for _ in range(count)) + rng.choice(_ENDS)
        if len(word) > 2 and is_held_out_word(word) == world.words.held_out:
            return word


def noun(world: World, rng: Random) -> str:
    """A word of stories and books, or one that nobody knows."""
    roll = rng.random()
    if roll < 0.3:
        return rng.choice(world.words.objects)
    return rng.choice(world.words.known) if roll < 0.75 else made_up(world, rng)


def person(world: World, rng: Random) -> str:
    first = world.words.name(rng) if rng.random() < 0.55 else world.words.made_up_name(rng)
    return first if rng.random() < 0.7 else f"{first} {made_up(world, rng).capitalize()}"


def city(world: World, rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(HELD_OUT_CITIES if world.words.held_out else CITIES)
    name = made_up(world, rng).capitalize()
    return name if rng.random() < 0.85 else f"{rng.choice(('New', 'San', 'Port', 'Upper', 'Lake'))} {name}"


def day(world: World, rng: Random) -> str:
    return rng.choice((*DAYS, "today", "tomorrow", "Friday", "next Monday"))


def date(world: World, rng: Random) -> str:
    year, month, number = rng.randrange(1990, 2035), rng.randrange(1, 13), rng.randrange(1, 29)
    if rng.random() < 0.6:
        return f"{year}-{month:02}-{number:02}"
    return f"{MONTHS[month - 1]} {number}" + (f", {year}" if rng.random() < 0.4 else "")


def clock(world: World, rng: Random) -> str:
    if rng.random() < 0.6:
        return f"{rng.randrange(0, 24):02}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}"
    return f"{rng.randrange(1, 13)} {rng.choice(('am', 'pm'))}"


def integer(world: World, rng: Random) -> int:
    return rng.randrange(1, rng.choice((10, 10, 30, 100, 1000)))


def large(world: World, rng: Random) -> int:
    return rng.randrange(10, 10 ** rng.choice((2, 3, 4, 5)))


def decimal(world: World, rng: Random) -> float | int:
    return rng.choice((rng.randrange(1, 400), round(rng.uniform(0.1, 99), 1), round(rng.uniform(1, 99), 2)))


def identity(world: World, rng: Random) -> str:
    number = str(rng.randrange(10, 10 ** rng.choice((3, 4, 5, 6))))
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.choice((1, 2, 3))))
    return rng.choice((number, number, f"{letters}-{number}", f"{letters}{number}", f"#{number}"))


def email(world: World, rng: Random) -> str:
    end = rng.choice(("com", "org", "net", "io", "co"))
    return f"{rng.choice((person, noun))(world, rng).lower().replace(' ', '.')}@{made_up(world, rng)}.{end}"


def phone(world: World, rng: Random) -> str:
    digits = "".join(str(rng.randrange(10)) for _ in range(7))
    return rng.choice((f"{digits[:3]}-{digits[3:]}", f"555-{digits[:4]}", digits, f"+1 {digits}"))


def path(world: World, rng: Random) -> str:
    end = rng.choice(("txt", "md", "csv", "py", "json", "log"))
    folder = rng.choice(("", "", f"{noun(world, rng)}/", f"/home/{made_up(world, rng)}/"))
    return f"{folder}{noun(world, rng)}.{end}"


def address(world: World, rng: Random) -> str:
    return f"https://{rng.choice(('', 'www.'))}{made_up(world, rng)}.com/{noun(world, rng)}"


def item(world: World, rng: Random) -> str:
    roll = rng.random()
    if roll < 0.5:
        return noun(world, rng)
    return f"{rng.choice(COLORS) if roll < 0.7 else noun(world, rng)} {noun(world, rng)}"


def title(world: World, rng: Random) -> str:
    words = " ".join(noun(world, rng) for _ in range(rng.choice((1, 2, 2, 3))))
    return words.capitalize() if rng.random() < 0.6 else words.title()


def text(world: World, rng: Random) -> str:
    """A short thing to say."""
    if rng.random() < 0.4:
        fitting = [s for s in rng.choice(world.stories).sentences[:6] if len(s) < 60 and '"' not in s]
        if fitting:
            return rng.choice(fitting)
    form = rng.choice(
        (
            "I will be late",
            "See you on {day}",
            "Happy birthday",
            "The {a} is ready",
            "Please bring the {a}",
            "Meeting moved to {clock}",
            "Thank you for the {a}",
            "Call me at {clock}",
            "I am in {city}",
            "buy {a} and {b}",
            "{a} {b}",
            "call {person}",
            "Do not forget the {a}",
            "Can we meet on {day}?",
        )
    )
    makers: dict[str, Maker] = {
        "a": noun,
        "b": noun,
        "day": day,
        "clock": clock,
        "city": city,
        "person": person,
    }
    return form.format(**{key: make(world, rng) for key, make in makers.items()})


def items(world: World, rng: Random) -> list[str]:
    return list(dict.fromkeys(item(world, rng) for _ in range(rng.choice((2, 2, 3, 4)))))


def sum_text(world: World, rng: Random) -> str:
    a, b, c = (rng.randrange(1, rng.choice((10, 100, 1000))) for _ in range(3))
    return rng.choice((f"{a} + {b}", f"{a} * {b}", f"{a} - {b}", f"{a} / {b}", f"({a} + {b}) * {c}"))


Maker = Callable[[World, Random], Any]
MAKERS: dict[str, Maker] = {
    **{"person": person, "city": city, "day": day, "date": date, "time": clock, "int": integer},
    **{"large": large, "number": decimal, "id": identity, "email": email, "phone": phone, "path": path},
    **{
        "url": address,
        "item": item,
        "title": title,
        "text": text,
        "items": items,
        "word": noun,
        "sum": sum_text,
    },
    "language": lambda world, rng: rng.choice(LANGUAGES),
    "currency": lambda world, rng: rng.choice(CURRENCIES),
    "color": lambda world, rng: rng.choice(COLORS),
    "flag": lambda world, rng: rng.random() < 0.5,
}
# JSON's name of a type whose values are no text.
JSON_TYPES = {"int": "integer", "large": "integer", "number": "number", "flag": "boolean", "items": "array"}


def in_words(value: Any) -> str:
    """As a question names it: `milk, eggs and bread`."""
    if isinstance(value, list):
        return listed(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
