"""Fixed evaluation prompts, made of what training never saw: records, names, words, numbers, operand pairs.

python -m recipes.tiny.evalset --corpus DIR --tokenizer FILE --out evalset.jsonl --seed S [--large]
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from dsv4.text import chat
from dsv4.text.tokenizer import Tokenizer
from recipes.tiny.evalskills import json_prompts, open_prompts, tool_prompts
from recipes.tiny.everyday import everyday
from recipes.tiny.mix import build_world
from recipes.tiny.reading import story_questions, tale_questions
from recipes.tiny.recall import INTROS, Context, Fact, make_context
from recipes.tiny.records import Exchange
from recipes.tiny.requests import possible_wishes, wish_text
from recipes.tiny.sums import ASK, RESULT, operands
from recipes.tiny.talk import about_itself, small_talk, told_before
from recipes.tiny.tasks import copying, counting, sorting, spelling, who_is_where
from recipes.tiny.words import HELD_OUT_NAMES
from recipes.tiny.world import World

CONTEXTS = (512, 1024, 2048, 4000)
# prompts of each suite: (to ship, for the recipe)
SIZES = {"stories": (24, 120), "sums": (60, 400), "recall": (8, 40), "chat": (48, 240), "text": (8, 60)}
SIZES |= {"tools": (30, 200), "json": (16, 200), "unknown": (20, 100)}
TEXT_CHARACTERS = 3000
CHAT_KINDS = (
    small_talk,
    told_before,
    about_itself,
    everyday,
    everyday,
    who_is_where,
    sorting,
    spelling,
    copying,
    counting,
    story_questions,
    tale_questions,
)
# Kinds whose answer is one of many good ones: nothing is expected but that they end.
_OPEN = (small_talk, about_itself, tale_questions)


def _line(
    suite: str, kind: str, messages: list[dict[str, str]], thinking: bool, expected: Any, **more: Any
) -> dict[str, Any]:
    return {
        "suite": suite,
        "kind": kind,
        "messages": messages,
        "thinking": thinking,
        "expected": expected,
        **more,
    }


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def story_prompts(world: World, rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """Three words, half the time a hero too; `expected` are the words and the hero's name."""
    while count:
        story = world.story(rng, 400)
        wishes = possible_wishes(world, story, rng)
        wanted = {
            wish: value
            for wish, value in wishes.items()
            if wish == "words" or (wish == "about" and count % 2)
        }
        if "words" not in wanted:
            continue
        expected = wanted["words"].replace(" and ", ", ").split(", ")
        names = HELD_OUT_NAMES.intersection(wanted.get("about", "").split())
        count -= 1
        yield _line(
            "stories",
            "story",
            _user(wish_text(wanted, story, rng)),
            count % 2 == 0,
            [*expected, *sorted(names)],
        )


def sum_prompts(world: World, rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """Held-out operand pairs of 1 to 4 digits, and the tables, of which none is held out."""
    for number in range(count):
        operation = "++--x"[number % 5]
        a, b = operands(operation, world.words, rng)
        if operation == "x" and number % 2:
            a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        asked = ASK[operation][number % 3].format(a=a, b=b)
        digits = max(len(str(a)), len(str(b)))
        kind = f"{operation} of {digits} digits" if operation != "x" or max(a, b) > 12 else "x of the tables"
        yield _line("sums", kind, _user(asked), number // 5 % 2 == 0, str(RESULT[operation](a, b)))


def recall_prompts(world: World, tokenizer: Tokenizer, rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """For each size of context, that many questions whose lines lie at evenly spread places."""
    for size in CONTEXTS:
        for number in range(count):
            thinking = number % 2 == 0
            context = make_context(world, rng, size - 40)
            at = (number + 0.5) / count * context.num_tokens
            index = min(range(len(context.facts)), key=lambda i: abs(context.starts[i] - at))
            yield recall_prompt(context, context.facts[index], tokenizer, rng, thinking)


def recall_prompt(
    context: Context, fact: Fact, tokenizer: Tokenizer, rng: Random, thinking: bool
) -> dict[str, Any]:
    """`distance_tokens` counts from the first token of the line with the answer to the end of the prompt."""
    intro = rng.choice(INTROS)
    before = f"{intro}\n\n" + context.text[: context.text.index(fact.line)]
    messages = _user(f"{intro}\n\n{context.text}\n\n{rng.choice(fact.questions)}")
    num_tokens = len(tokenizer.encode_prompt(chat.encode(messages, thinking=thinking)))
    num_before = 2 + len(tokenizer.encode_text(before))  # BOS, <｜User｜>
    more = {"distance_tokens": num_tokens - num_before, "context_tokens": num_tokens}
    return _line("recall", "two steps" if fact.before else "one step", messages, thinking, fact.value, **more)


def chat_prompts(world: World, rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """Small talk and small tasks; of longer conversations the last answer is asked for."""
    for number in range(count):
        make = CHAT_KINDS[number % len(CHAT_KINDS)]
        draft = make(world, rng, 400)
        *earlier, last = draft.exchanges
        messages = [{"role": "system", "content": draft.system}] if draft.system else []
        for exchange in earlier:
            messages += [*_user(exchange.user), {"role": "assistant", "content": exchange.answer}]
        messages += _user(last.user)
        expected = None if make in _OPEN else _expected(last)
        yield _line("chat", make.__name__, messages, number // len(CHAT_KINDS) % 2 == 0, expected)


def _expected(exchange: Exchange) -> str:
    return exchange.answer.rstrip(".")


def text_pieces(world: World, rng: Random, count: int) -> Iterator[dict[str, Any]]:
    """Held-out text for bits per byte, from each kind of prose in turn."""
    sources = ("tinystories_subset", "fables_open_models", "childrens_books_pd", "open_storybooks")
    for number in range(count):
        source = sources[number % len(sources)]
        text = rng.choice(world.corpus[source])["text"][:TEXT_CHARACTERS]
        yield _line("text", source, [], False, None, text=text)


def evaluation_set(world: World, tokenizer: Tokenizer, seed: int, large: bool) -> Iterator[dict[str, Any]]:
    """Every suite; each has its own random numbers, so that changing one leaves the others as they were."""
    assert world.words.held_out, "evaluation draws from the held-out split only"
    size = {suite: sizes[large] for suite, sizes in SIZES.items()}
    rngs = {suite: Random(f"dsv4 tiny evaluation {suite} {seed}") for suite in SIZES}
    yield from story_prompts(world, rngs["stories"], size["stories"])
    yield from sum_prompts(world, rngs["sums"], size["sums"])
    yield from recall_prompts(world, tokenizer, rngs["recall"], size["recall"])
    yield from chat_prompts(world, rngs["chat"], size["chat"])
    yield from tool_prompts(rngs["tools"], size["tools"])
    yield from json_prompts(rngs["json"], size["json"])
    yield from open_prompts(rngs["unknown"], size["unknown"])
    yield from text_pieces(world, rngs["text"], size["text"])


def main(arguments: list[str]) -> None:
    """Writes one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder with the collection's .jsonl.xz files"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--seed", type=int, required=True)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="the set that is shipped (the default)")
    size.add_argument("--large", action="store_true", help="the set for judging a training run")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(options.tokenizer)
    world = build_world(options.corpus, tokenizer, "heldout")
    lines = [json.dumps(line) for line in evaluation_set(world, tokenizer, options.seed, options.large)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(lines)} prompts, {options.out.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
