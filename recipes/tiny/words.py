"""Names, things and numbers the made-up tasks are built from, and which of them only evaluation may use.

A split sees its own half: `Words("train")` never gives out a held-out name, word, number or operand pair.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


def row(text: str) -> list[str]:
    """The words of a list that is easier to read as one line."""
    return text.split()


GIRLS = row(
    "Lily Mia Sara Anna Lucy Emma Mary Sarah Amy Jane Sally Molly Susie Daisy Bella Zoe Kate Lisa Rose Ella "
    "Nina Pam Polly Ruby Lola Emily Grace Sophie Ellie Maya Eva Lena Ivy Holly Betty Jill Jenny Beth Annie "
    "Rosie Kim Ann Gail Liz Meg Rita Ruth Tina Vicky Wendy Laura Helen Julia Clara Alice Dora Edith Flora "
    "Hannah Nora Vera Ada Iris Hazel Greta Leila Zara Elsie Mabel Tess Esme Cleo Ines Petra Nadia Anya Gwen "
    "Sofia"
)
BOYS = row(
    "Tom Tim Ben Sam Max Jack Timmy John Bob Billy Joe Jim Leo Peter Mark Fred Dan Alex Charlie Oliver Noah "
    "Jake Luke Adam Toby Harry George Henry David Paul Nick Matt Mike Tony Andy Ryan Eric Sean Carl Ted Ned "
    "Roy Ray Rex Gus Hal Ian Lee Ron Walt Zack Finn Theo Milo Hugo Felix Bruno Rufus Otis Omar Ravi Luca "
    "Remy Rowan Jude Dylan Enzo Nico Tobias Lars Igor Marek Yusuf Anil Idris Soren Rhys"
)
# None of these occurs in the collection; a record that holds one is not trained on (see corpus.py).
HELD_OUT_GIRLS = row(
    "Odette Imogen Freya Ottilie Saskia Calla Astrid Bronwyn Gita Sunniva Niamh Siobhan Yuki"
)
HELD_OUT_BOYS = row("Thaddeus Kenji Dario Ezra Ivo Oskar Magnus Bjorn Dmitri Pavel Kofi Eamon")
HELD_OUT_NAMES = frozenset(HELD_OUT_GIRLS + HELD_OUT_BOYS)

OBJECTS = row(
    "kite ball doll book cup key hat coat shoe lamp clock spoon fork plate bowl box bag basket bucket drum "
    "bell flute whistle ring necklace coin map letter card stamp pen pencil brush rope ribbon button mirror "
    "candle lantern blanket pillow scarf glove sock boot umbrella ladder hammer nail shovel broom jar "
    "bottle mug teapot pan pot puzzle robot train truck boat wagon sled swing marble balloon flag crown "
    "sword shield wand feather shell stone leaf flower acorn pinecone apple pear plum peach lemon orange "
    "banana cherry berry carrot potato onion pumpkin cookie cake muffin pie sandwich egg nut bean cheese "
    "camera radio ticket notebook magnet needle thread purse wallet watch compass telescope guitar violin "
    "trumpet crayon sticker poster pebble tent backpack"
)
COUNTED = row(
    "apples pears plums cookies marbles stickers coins books balls kites shells stones flowers eggs nuts "
    "balloons cards stamps pencils buttons crayons berries carrots muffins pebbles feathers candles beads "
    "toys oranges"
)
PLACES = row(
    "shed garden kitchen attic barn cellar hall garage bedroom bathroom library school park shop forest "
    "field cave tower castle bakery station market church stable cabin yard pantry office closet playroom "
    "tent harbor museum zoo farm orchard meadow mill hotel theater gym"
)
COLORS = row("red blue green yellow white black pink purple orange brown gray gold silver")
LOOKS = row(
    "big small old new tall tiny round square long short soft hard shiny dirty clean heavy light broken "
    "wooden striped plain fancy dusty rusty smooth"
)
ANIMALS = row(
    "dog cat bird fish rabbit bear fox frog duck cow horse pig sheep goat mouse lion tiger elephant monkey "
    "owl squirrel turtle bee butterfly wolf deer hen snake spider whale penguin hedgehog"
)
FOODS = row(
    "pizza soup bread rice pasta cake toast salad cheese honey noodles pancakes apples grapes beans corn "
    "fish chicken eggs yogurt popcorn pie jam tomatoes"
)
HOBBIES = row(
    "reading drawing singing swimming running dancing cooking painting fishing climbing knitting skating "
    "gardening chess football"
)
JOBS = row(
    "baker doctor teacher farmer pilot sailor painter singer nurse driver builder cook writer dancer "
    "gardener tailor fisher clown"
)

_ONSETS = row("b d f g h j k l m n p r s t v w z br dr gr kl pl st tr")
_VOWELS = row("a e i o u")
_CODAS = ["", "", "", "n", "l", "r", "s", "m", "k", "x"]


def stable_hash(text: str) -> int:
    """The same 64-bit number on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def is_held_out_word(word: str) -> bool:
    """One word in eight is never an item of a training task, nor asked for in a training request."""
    return stable_hash(f"word:{word.lower()}") % 8 == 0


def is_held_out_pair(operation: str, a: int, b: int) -> bool:
    """One operand pair in ten, in both orders; small facts (both below 10, the tables) are for all."""
    if operation == "/" or max(a, b) < 10 or (operation == "x" and max(a, b) <= 12):
        return False
    low, high = sorted((a, b))
    return stable_hash(f"pair:{operation}:{low}:{high}") % 10 == 0


def is_held_out_code(code: int) -> bool:
    """One four-digit number in ten is only asked for in evaluation."""
    return stable_hash(f"code:{code}") % 10 == 0


def is_held_out_name(name: str) -> bool:
    """A listed held-out name, or one made-up name in eight."""
    known = name in HELD_OUT_NAMES
    return known or (name not in _LISTED and is_held_out_word(name))


_LISTED = frozenset(GIRLS + BOYS)


@dataclass(frozen=True)
class Words:
    """The words of one split. `common` are plain content words, from the collection's stories; `known` are
    all that stories and books use often."""

    split: Split
    common: Sequence[str] = ()
    known: Sequence[str] = ()
    girls: list[str] = field(init=False)
    boys: list[str] = field(init=False)
    objects: list[str] = field(init=False)

    def __post_init__(self) -> None:
        held_out = self.split == "heldout"
        put = object.__setattr__
        put(self, "girls", HELD_OUT_GIRLS if held_out else GIRLS)
        put(self, "boys", HELD_OUT_BOYS if held_out else BOYS)
        put(self, "objects", [word for word in OBJECTS if is_held_out_word(word) == held_out])
        put(self, "known", [word for word in self.known if is_held_out_word(word) == held_out])
        put(self, "common", [word for word in self.common if is_held_out_word(word) == held_out])

    @property
    def held_out(self) -> bool:
        return self.split == "heldout"

    def name(self, rng: Random) -> str:
        return rng.choice(self.girls if rng.random() < 0.5 else self.boys)

    def names(self, rng: Random, count: int) -> list[str]:
        """Different names; beyond the listed ones they are made up."""
        found = rng.sample(self.girls + self.boys, min(count, len(self.girls) + len(self.boys)))
        while len(found) < count:
            if (name := self.made_up_name(rng)) not in found:
                found.append(name)
        return found

    def pronoun(self, name: str) -> str:
        return "he" if name in self.boys else "she"

    def made_up_name(self, rng: Random) -> str:
        """A name nobody has, `Bakor` or `Trilema`, so that names are read and not remembered."""
        while True:
            parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
            name = ("".join(parts) + rng.choice(_CODAS)).capitalize()
            if name not in _LISTED and is_held_out_name(name) == self.held_out:
                return name

    def code(self, rng: Random) -> int:
        while True:
            code = rng.randrange(1000, 10000)
            if is_held_out_code(code) == self.held_out:
                return code

    def allows_pair(self, operation: str, a: int, b: int) -> bool:
        """In the held-out split small facts, which no pair is held out of, do not count as held out."""
        return is_held_out_pair(operation, a, b) == self.held_out
