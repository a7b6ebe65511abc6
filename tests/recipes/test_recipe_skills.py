"""Made conversations with tools and JSON are right: a call or an object says what was given."""

import json
from random import Random

import pytest
from synthetic import write_corpus

from recipes.tiny.corpus import read_corpus
from recipes.tiny.extract import extraction
from recipes.tiny.functions import KNOWN, offered, use
from recipes.tiny.tools import tool
from recipes.tiny.unknown import EXAMPLES, unknown
from recipes.tiny.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = write_corpus(tmp_path_factory.mktemp("skills") / "corpus")
    return World.build(read_corpus(folder, "train"), lambda text: len(text) // 3)


def stands(value: object, text: str) -> bool:
    if isinstance(value, bool):
        return True  # said in words
    if isinstance(value, list):
        return all(stands(one, text) for one in value)
    if isinstance(value, dict):
        return all(stands(one, text) for one in value.values())
    return str(value).lower() in text.lower()


def test_calls_name_offered_functions_and_copy_what_was_said(world: World) -> None:
    rng, num_calls, num_steps, num_pairs = Random(2), 0, 0, 0
    for _ in range(500):
        draft = tool(world, rng, 1024)
        shown = {function["name"]: function["parameters"] for function in draft.tools}
        assert len(shown) == len(draft.tools)
        said, pending = "", 0
        for exchange in draft.exchanges:
            assert len(exchange.results) == pending, "each call has its result"
            said += "\n".join((exchange.user, *exchange.results)) + "\n"
            pending = len(exchange.calls)
            num_pairs += pending == 2
            num_steps += bool(exchange.results and exchange.calls)
            assert bool(exchange.answer) != bool(exchange.calls), exchange
            for call in exchange.calls:
                num_calls += 1
                parameters = shown[call.name]
                assert call.arguments.keys() <= parameters["properties"].keys()
                assert set(parameters.get("required", ())) <= call.arguments.keys()
                assert all(stands(value, said) for value in call.arguments.values()), (call, said)
        assert not pending
    assert num_calls > 500 and num_steps > 50 and num_pairs > 50


def test_every_way_to_ask_for_a_known_function_can_be_filled(world: World) -> None:
    rng = Random(3)
    for family in KNOWN:
        for ask in family.asks:
            made = use(offered(family, world, rng), world, rng, ask)
            assert made.ask and made.answer and "{" not in made.ask, made


def test_objects_say_what_the_text_says(world: World) -> None:
    rng, num_schemas = Random(4), 0
    for _ in range(500):
        draft = extraction(world, rng, 1024)
        (exchange,) = draft.exchanges
        value = json.loads(exchange.answer)
        assert stands(value, exchange.user), (exchange.user, value)
        if draft.schema and "properties" in draft.schema:
            num_schemas += 1
            assert list(value) == list(draft.schema["properties"]) == draft.schema["required"]
    assert num_schemas > 300


def test_what_is_not_known_is_said_with_an_example(world: World) -> None:
    rng = Random(5)
    for _ in range(300):
        for exchange in unknown(world, rng, 512).exchanges:
            assert "very small model" in exchange.answer and exchange.answer.endswith(EXAMPLES)
