"""Conversation: small talk, dialogues of the collection, what the user told, what the model cannot do."""

import re
from random import Random
from typing import Any

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import article, clip, quoted
from recipes.tiny.words import ANIMALS, COLORS, FOODS, HOBBIES
from recipes.tiny.world import World

# Said when there is nothing to say about the manner; a record in ten carries one, the others none.
NEUTRAL_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small, kind assistant.",
    "You are a helpful assistant. Use simple words.",
    "Be kind and brief.",
    "Answer in simple words.",
    "You tell stories and answer questions.",
)
MANNERS = {
    "friendly": ("You are friendly.", "Be friendly.", "Answer in a friendly way."),
    "caring": ("You are caring.", "Be gentle and caring.", "Answer in a caring way."),
    "enthusiastic": ("You are full of joy.", "Be enthusiastic.", "Answer in an enthusiastic way."),
    "professional": (
        "You are a professional assistant.",
        "Be professional.",
        "Answer in a professional way.",
    ),
    "witty": ("You are witty.", "Be witty and funny.", "Answer in a witty way."),
}
_ABOUT_SELF = re.compile(
    r"\b(your name|call you|address you|who are you|what are you|made you|built you|can you do)", re.I
)

# Asked about itself the model should say what it is; the collection's bot has other answers.
SELF = (
    (
        (
            *(
                "Who are you?",
                "What are you?",
                "Tell me about yourself.",
                "Are you a computer?",
                "Introduce yourself.",
            ),
            *(
                "Are you a human?",
                "Are you a robot?",
                "Are you ChatGPT?",
                "Which model are you?",
                "Are you an AI?",
            ),
        ),
        (
            "I am a very small language model. I run in dsv4, to show how it works.",
            "I am a tiny language model in dsv4. I can do sums, use tools and tell short stories.",
        ),
    ),
    (
        (
            *("What is your name?", "What's your name?", "Do you have a name?", "How should I call you?"),
            *("What are you called?", "your name?"),
        ),
        ("I have no real name. You can call me Tiny.", "You can call me Tiny."),
    ),
    (
        (
            *(
                "What can you do?",
                "How can you help me?",
                "What are you good at?",
                "help",
                "What should I ask you?",
            ),
            *("What do you know?", "What are your skills?", "Can you help me?", "How can I use you?"),
        ),
        (
            "I can do sums, sort words, find things in your text, call tools, write JSON and tell stories.",
            "Ask me for a sum like 47 + 38, for something in a text of yours, or for a short story.",
        ),
    ),
    (
        (
            *("How big are you?", "Are you a big model?", "How smart are you?", "Are you very clever?"),
            *("How many parameters do you have?", "Are you smart?"),
        ),
        ("I am very small, about 33 million numbers. Big models know much more than I do.",),
    ),
    (
        (
            *("What do you not know?", "What can you not do?", "Can I trust you?", "Are you always right?"),
            *("Do you know everything?", "Do you know a lot?", "Do you make mistakes?"),
        ),
        ("I know almost nothing of the world, and I make mistakes. Sums I can do.",),
    ),
    (
        (
            *(
                "Who made you?",
                "Who built you?",
                "Where do you come from?",
                "How were you made?",
                "Who trained you?",
            ),
            *("What were you trained on?",),
        ),
        ("I was trained on stories, small talk and made-up tasks, with the recipe that comes with dsv4.",),
    ),
)
# what, ways to tell it, ways to ask for it, the answer
TOLD = (
    (
        "name",
        ("My name is {}.", "I am {}.", "Hi, I'm {}.", "You can call me {}."),
        ("What is my name?", "Who am I?", "Do you know my name?"),
        "Your name is {}.",
    ),
    (
        "favorite color",
        ("My favorite color is {}.", "I like {} best of all colors."),
        ("What is my favorite color?", "Which color do I like best?"),
        "Your favorite color is {}.",
    ),
    (
        "favorite food",
        ("My favorite food is {}.", "I like to eat {} best."),
        ("What is my favorite food?", "What do I like to eat best?"),
        "Your favorite food is {}.",
    ),
    (
        "age",
        ("I am {} years old.", "My age is {}."),
        ("How old am I?", "What is my age?"),
        "You are {} years old.",
    ),
    (
        "pet",
        ("My pet is {}.", "I have a pet. It is {}."),
        ("What pet do I have?", "Which animal do I have?"),
        "You have {}.",
    ),
    (
        "hobby",
        ("My hobby is {}.", "I like {} in my free time."),
        ("What is my hobby?", "What do I like to do?"),
        "Your hobby is {}.",
    ),
    (
        "number",
        ("My lucky number is {}.", "Please remember the number {}."),
        ("What is my number?", "Which number did I tell you?"),
        "Your number is {}.",
    ),
)
NOTED = ("Nice to know!", "Good, I will remember that.", "Thank you for telling me.", "How nice!", "Got it.")


def _says(user: str) -> str:
    said = quoted(clip(user.strip(), 15))
    return f"The user {'asks' if said[-2] == '?' else 'says'}: {said}{'' if said[-2] in '.!?' else '.'}"


def small_talk(world: World, rng: Random, max_tokens: int) -> Draft:
    """Friendly answers of the collection; without a system message the model has one manner only."""
    return Draft((_chitchat(rng.choice(world.friendly), "friendly", rng),))


def small_talk_in_a_manner(world: World, rng: Random, max_tokens: int) -> Draft:
    """Any manner, asked for by a system message."""
    record = rng.choice(world.corpus["chitchat_smalltalk"])
    persona = record["persona"]
    return Draft((_chitchat(record, persona, rng),), rng.choice(MANNERS[persona]))


def _chitchat(record: dict[str, Any], persona: str, rng: Random) -> Exchange:
    asked = [q for q in record["questions"] if not _ABOUT_SELF.search(q)] or record["questions"]
    user = rng.choice(asked)
    thought = f"{_says(user)} I answer in {article(persona)} {persona} way."
    return Exchange(user, thought, record["text"])


def about_itself(world: World, rng: Random, max_tokens: int) -> Draft:
    """What it is, what it can do and what it cannot."""
    asked, answers = rng.choice(SELF)
    thought = "The user asks about me. I say what I am."
    return Draft((Exchange(rng.choice(asked), thought, rng.choice(answers)),))


def told_before(world: World, rng: Random, max_tokens: int) -> Draft:
    """The user tells one to three things; something else happens; the user asks for one of them."""
    told = rng.sample(TOLD, rng.choice((1, 2, 2, 3)))
    exchanges: list[Exchange] = []
    said: dict[str, tuple[str, str]] = {}
    items: list[str] = []
    for what, ways, _, _ in told:
        value = _value(what, world, rng)
        line = rng.choice(ways).format(value)
        said[what] = line, value
        if what == "name":
            items.append(value)
        hello = rng.choice((f"Nice to meet you, {value}!", f"Hello, {value}!", f"Hi {value}, how are you?"))
        answer = hello if what == "name" else rng.choice(NOTED)
        if exchanges and rng.random() < 0.3:
            last = exchanges.pop()
            exchanges.append(Exchange(f"{last.user} {line}", last.thought, last.answer))
        else:
            thought = f"The user tells me something. I remember: {line}"
            exchanges.append(Exchange(line, thought, answer))
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        exchanges += small_talk(world, rng, max_tokens).exchanges
    what, _, questions, form = rng.choice(told)
    if rng.random() < 0.12:
        unsaid = [row for row in TOLD if row[0] not in said]
        what, _, questions, _ = rng.choice(unsaid)
        thought = f"I look for the {what}. The user did not tell me."
        answer = f"You did not tell me your {what}."
    else:
        line, value = said[what]
        thought, answer = f'I look for the {what}. The user said: "{line}"', form.format(value)
    exchanges.append(Exchange(rng.choice(questions), thought, answer, tuple(items)))
    return Draft(tuple(exchanges))


def _value(what: str, world: World, rng: Random) -> str:
    if what == "name":
        return world.words.name(rng) if rng.random() < 0.7 else world.words.made_up_name(rng)
    if what == "pet":
        animal = rng.choice(ANIMALS)
        return f"{article(animal)} {animal}"
    values = {"favorite color": COLORS, "favorite food": FOODS, "hobby": HOBBIES}
    if what in values:
        return rng.choice(values[what])
    return str(rng.randrange(3, 90) if what == "age" else world.words.code(rng))
