"""Conversations with tools: the right call or none, two at once, answers from results, errors, chains."""

from collections.abc import Callable
from random import Random
from typing import Any

from recipes.tiny.functions import KNOWN, Function, Use, invented, offered, use
from recipes.tiny.records import Draft, Exchange, ToolCall
from recipes.tiny.sums import plain_sum
from recipes.tiny.talk import about_itself, small_talk
from recipes.tiny.unknown import refusal
from recipes.tiny.values import MAKERS, in_words, noun, person
from recipes.tiny.world import World

FOLLOW = ("And {}?", "And for {}?", "What about {}?", "Now the same for {}.", "And in {}?", "and {}")
TOGETHER = (
    *(
        "{} And {}",
        "{} Also: {}",
        "{} {}",
        "Two things. {} {}",
        "{} And also: {}",
        "{} Then: {}",
        "{} Besides, {}",
    ),
    *(
        "{}\n{}",
        "1. {}\n2. {}",
        "First: {} Second: {}",
        "{} Also, {}",
        "{} And one more thing: {}",
        "- {}\n- {}",
    ),
)
ERRORS = (
    *(
        "{what} not found",
        "no such {what}",
        "connection failed",
        "timeout",
        "access denied",
        "invalid {what}",
    ),
    *(
        "service is not available",
        "unknown {what}",
        "server error 500",
        "permission denied",
        "{what} is missing",
    ),
)
FAILED = ("That did not work: {}.", "The tool says: {}.", "I got an error: {}.", "It failed: {}.")
THANKS = (
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Great, thanks.", "Happy to help!"),
)


def functions_of(world: World, rng: Random, count: int) -> list[Function]:
    """Different functions under different names."""
    found: dict[str, Function] = {}
    families = set()
    while len(found) < count:
        family = rng.choice(KNOWN) if rng.random() < 0.55 else invented(world, rng)
        if family.names[0] not in families:
            families.add(family.names[0])
            function = offered(family, world, rng)
            found.setdefault(function.name, function)
    return list(found.values())


def _listed(functions: list[Function]) -> str:
    return f"The tools: {', '.join(function.name for function in functions)}."


def _with(arguments: dict[str, Any]) -> str:
    said = [f"{key} is {in_words(value)}" for key, value in arguments.items()]
    return f" {', '.join(said)}." if said else ""


def _call(functions: list[Function], wish: Use, ask: str) -> Exchange:
    thought = f"{_listed(functions)} I call {wish.function.name}.{_with(wish.arguments)}"
    return Exchange(ask, thought, "", calls=(ToolCall(wish.function.name, wish.arguments),))


def _answered(wish: Use) -> Exchange:
    return Exchange("", "I have the result. I tell it.", wish.answer, results=(wish.result,))


def _one(world: World, rng: Random, functions: list[Function]) -> list[Exchange]:
    wish = use(rng.choice(functions), world, rng)
    out = [_call(functions, wish, wish.ask), _answered(wish)]
    if wish.subject and rng.random() < 0.2:
        again = _like(wish, world, rng)
        if again:
            out += [_call(functions, again, rng.choice(FOLLOW).format(again.subject)), _answered(again)]
    return out


def _like(wish: Use, world: World, rng: Random) -> Use | None:
    """The same wish with another first argument, the others as they were."""
    function = wish.function
    if len(function.family.slots) != 1 or "{" not in "".join(function.family.asks):
        return None
    return use(function, world, rng)


def _two(world: World, rng: Random, functions: list[Function]) -> list[Exchange]:
    """Two calls at once: of one function with two arguments, or of two functions."""
    first = use(rng.choice(functions), world, rng)
    second = (rng.random() < 0.5 and _like(first, world, rng)) or use(rng.choice(functions), world, rng)
    if first.function is second.function and first.subject and len(first.function.family.slots) == 1:
        if first.subject == second.subject:
            return _one(world, rng, functions)
        ask = first.ask.replace(first.subject, f"{first.subject} and {second.subject}", 1)
    else:
        ask = rng.choice(TOGETHER).format(
            first.ask if first.ask[-1] in ".?!" else f"{first.ask}.", second.ask
        )
    wishes = (first, second)
    names = " ".join(f"{wish.function.name}:{_with(wish.arguments) or ' nothing.'}" for wish in wishes)
    calls = tuple(ToolCall(wish.function.name, wish.arguments) for wish in wishes)
    answer = " ".join(wish.answer if wish.answer[-1] in ".?!" else f"{wish.answer}." for wish in wishes)
    return [
        Exchange(ask, f"{_listed(functions)} I make two calls. {names}", "", calls=calls),
        Exchange("", "I have both results. I tell them.", answer, results=(first.result, second.result)),
    ]


def _none(world: World, rng: Random, functions: list[Function]) -> list[Exchange]:
    """Nothing that is offered fits: the model answers by itself, or says that it has no tool for this."""
    roll = rng.random()
    if roll < 0.4:
        offers = {function.family.names[0] for function in functions}
        while True:
            other = functions_of(world, rng, 1)[0]
            calculates = other.is_calculator and any(function.is_calculator for function in functions)
            if other.family.names[0] not in offers and not calculates and not _close(other, functions):
                break
        wish = use(other, world, rng)
        example = rng.choice(functions).name
        answer = rng.choice(
            (
                f"I have no tool for that. I can use {example}.",
                f"I cannot do that: none of my tools fits. I have {example}.",
                f"None of my tools can do that. I have {', '.join(function.name for function in functions)}.",
            )
        )
        return [Exchange(wish.ask, f"{_listed(functions)} None fits. I say so.", answer)]
    makers: list[Callable[[], Exchange]] = [
        lambda: small_talk(world, rng, 300).exchanges[0],
        lambda: about_itself(world, rng, 300).exchanges[0],
        lambda: refusal(world, rng),
        lambda: refusal(world, rng),
    ]
    if not any(function.is_calculator for function in functions):
        makers.append(lambda: plain_sum(world, rng, 300).exchanges[0])
    own = rng.choice(makers)()
    thought = f"{_listed(functions)} None fits. {own.thought}"
    return [Exchange(own.user, thought, own.answer, unthought=own.unthought)]


_ALIKE = (
    ("get_weather", "get_forecast"),
    ("get_user", "find_phone_number"),
    ("get_order_status", "track_package"),
    ("send_email", "send_message"),
    (
        "add_todo",
        "add_reminder",
        "create_note",
        "create_event",
        "add_to_shopping_list",
        "set_alarm",
        "set_timer",
    ),
    ("web_search", "get_news", "find_recipe", "define_word", "run_query", "get_capital", "get_population"),
    ("get_price", "check_stock", "order_food", "get_stock_price"),
    ("add", "subtract", "multiply", "calculate", "convert_units", "convert_currency"),
    ("read_file", "list_files", "write_file", "delete_file"),
    ("call_contact", "send_message", "find_phone_number", "get_user", "rename_contact", "get_membership"),
    (
        "clean_room",
        "start_washing",
        "water_plants",
        "turn_on_light",
        "set_temperature",
        "lock",
        "set_brightness",
    ),
    ("search_flights", "find_train", "get_distance", "order_taxi", "park_car", "book_hotel", "book_ticket"),
    (
        "order_food",
        "order_pizza",
        "book_table",
        "add_to_shopping_list",
        "find_recipe",
        "get_price",
        "feed_pet",
    ),
    ("get_moon", "get_weather", "get_forecast", "get_time", "count_visitors", "list_events"),
    ("send_message", "post_message", "send_email", "write_file", "create_note"),
    ("convert_currency", "get_exchange_rate"),
    ("create_event", "find_doctor", "book_ticket", "book_table"),
    ("find_book", "get_order_status", "track_package", "get_balance", "measure"),
    ("random_fact", "get_news", "web_search", "define_word"),
    ("set_brightness", "set_volume", "set_temperature"),
)


def _close(other: Function, functions: list[Function]) -> bool:
    """Whether an offered function could be taken for what is asked."""
    names = {function.family.names[0] for function in functions}
    return any(other.family.names[0] in group and names.intersection(group) for group in _ALIKE)


def _failed(world: World, rng: Random, functions: list[Function]) -> list[Exchange]:
    wish = use(rng.choice(functions), world, rng)
    what = rng.choice((*(wish.arguments or {"entry": 0}), noun(world, rng)))
    error = rng.choice(ERRORS).format(what=what)
    result = rng.choice((f"Error: {error}", f"error: {error}", f'{{"error": "{error}"}}', error.capitalize()))
    answer = rng.choice(FAILED).format(error)
    return [
        _call(functions, wish, wish.ask),
        Exchange("", "The result is an error. I say so.", answer, results=(result,)),
    ]


def _chain(world: World, rng: Random) -> tuple[list[Function], list[Exchange]]:
    """Steps that each need the result of the one before: ids looked up, or numbers calculated with."""
    if rng.random() < 0.45:
        return _sum_chain(world, rng)
    steps = rng.choice((2, 2, 3, 3))
    things = [noun(world, rng) for _ in range(steps)]
    start_key = rng.choice(("name", "person", "user", "customer"))
    keys = [start_key, *(rng.choice((f"{thing}_id", thing, f"{thing}_code")) for thing in things[:-1])]
    if len(set(keys)) < steps or len(set(things)) < steps:
        return _chain(world, rng)
    functions, calls = [], []
    value: Any = person(world, rng)
    who = value
    for number, (key, thing) in enumerate(zip(keys, things, strict=True)):
        verb = rng.choice(("get", "find", "lookup", "fetch"))
        is_text = isinstance(value, str)
        after = MAKERS[
            rng.choice(("id", "large", "word", "title") if number == steps - 1 else ("id", "large"))
        ]
        found = after(world, rng)
        name = f"{verb}_{thing}"
        about = rng.choice(
            (
                f"Get the {thing} of a {key}.",
                f"Find the {thing} by {key}.",
                f"The {thing} that belongs to a {key}",
            )
        )
        properties = {key: {"type": "string" if is_text else "integer"}}
        parameters = {"type": "object", "properties": properties, "required": [key]}
        functions.append({"name": name, "description": about.replace("_", " "), "parameters": parameters})
        out_key = keys[number + 1] if number < steps - 1 else thing
        shown = f'"{found}"' if isinstance(found, str) else str(found)
        result = rng.choice((f'{{"{out_key}": {shown}}}', str(found), f"{out_key}: {found}"))
        calls.append((name, {key: value}, result, found))
        value = found
    asked = rng.choice(
        (
            f"What is the {things[-1]} of {who}?",
            f"Find the {', then the '.join(things)} of {who}.",
            f"First find the {things[0]} of {who}"
            + "".join(f", then the {thing}" for thing in things[1:])
            + ".",
            f"I need the {things[-1]} of {who}. Start with the {things[0]}.",
        )
    )
    rng.shuffle(functions)
    needs = [f"{f['name']} needs {', '.join(f['parameters']['properties'])}." for f in functions]
    names = f"The tools: {', '.join(f['name'] for f in functions)}. {' '.join(needs)}"
    answer = rng.choice((f"The {things[-1]} of {who} is {value}.", f"{who} has the {things[-1]} {value}."))
    return [Function(KNOWN[0], f["name"], f, {}, {}) for f in functions], _steps(asked, names, calls, answer)


def _steps(
    asked: str, names: str, calls: list[tuple[str, dict[str, Any], str, Any]], answer: str
) -> list[Exchange]:
    """Each step names the result that it has and what the next function needs."""
    out: list[Exchange] = []
    for number, (name, arguments, _, _) in enumerate(calls):
        said, needed = _with(arguments), " and ".join(arguments)
        lead = f"{names} I begin with {name}, which needs {needed}."
        if number:
            lead = f"The result is {in_words(calls[number - 1][3])}. Next is {name}, which needs {needed}."
        results = (calls[number - 1][2],) if number else ()
        call = ToolCall(name, arguments)
        out.append(Exchange("" if number else asked, f"{lead}{said}", "", calls=(call,), results=results))
    done = f"The result is {in_words(calls[-1][3])}. I am done. I tell it."
    out.append(Exchange("", done, answer, results=(calls[-1][2],)))
    return out


_OPERATIONS: dict[str, tuple[Callable[[int, int], int], tuple[str, ...]]] = {
    "add": (lambda a, b: a + b, ("add {b}", "plus {b}", "add {b} to it")),
    "multiply": (lambda a, b: a * b, ("multiply by {b}", "times {b}", "multiply the result by {b}")),
    "subtract": (lambda a, b: a - b, ("subtract {b}", "minus {b}", "take away {b}")),
}
_STARTS = {
    "add": ("Add {a} and {b}", "What is {a} plus {b}"),
    "multiply": ("Multiply {a} and {b}", "Multiply {a} by {b}", "What is {a} times {b}"),
    "subtract": ("Subtract {b} from {a}", "What is {a} minus {b}"),
}


def _sum_chain(world: World, rng: Random) -> tuple[list[Function], list[Exchange]]:
    families = {family.names[0]: family for family in KNOWN if family.names[0] in _OPERATIONS}
    functions = {
        name: offered(families[name], world, rng) for name in rng.sample(sorted(families), rng.choice((2, 3)))
    }
    if len({function.name for function in functions.values()}) < len(functions):
        return _sum_chain(world, rng)
    value, calls, asked = rng.randrange(2, rng.choice((20, 100, 1000))), [], ""
    for number in range(rng.choice((2, 2, 3))):
        kind = rng.choice(sorted(functions))
        function, b = functions[kind], rng.randrange(2, rng.choice((10, 50, 500)))
        phrase = rng.choice(_OPERATIONS[kind][1] if number else _STARTS[kind]).format(a=value, b=b)
        asked += (rng.choice((", then ", ", and then ", ". Then ")) if number else "") + phrase
        first, second = (function.keys[slot.keys[0]] for slot in function.family.slots)
        after = _OPERATIONS[kind][0](value, b)
        form = rng.choice(("{}", "{}", '{{"result": {}}}', "{}.0"))
        calls.append((function.name, {first: value, second: b}, form.format(after), after))
        value = after
    own = list(functions.values())
    rng.shuffle(own)
    answer = rng.choice((f"The result is {value}.", f"{value}", f"It is {value}."))
    return own, _steps(asked + rng.choice((".", "", "?")), _listed(own), calls, answer)


SCENES: tuple[tuple[float, Callable[[World, Random, list[Function]], list[Exchange]]], ...] = (
    (0.50, _one),
    (0.23, _two),
    (0.20, _none),
    (0.07, _failed),
)


def tool(world: World, rng: Random, max_tokens: int) -> Draft:
    """One to five functions and some scenes with them, or a chain; as long as fits."""
    exchanges: list[Exchange] = []
    if rng.random() < 0.25:
        functions, exchanges = _chain(world, rng)
        if rng.random() < 0.4:
            functions += [f for f in functions_of(world, rng, 1) if f.name not in {g.name for g in functions}]
        rng.shuffle(functions)
    else:
        functions = functions_of(world, rng, rng.choices((1, 2, 3, 4, 5), weights=(3, 5, 5, 3, 2))[0])
    # The call format takes about 400 tokens, a function 70, a scene 120.
    room = max_tokens - 400 - 70 * len(functions) - 100 * len(exchanges)
    most = rng.choice((1, 2, 3, 4))
    while not exchanges or (room > 150 and most > 0 and not _is_chain(exchanges)):
        scene = rng.choices([scene for _, scene in SCENES], weights=[weight for weight, _ in SCENES])[0]
        made = scene(world, rng, functions)
        exchanges += made
        room -= 100 * len(made)
        most -= 1
    if exchanges[-1].results and rng.random() < 0.08:
        asked, answer = rng.choice(THANKS)
        exchanges.append(Exchange(asked, "The user thanks me.", answer))
    return Draft(tuple(exchanges), tools=tuple(function.shown for function in functions))


def _is_chain(exchanges: list[Exchange]) -> bool:
    return any(exchange.results and exchange.calls for exchange in exchanges)
