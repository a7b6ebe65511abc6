"""Days, dates, clock times, units, comparing, reversing: small tasks whose thought shows each step."""

from collections.abc import Callable
from random import Random

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.sums import WORKED
from recipes.tiny.values import DAYS, MONTHS, made_up
from recipes.tiny.world import World

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
# one of the larger is so many of the smaller
UNITS = (
    *(("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7)),
    *(("years", "months", 12), ("meters", "centimeters", 100), ("kilometers", "meters", 1000)),
    *(("centimeters", "millimeters", 10), ("kilograms", "grams", 1000), ("tons", "kilograms", 1000)),
    *(
        ("liters", "milliliters", 1000),
        ("dollars", "cents", 100),
        ("dozens", "pieces", 12),
        ("feet", "inches", 12),
    ),
    *(("yards", "feet", 3), ("pounds", "ounces", 16), ("m", "cm", 100), ("km", "m", 1000), ("kg", "g", 1000)),
)


def _days(world: World, rng: Random) -> Exchange:
    at, count, back = rng.randrange(7), rng.randrange(1, 15), rng.random() < 0.35
    step = -1 if back else 1
    row = [DAYS[(at + step * number) % 7] for number in range(1, count + 1)]
    word = "before" if back else "after"
    asked = rng.choice(
        (
            f"What day is {count} day{'s' * (count > 1)} {word} {DAYS[at]}?",
            f"Which day comes {count} day{'s' * (count > 1)} {word} {DAYS[at]}?",
            f"Today is {DAYS[at]}. What day "
            + (f"was it {count} days ago?" if back else f"is it in {count} days?"),
        )
    )
    counted = ", ".join(f"{day} {number}" for number, day in enumerate(row, 1))
    return Exchange(asked, f"I count from {DAYS[at]}. {counted}. So {row[-1]}.", f"It is {row[-1]}.")


def _order(world: World, rng: Random) -> Exchange:
    kind, row = rng.choice((("day", DAYS), ("month", MONTHS)))
    at, step = rng.randrange(len(row)), rng.choice((1, -1))
    found, word = row[(at + step) % len(row)], "after" if step > 0 else "before"
    asked = rng.choice(
        (
            f"Which {kind} comes {word} {row[at]}?",
            f"What {kind} is {word} {row[at]}?",
            f"What comes {word} {row[at]}?",
        )
    )
    around = f"{found}, {row[at]}" if step < 0 else f"{row[at]}, {found}"
    return Exchange(asked, f"The order is {around}.", f"{found} comes {word} {row[at]}.")


def _date(world: World, rng: Random) -> Exchange:
    month, count = rng.randrange(12), rng.randrange(1, 30)
    first = rng.randrange(1, LENGTHS[month] + 1)
    last = first + count
    asked = rng.choice(
        (
            f"What date is {count} days after {MONTHS[month]} {first}?",
            f"Today is {MONTHS[month]} {first}. What date is it in {count} days?",
            f"{MONTHS[month]} {first} plus {count} days?",
        )
    )
    thought = f"{first} + {count} = {last}. {MONTHS[month]} has {LENGTHS[month]} days."
    if last <= LENGTHS[month]:
        answer = f"{MONTHS[month]} {last}"
    else:
        answer = f"{MONTHS[(month + 1) % 12]} {last - LENGTHS[month]}"
        thought += f" {last} - {LENGTHS[month]} = {last - LENGTHS[month]}."
        thought += f" The next month is {MONTHS[(month + 1) % 12]}."
    return Exchange(asked, f"{thought} So {answer}.", f"It is {answer}.")


def _month_length(world: World, rng: Random) -> Exchange:
    month = rng.randrange(12)
    answer = f"{MONTHS[month]} has {LENGTHS[month]} days."
    return Exchange(f"How many days does {MONTHS[month]} have?", answer, answer)


def _clock(world: World, rng: Random) -> Exchange:
    hour, minute, count = (
        rng.randrange(24),
        rng.choice(range(0, 60, 5)),
        rng.choice((5, 10, 15, 20, 30, 45, 60, 90, 120)),
    )
    end = minute + count
    hours, rest = end // 60, end % 60
    asked = rng.choice(
        (
            f"What time is {count} minutes after {hour:02}:{minute:02}?",
            f"It is {hour:02}:{minute:02}. What time is it in {count} minutes?",
            f"I start at {hour:02}:{minute:02} and need {count} minutes. When am I done?",
        )
    )
    thought = f"{minute} + {count} = {end}."
    if hours:
        thought += f" {end} minutes are {hours} hour{'s' * (hours > 1)} and {rest} minutes."
        thought += f" {hour} + {hours} = {hour + hours}."
        if hour + hours >= 24:
            thought += f" {hour + hours} - 24 = {hour + hours - 24}."
    found = f"{(hour + hours) % 24:02}:{rest:02}"
    return Exchange(asked, f"{thought} So {found}.", f"It is {found}.")


def _unit(world: World, rng: Random) -> Exchange:
    large, small, count = rng.choice(UNITS)
    number = rng.randrange(2, rng.choice((10, 13, 30, 100)))
    if rng.random() < 0.6:
        asked = rng.choice(
            (
                f"How many {small} are {number} {large}?",
                f"Convert {number} {large} to {small}.",
                f"{number} {large} in {small}?",
            )
        )
        lead, found = f"One of the {large} is {count} {small}. ", number * count
        work = f"{number} x {count} = {found}." if count in (10, 100, 1000) else WORKED["x"](number, count)
        return Exchange(
            asked,
            f"{lead}{work}",
            f"{number} {large} are {found} {small}.",
            unthought=f"{lead}{work}\n{number} {large} are {found} {small}.",
        )
    number = rng.randrange(2, 13)
    total = number * count
    asked = rng.choice((f"How many {large} are {total} {small}?", f"Convert {total} {small} to {large}."))
    thought = f"One of the {large} is {count} {small}. {number} x {count} = {total}. So {number}."
    return Exchange(asked, thought, f"{total} {small} are {number} {large}.")


def _largest(world: World, rng: Random) -> Exchange:
    numbers = rng.sample(range(1, rng.choice((20, 100, 1000, 10000))), rng.randrange(3, 8))
    is_largest = rng.random() < 0.6
    best, steps = numbers[0], []
    for number in numbers[1:]:
        found = max(best, number) if is_largest else min(best, number)
        steps.append(f"{best} or {number}: {found}.")
        best = found
    word = rng.choice(("largest", "biggest", "greatest") if is_largest else ("smallest", "lowest"))
    row = ", ".join(map(str, numbers))
    asked = rng.choice(
        (
            f"Which is the {word}: {row}?",
            f"What is the {word} of these numbers? {row}",
            f"Find the {word} number: {row}",
        )
    )
    return Exchange(asked, f"{' '.join(steps)} So {best}.", f"The {word} is {best}.")


def _who_is_more(world: World, rng: Random) -> Exchange:
    names = world.words.names(rng, rng.choice((2, 3, 3)))
    values = rng.sample(range(2, 100), len(names))
    more, noun, asked_word = rng.choice(
        (("years old", "is", "oldest"), ("cm tall", "is", "tallest"), ("coins", "has", "richest"))
    )
    best = names[values.index(max(values))]
    lines = " ".join(f"{name} {noun} {value} {more}." for name, value in zip(names, values, strict=True))
    compared = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
    answer = f"{best} is the {asked_word}."
    return Exchange(
        f"{lines} Who is the {asked_word}?", f"{compared}. The most is {max(values)}.", answer, tuple(names)
    )


def _backwards(world: World, rng: Random) -> Exchange:
    """A word or a number from its end, by way of its letters."""
    if rng.random() < 0.3:
        word = str(rng.randrange(10, 10 ** rng.choice((3, 4, 5, 6))))
    else:
        word = rng.choice(world.words.common) if rng.random() < 0.6 else made_up(world, rng)
    turned, items = word[::-1], () if word.isdigit() else (word,)
    asked = rng.choice(
        (
            "Reverse {}.",
            "Write {} backwards.",
            "Spell {} backwards.",
            'What is "{}" backwards?',
            "Turn {} around.",
        )
    )
    thought = f"The letters: {'-'.join(word)}. From the end: {'-'.join(turned)}."
    return Exchange(
        asked.format(word), thought, turned, items, f"{'-'.join(word)}. {'-'.join(turned)}. {turned}"
    )


def _turned_list(world: World, rng: Random) -> Exchange:
    words = rng.sample(world.words.common, rng.randrange(3, 8))
    asked = rng.choice(
        ("Reverse this list: {}", "Turn this list around: {}", "Write these words in reverse order: {}")
    )
    turned = ", ".join(reversed(words))
    return Exchange(
        asked.format(", ".join(words)),
        f"The last is {words[-1]}. I go back from there.",
        turned,
        tuple(words),
    )


def _case(world: World, rng: Random) -> Exchange:
    word = rng.choice(world.words.common)
    if rng.random() < 0.5:
        return Exchange(f"Write {word} in capital letters.", "I write large letters.", word.upper(), (word,))
    return Exchange(
        f"Write {word} with a capital letter.", "The first letter is large.", word.capitalize(), (word,)
    )


MAKERS: tuple[Callable[[World, Random], Exchange], ...] = (
    *(
        _days,
        _days,
        _order,
        _date,
        _date,
        _month_length,
        _clock,
        _clock,
        _unit,
        _unit,
        _unit,
        _largest,
        _largest,
    ),
    *(_who_is_more, _backwards, _backwards, _turned_list, _case),
)


def everyday(world: World, rng: Random, max_tokens: int) -> Draft:
    """One to three of them."""
    return Draft(tuple(rng.choice(MAKERS)(world, rng) for _ in range(rng.choice((1, 1, 2, 3)))))
