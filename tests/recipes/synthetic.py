"""A small collection in the layout of the real one: 11 files of xz-compressed JSON lines."""

import json
import lzma
from pathlib import Path
from random import Random
from typing import Any

from recipes.tiny.words import ANIMALS, BOYS, GIRLS, OBJECTS, PLACES

NOUNS = sorted({*ANIMALS, *OBJECTS, *PLACES})
PERSONAS = ("friendly", "caring", "enthusiastic", "professional", "witty")


def _story(rng: Random) -> str:
    name, friend = rng.choice(GIRLS), rng.choice(BOYS)
    a, b, c, d, e, f = rng.sample(NOUNS, 6)
    return (
        f"Once upon a time, there was a little girl named {name}. One day {name} found a {a} and the {b}. "
        f'"Look at the {a}!" {name} said. But then {friend} took the {c} to the {d}.\n'
        f"So {name} was sad and went home with the {b}. "
        f"Then her friend {friend} gave the {e} and the {f} to {name}. "
        f"{name} learned that it is good to share a {a}. They were happy and played together all day."
    )


def _tale(rng: Random, number: int) -> dict[str, Any]:
    sections, questions = {}, []
    for key in ("1", "2"):
        animal, place = rng.choice(ANIMALS), rng.choice(PLACES)
        sections[key] = f"In the {place} sat an old {animal}. The {animal} sang a song for number {number}."
        questions.append({"sections": [key], "q": f"who sat in the {place}?", "a": f"an old {animal}"})
    return {"title": f"tale-{number}", "sections": sections, "qa": questions, "simple": 0.95}


def _turns(rng: Random) -> list[str]:
    count = 2 * rng.randrange(2, 6)
    return [
        f"I saw a {rng.choice(NOUNS)}." if n % 2 else f"Did you see the {rng.choice(NOUNS)}?"
        for n in range(count)
    ]


def _records(rng: Random) -> dict[str, list[dict[str, Any]]]:
    stories = [{"text": _story(rng), "simple": 0.95} for _ in range(400)]
    elements = {
        "character": "a old owl",
        "setting": "a forest where our story unfolds",
        "teaching": "sharing is good",
    }
    return {
        "tinystories_subset": stories,
        "fables_open_models": [
            {**s, "text": _story(rng), "model": "m", "elements": elements} for s in stories[:200]
        ],
        "open_storybooks": [{**s, "text": _story(rng), "title": "My Day", "src": "s"} for s in stories[:200]],
        "childrens_books_pd": [
            {"book": "b", "text": "\n\n".join(_story(rng) for _ in range(4)), "simple": 0.9}
            for _ in range(200)
        ],
        "fairytale_qa": [_tale(rng, number) for number in range(200)],
        "chitchat_smalltalk": [
            {
                "persona": persona,
                "questions": [f"Say number {n} of {m}" for m in range(60)],
                "text": f"Number {n}!",
            }
            for persona in PERSONAS
            for n in range(10)
        ],
        "synthetic_persona_chat": [
            {"p1": ["I run."], "p2": [f"I am {n}."], "turns": _turns(rng)} for n in range(200)
        ],
        "schema_guided_dialogue": [{"services": [f"S_{n}"], "turns": _turns(rng)} for n in range(200)],
        "self_dialogue": [{"topic": "music", "turns": _turns(rng), "n": n} for n in range(200)],
        "gsm8k_train": [
            {
                "question": f"Tim has {n} and 2. How many?",
                "reasoning": f"{n} + 2 = {n + 2}.",
                "answer": str(n + 2),
                "simple": 1,
            }
            for n in range(300)
        ],
        "wordnet_definitions": [
            {
                "word": noun,
                "pos": pos,
                "definition": f"a {NOUNS[i - 1]} and the {NOUNS[i - 2]}",
                "examples": [],
            }
            for i, noun in enumerate(NOUNS)
            for pos in ("noun", "verb", "adjective")
        ],
    }


def write_corpus(folder: Path) -> Path:
    """The same bytes every time."""
    folder.mkdir()
    for source, records in _records(Random(7)).items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{source}.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=0))
    return folder
