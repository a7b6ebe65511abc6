"""Sums with worked thoughts, digit by digit from the right, and small word problems around them."""

from collections.abc import Callable
from random import Random

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import article
from recipes.tiny.words import COUNTED, Words, is_held_out_pair
from recipes.tiny.world import World

ASK = {
    "+": (
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "How much is {a} + {b}?",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Please work out {a} + {b}.",
        "Can you add {a} and {b}?",
        "{a} + {b}",
        "{a} + {b} =",
        "{a}+{b}",
        "{a}+{b}=?",
        "What do {a} and {b} make together?",
    ),
    "-": (
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "How much is {a} - {b}?",
        "Take {b} away from {a}.",
        "Please work out {a} - {b}.",
        "What is {a} take away {b}?",
        "Subtract {b} from {a}.",
        "{a} - {b}",
        "{a} - {b} =",
        "{a}-{b}",
        "What is left of {a} if I take away {b}?",
    ),
    "x": (
        "What is {a} x {b}?",
        "What is {a} times {b}?",
        "How much is {a} x {b}?",
        "Multiply {a} by {b}.",
        "{a} x {b}",
        "{a} * {b}",
        "{a}*{b}=?",
        "What is {a} * {b}?",
        "Please work out {a} x {b}.",
    ),
    "/": (
        "What is {a} / {b}?",
        "What is {a} divided by {b}?",
        "Divide {a} by {b}.",
        "{a} / {b}",
        "How often does {b} go into {a}?",
    ),
}


def digits(number: int, count: int) -> list[int]:
    """The digits from the right, with zeros in front where the number is shorter."""
    return [number // 10**place % 10 for place in range(count)]


def add_worked(a: int, b: int) -> str:
    """`047 + 138: 7 + 8 = 15, write 5 carry 1. 4 + 3 + 1 = 8, write 8. 0 + 1 = 1, write 1. So 185.`"""
    count = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(digits(a, count), digits(b, count), strict=True):
        total = x + y + carry
        step = f"{x} + {y}{' + 1' if carry else ''} = {total}"
        carry = total // 10
        steps.append(f"{step}, write {total % 10}" + (" carry 1" if carry else ""))
    if carry:
        steps.append("write 1")
    return f"{_aligned(a, b, count, '+')}{'. '.join(steps)}. So {a + b}."


def _aligned(a: int, b: int, count: int, sign: str) -> str:
    """Both with as many digits, so that a place is the same distance away in both."""
    return f"{a:0{count}} {sign} {b:0{count}}: " if count > 1 else ""


def subtract_worked(a: int, b: int) -> str:
    """`52 - 27: 2 - 7, borrow 1: 12 - 7 = 5, write 5. 5 - 1 - 2 = 2, write 2. So 25.`"""
    if a < b:
        return (
            f"{a} is less than {b}, so the answer is below zero. "
            + subtract_worked(b, a)[:-1].replace("So ", "So -")
            + "."
        )
    count = len(str(a))
    steps, borrow = [], 0
    for x, y in zip(digits(a, count), digits(b, count), strict=True):
        left = f"{x}{' - 1' if borrow else ''} - {y}"
        rest = x - borrow - y
        if rest < 0:
            rest += 10
            step = f"{left}, borrow 1: 1{left} = {rest}"
            borrow = 1
        else:
            step = f"{left} = {rest}"
            borrow = 0
        steps.append(f"{step}, write {rest}")
    return f"{_aligned(a, b, count, '-')}{'. '.join(steps)}. So {a - b}."


def multiply_worked(a: int, b: int) -> str:
    """Tables to 12 are known by heart; beyond, digit by digit: `47 x 6: 7 x 6 = 42, write 2 carry 4. ...`

    A second factor of several digits is taken apart, from the right, and the parts are added.
    """
    if max(a, b) <= 12:
        return f"{a} x {b} = {a * b}. So {a * b}."
    long, short = max(a, b), min(a, b)
    if short < 10:
        return _by_digit(long, short)
    parts, said = [], []
    for place, digit in enumerate(digits(short, len(str(short)))):
        if digit:
            parts.append(long * digit * 10**place)
            zeros = f" With {place} zero{'s' * (place > 1)} {parts[-1]}. So {parts[-1]}." if place else ""
            said.append(f"{_by_digit(long, digit)}{zeros}")
    total = parts[0]
    for part in parts[1:]:
        said.append(add_worked(total, part))
        total += part
    return " ".join(said)


def _by_digit(long: int, digit: int) -> str:
    steps, carry = [], 0
    for x in digits(long, len(str(long))):
        total = x * digit + carry
        step = f"{x} x {digit}{f' + {carry}' if carry else ''} = {total}"
        carry = total // 10
        steps.append(f"{step}, write {total % 10}" + (f" carry {carry}" if carry else ""))
    if carry:
        steps.append(f"write {carry}")
    return f"{long} x {digit}: {'. '.join(steps)}. So {long * digit}."


def divide_worked(a: int, b: int) -> str:
    """By the table, read backwards."""
    return f"{b} x {a // b} = {a}. So {a // b}."


WORKED: dict[str, Callable[[int, int], str]] = {
    "+": add_worked,
    "-": subtract_worked,
    "x": multiply_worked,
    "/": divide_worked,
}
RESULT: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "x": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


def operands(operation: str, words: Words, rng: Random, max_digits: int = 4) -> tuple[int, int]:
    """A pair this split may use. Held-out pairs exist for + and - from 10 on, and for x beyond the tables."""
    while True:
        if operation == "/":
            b, quotient = rng.randrange(1, 13), rng.randrange(1, 13)
            return b * quotient, b
        if operation == "x":
            a, b = _factors(words, rng, max_digits)
        else:
            weights = (2, 4, 5, 6)[:max_digits]
            sizes = [rng.choices((1, 2, 3, 4)[:max_digits], weights=weights)[0] for _ in "ab"]
            a, b = (rng.randrange(0 if size == 1 else 10 ** (size - 1), 10**size) for size in sizes)
            # Below zero only now and then: children take the smaller from the larger.
            if operation == "-" and a < b and rng.random() < 0.95:
                a, b = b, a
        if words.allows_pair(operation, a, b):
            return a, b


def _factors(words: Words, rng: Random, max_digits: int) -> tuple[int, int]:
    if not words.held_out and rng.random() < 0.4:
        return rng.randrange(0, 13), rng.randrange(0, 13)
    most = rng.choice((100, 100, 1000, 10000)[: max(max_digits, 1)])
    few = rng.choices((10, 100, 1000), weights=(6, 3, 0.4))[0]
    a, b = rng.randrange(13, most), rng.randrange(2, min(few, most))
    return (a, b) if rng.random() < 0.5 else (b, a)


def sum_exchange(operation: str, a: int, b: int, wording: str) -> Exchange:
    """One question with its worked thought; the pair is an item. Without a thought the answer of a long one
    works aloud."""
    result = RESULT[operation](a, b)
    answer, worked = f"{a} {operation} {b} = {result}.", WORKED[operation](a, b)
    is_long = max(a, b) >= 100 or (operation == "x" and max(a, b) > 12)
    unthought = f"{worked}\n{answer}" if is_long else ""
    return Exchange(wording.format(a=a, b=b), worked, answer, (f"{a} {operation} {b}",), unthought)


def plain_sum(world: World, rng: Random, max_tokens: int) -> Draft:
    """One to three sums in a row; now and then a chain of two to four steps at once."""
    exchanges = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.18:
            exchanges.append(_chain(world.words, rng))
            continue
        operation = rng.choices("+-x/", weights=(34, 32, 28, 6))[0]
        a, b = operands(operation, world.words, rng)
        exchanges.append(sum_exchange(operation, a, b, rng.choice(ASK[operation])))
    return Draft(tuple(exchanges))


STEPS = {
    "+": ("plus {}", "add {}", "then add {}"),
    "-": ("minus {}", "take away {}", "then subtract {}"),
    "x": ("times {}",),
}


def _chain(words: Words, rng: Random) -> Exchange:
    """`12 + 30 - 7`, from left to right; held-out is what has a held-out pair in it."""
    while True:
        most = rng.choice((30, 100, 1000))
        value, signs = rng.randrange(1, most), [rng.choice("++-") for _ in range(rng.choice((2, 2, 3)))]
        if rng.random() < 0.25:
            signs = ["x", *signs[1:]]
        numbers, pairs, worked = [value], [], []
        for sign in signs:
            number = rng.randrange(2, 10) if sign == "x" else rng.randrange(1, most)
            if sign == "-":
                number = rng.randrange(0, max(value, 1))
            numbers.append(number)
            pairs.append((sign, value, number))
            after = RESULT[sign](value, number)
            worked.append(
                f"{value} {sign} {number} = {after}." if most == 30 else WORKED[sign](value, number)
            )
            value = after
        if any(is_held_out_pair(*pair) for pair in pairs) == words.held_out:
            break
    text = str(numbers[0]) + "".join(f" {sign} {n}" for sign, n in zip(signs, numbers[1:], strict=True))
    form = rng.choice(("What is {}?", "{}", "Work out {}.", "{} =", "How much is {}?", "Calculate {}"))
    asked = form.format(text)
    if rng.random() < 0.25:
        said = [rng.choice(STEPS[sign]).format(n) for sign, n in zip(signs, numbers[1:], strict=True)]
        asked = f"Start with {numbers[0]}, {', '.join(said)}. What do you get?"
    thought = " ".join(worked) + ("" if worked[-1].endswith(f"So {value}.") else f" So {value}.")
    answer = f"{text} = {value}."
    return Exchange(
        asked, thought, answer, tuple(f"{a} {s} {b}" for s, a, b in pairs), f"{thought}\n{answer}"
    )


# (operation, text, question, the thing counted goes where {t} is, answer)
PROBLEMS = (
    ("+", "{n} has {a} {t}. {N} gets {b} more.", "How many {t} does {n} have now?", "{n} has {r} {t} now."),
    (
        "+",
        "{n} found {a} {t} and {m} found {b} {t}.",
        "How many {t} do they have together?",
        "Together they have {r} {t}.",
    ),
    (
        "+",
        "There are {a} {t} in the box. {n} puts {b} more into it.",
        "How many {t} are in the box?",
        "There are {r} {t} in the box.",
    ),
    (
        "+",
        "{n} saw {a} {t} in the morning and {b} {t} in the evening.",
        "How many {t} did {n} see?",
        "{n} saw {r} {t}.",
    ),
    ("+", "{m} has {a} {t}. {n} has {b} more than {m}.", "How many {t} does {n} have?", "{n} has {r} {t}."),
    (
        "-",
        "{n} has {a} {t}. {N} gives {b} of them to {m}.",
        "How many {t} are left?",
        "{n} has {r} {t} left.",
    ),
    (
        "-",
        "There were {a} {t} on the table. {n} took {b} of them.",
        "How many {t} are still there?",
        "There are {r} {t} still there.",
    ),
    ("-", "{n} had {a} {t} and lost {b} of them.", "How many {t} does {n} have now?", "{n} has {r} {t} now."),
    (
        "-",
        "{n} has {a} {t} and {m} has {b} {t}.",
        "How many more does {n} have than {m}?",
        "{n} has {r} more {t} than {m}.",
    ),
    ("-", "{n} needs {a} {t} and has {b} so far.", "How many {t} are missing?", "{n} needs {r} more {t}."),
    ("x", "There are {a} bags with {b} {t} in each bag.", "How many {t} are there?", "There are {r} {t}."),
    ("x", "{n} buys {a} boxes. Each box has {b} {t}.", "How many {t} did {n} buy?", "{n} bought {r} {t}."),
    (
        "x",
        "{a} children have {b} {t} each.",
        "How many {t} do they have in all?",
        "They have {r} {t} in all.",
    ),
    (
        "/",
        "{n} shares {a} {t} among {b} friends.",
        "How many {t} does each friend get?",
        "Each friend gets {r} {t}.",
    ),
    (
        "/",
        "{a} {t} are put into {b} bags, the same in each.",
        "How many {t} are in each bag?",
        "There are {r} {t} in each bag.",
    ),
)
REASONS = {
    "+": "More come, so I add: {a} + {b}. ",
    "-": "I take away: {a} - {b}. ",
    "x": "The same number many times, so I multiply: {a} x {b}. ",
    "/": "It is shared, so I divide: {a} / {b}. ",
}


def word_problem(world: World, rng: Random, max_tokens: int) -> Draft:
    """A sum in a small story; numbers of at least 2, so that plurals fit."""
    operation, text, question, answer = rng.choice(PROBLEMS)
    name, other = world.words.names(rng, 2)
    while True:
        if operation in "+-":
            a, b = operands(operation, world.words, rng, max_digits=rng.choice((2, 2, 3, 4)))
        elif operation == "x":
            a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        else:
            a, b = operands("/", world.words, rng)
        result = RESULT[operation](a, b)
        if min(a, b) >= 2 and result >= 2:
            break
    pronoun = world.words.pronoun(name).capitalize()
    values = {"n": name, "m": other, "N": pronoun, "t": rng.choice(COUNTED), "a": a, "b": b, "r": result}
    thought = REASONS[operation].format(**values) + WORKED[operation](a, b)
    items = (name, other, f"{a} {operation} {b}")
    user, said = f"{text} {question}".format(**values), answer.format(**values)
    unthought = f"{thought}\n{said}" if max(a, b) >= 100 else ""
    return Draft((Exchange(user, thought, said, items, unthought),))


def numbers(world: World, rng: Random, max_tokens: int) -> Draft:
    """Larger and smaller, before and after, even and odd, counting up and down."""
    return Draft((rng.choice((_compare, _neighbour, _parity, _count_up))(rng),))


def _compare(rng: Random) -> Exchange:
    a, b = rng.sample(range(1, rng.choice((20, 100, 1000))), 2)
    larger = rng.random() < 0.6
    word = rng.choice(("bigger", "larger", "more") if larger else ("smaller", "less"))
    found = max(a, b) if larger else min(a, b)
    if len(str(a)) != len(str(b)):
        why = " ".join(f"{n} has {len(str(n))} digit{'s' * (n > 9)}." for n in (a, b))
    else:
        x, y = next((x, y) for x, y in zip(str(a), str(b), strict=True) if x != y)
        why = f"Both are as long. The first digits that differ are {x} and {y}."
    return Exchange(f"Which is {word}, {a} or {b}?", f"{why} So {found} is {word}.", f"{found} is {word}.")


def _neighbour(rng: Random) -> Exchange:
    number, step = rng.randrange(1, 999), rng.choice((1, -1))
    word = "after" if step > 0 else "before"
    asked = rng.choice(("What number comes {} {}?", "Which number is right {} {}?", "What comes {} {}?"))
    thought = f"{number} {'+' if step > 0 else '-'} 1 = {number + step}."
    return Exchange(asked.format(word, number), thought, f"{number + step} comes {word} {number}.")


def _parity(rng: Random) -> Exchange:
    number = rng.randrange(1, 1000)
    kind = "odd" if number % 2 else "even"
    thought = f"The last digit is {number % 10}. That is {kind}."
    return Exchange(f"Is {number} even or odd?", thought, f"{number} is {article(kind)} {kind} number.")


def _count_up(rng: Random) -> Exchange:
    low = rng.choice((1, 1, rng.randrange(1, 60)))
    high = low + rng.randrange(3, 12)
    down = rng.random() < 0.3
    first, last = (high, low) if down else (low, high)
    row = range(first, last + (-1 if down else 1), -1 if down else 1)
    asked = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "Count {} to {}"))
    direction = "down" if down else "up"
    return Exchange(
        asked.format(first, last),
        f"I count {direction} from {first} to {last}.",
        ", ".join(map(str, row)) + ".",
    )
