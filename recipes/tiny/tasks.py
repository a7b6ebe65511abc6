"""Small tasks made fresh each time: copying, sorting, spelling, counting, and who is where."""

from random import Random

from dsv4.errors import ConfigError
from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import listed
from recipes.tiny.words import PLACES
from recipes.tiny.world import World


def _pick(world: World, rng: Random, count: int) -> list[str]:
    return rng.sample(world.words.common, count)


def copying(world: World, rng: Random, max_tokens: int) -> Draft:
    """Words, names, numbers or a sentence, said again exactly; now and then backwards."""
    kind = rng.choice(("words", "words", "sentence", "names", "number", "reverse"))
    if kind == "sentence":
        text = rng.choice(rng.choice(world.stories).sentences[:4])
        items: list[str] = []
    elif kind == "number":
        text, items = " ".join(str(rng.randrange(10)) for _ in range(rng.randrange(3, 9))), []
    else:
        count = rng.randrange(2, 9)
        mixed = kind != "names"
        items = _pick(world, rng, count) if mixed else [world.words.made_up_name(rng) for _ in range(count)]
        text = " ".join(items)
    if kind == "reverse":
        backwards = " ".join(reversed(items))
        asked = rng.choice(("Say these words backwards: {}", "Turn the order around: {}"))
        return Draft(
            (
                Exchange(
                    asked.format(text),
                    f"The last word is {items[-1]}. I go back from there.",
                    backwards,
                    tuple(items),
                ),
            )
        )
    asked = rng.choice(
        (
            "Say this again: {}",
            "Repeat after me: {}",
            "Copy this: {}",
            "Write this once more: {}",
            'Please repeat "{}"',
        )
    )
    return Draft((Exchange(asked.format(text), "I say the same again.", text, tuple(items)),))


def sorting(world: World, rng: Random, max_tokens: int) -> Draft:
    """By the alphabet or by size; the thought looks at what decides."""
    count = rng.randrange(3, 7)
    if rng.random() < 0.5:
        numbers = rng.sample(range(1, rng.choice((20, 100, 1000))), count)
        falls = rng.random() < 0.25
        order = sorted(numbers, reverse=falls)
        wording = "from large to small" if falls else "from small to large"
        asked = rng.choice(
            ("Sort these numbers {}: {}", "Put these numbers in order, {}: {}", "Order {}: {}")
        )
        thought = (
            f"I start with the {'largest' if falls else 'smallest'}. It is {order[0]}. Next comes {order[1]}."
        )
        answer = ", ".join(map(str, order))
        return Draft((Exchange(asked.format(wording, ", ".join(map(str, numbers))), thought, answer),))
    # First letters differ, so that the thought's reason is the whole reason.
    by_letter = {word[0]: word for word in _pick(world, rng, min(len(world.words.common), 40))}
    words = list(by_letter.values())[:count]
    asked = rng.choice(("Sort these words: {}", "Put these words in order: {}", "Sort by the alphabet: {}"))
    firsts, order = [word[0] for word in words], sorted(words)
    thought = f"The first letters are {', '.join(firsts)}. In order: {', '.join(sorted(firsts))}."
    return Draft((Exchange(asked.format(", ".join(words)), thought, ", ".join(order), tuple(words)),))


def spelling(world: World, rng: Random, max_tokens: int) -> Draft:
    """Letters of a word: all, first, last, how many, or the word from its letters."""
    word = rng.choice(world.words.common) if rng.random() < 0.8 else world.words.made_up_name(rng).lower()
    letters = list(word)
    spelled = "-".join(letters)
    numbered = ", ".join(f"{letter} {place}" for place, letter in enumerate(letters, 1))
    kind = rng.choice(("spell", "spell", "letters", "first", "last", "join", "has"))
    if kind == "spell":
        asked = rng.choice(("Spell the word {}.", "How do you spell {}?", 'Spell "{}".', "Can you spell {}?"))
        user, thought, answer = (
            asked.format(word),
            f"I say the letters of {word} one by one.",
            f"{word}: {spelled}.",
        )
    elif kind == "letters":
        asked = rng.choice(
            (
                "How many letters does {} have?",
                "How many letters are in the word {}?",
                'Count the letters in "{}".',
            )
        )
        user, thought, answer = (
            asked.format(word),
            f"{numbered}. So {len(word)}.",
            f"The word {word} has {len(word)} letters.",
        )
    elif kind in ("first", "last"):
        letter = letters[0 if kind == "first" else -1]
        user = f"What is the {kind} letter of {word}?"
        thought, answer = f"{word} is {spelled}.", f"The {kind} letter of {word} is {letter}."
    elif kind == "join":
        user = f"Which word is {spelled}?"
        thought, answer = "I put the letters together.", f"It is {word}."
    else:
        letter = rng.choice(letters) if rng.random() < 0.6 else rng.choice("abcdefghiklmnoprstuw")
        count = letters.count(letter)
        user = f"How many times is the letter {letter} in {word}?"
        thought = f"{word} is {spelled}. I count {letter}. So {count}."
        answer = f"The letter {letter} is in {word} {count} time{'' if count == 1 else 's'}."
    return Draft((Exchange(user, thought, answer, (word,)),))


def counting(world: World, rng: Random, max_tokens: int) -> Draft:
    """How many words, or how often one of them."""
    if rng.random() < 0.5:
        words = _pick(world, rng, rng.randrange(2, 10))
        counted = ", ".join(f"{word} {place}" for place, word in enumerate(words, 1))
        asked = rng.choice(
            ("How many words are these: {}", "Count the words: {}", "How many words do you see? {}")
        )
        answer = f"There are {len(words)} words."
        return Draft(
            (Exchange(asked.format(" ".join(words)), f"{counted}. So {len(words)}.", answer, tuple(words)),)
        )
    word, *others = _pick(world, rng, 4)
    count = rng.randrange(1, 7)
    row = [word] * count + [rng.choice(others) for _ in range(rng.randrange(1, 9))]
    rng.shuffle(row)
    counted = ", ".join(f"{word} {place}" for place in range(1, count + 1))
    asked = rng.choice(
        ("How many times do you see {}? {}", "How often is the word {} here: {}", "Count {} in this: {}")
    )
    answer = f"The word {word} is there {count} time{'' if count == 1 else 's'}."
    return Draft(
        (Exchange(asked.format(word, " ".join(row)), f"{counted}. So {count}.", answer, (word, *others)),)
    )


def first_and_last(world: World, rng: Random, max_tokens: int) -> Draft:
    """A place in a row of words."""
    words = _pick(world, rng, rng.randrange(3, 9))
    place = rng.randrange(len(words))
    ordinal = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")[place]
    if place == len(words) - 1:
        ordinal = "last"
    asked = rng.choice(
        ("What is the {} word? {}", "Which word is the {} one: {}", "Tell me the {} word of this: {}")
    )
    counted = ", ".join(f"{word} {number}" for number, word in enumerate(words[: place + 1], 1))
    answer = f"The {ordinal} word is {words[place]}."
    return Draft(
        (Exchange(asked.format(ordinal, " ".join(words)), f"I count. {counted}.", answer, tuple(words)),)
    )


MOVES = ("{} went to the {}.", "{} walked to the {}.", "{} ran to the {}.", "{} moved to the {}.")
TAKES = ("{} took the {}.", "{} picked up the {}.", "{} got the {}.")
DROPS = ("{} put down the {}.", "{} left the {} there.", "{} dropped the {}.")


def who_is_where(world: World, rng: Random, max_tokens: int) -> Draft:
    """People walk, take and leave things; asked is where someone or something is, or who has it."""
    names = world.words.names(rng, rng.choice((2, 2, 3, 4)))
    things = rng.sample(world.words.objects, 2)
    places = rng.sample(PLACES, 5)
    lines: list[str] = []
    at: dict[str, tuple[str, str]] = {}  # name -> (place, the line that says so)
    holder: dict[str, tuple[str, str]] = {}  # thing -> (name, line)
    lying: dict[str, tuple[str, str]] = {}  # thing -> (place, lines)
    for step in range(rng.randrange(3, 10)):
        name = names[step] if step < len(names) else rng.choice(names)
        here = at.get(name)
        held = [thing for thing, (who, _) in holder.items() if who == name]
        free = [
            t for t in things if t not in holder and (t not in lying or (here and lying[t][0] == here[0]))
        ]
        if here and held and rng.random() < 0.25:
            line = rng.choice(DROPS).format(name, held[0])
            holder.pop(held[0])
            lying[held[0]] = here[0], f'"{here[1]}" "{line}"'
        elif here and free and rng.random() < 0.5:
            thing = rng.choice(free)
            line = rng.choice(TAKES).format(name, thing)
            holder[thing] = name, line
            lying.pop(thing, None)
        else:
            place = rng.choice([p for p in places if not here or p != here[0]])
            line = rng.choice(MOVES).format(name, place)
            at[name] = place, line
        lines.append(line)
    exchanges: list[Exchange] = []
    questions = []
    for name, (place, line) in at.items():
        questions.append(Exchange(f"Where is {name}?", f'"{line}"', f"{name} is in the {place}."))
    for thing, (name, line) in holder.items():
        place, moved = at[name]
        where = f"The {thing} is in the {place}."
        questions += [Exchange(f"Where is the {thing}?", f'"{line}" "{moved}"', where)] * 2
        questions.append(Exchange(f"Who has the {thing}?", f'"{line}"', f"{name} has the {thing}."))
    for thing, (place, both) in lying.items():
        questions += [Exchange(f"Where is the {thing}?", both, f"The {thing} is in the {place}.")] * 2
    asked = list(dict.fromkeys(rng.sample(questions, min(len(questions), rng.choice((1, 1, 2))))))
    for question in asked:
        text = " ".join(lines)
        user = (
            question.user
            if exchanges
            else rng.choice((f"{text} {question.user}", f"{text}\n\n{question.user}"))
        )
        exchanges.append(Exchange(user, question.thought, question.answer, tuple((*names, *things))))
    return Draft(tuple(exchanges))


def in_the_list(world: World, rng: Random, max_tokens: int) -> Draft:
    """Is a word in a list of words?"""
    words = _pick(world, rng, rng.randrange(3, 8))
    inside = rng.random() < 0.5
    word = rng.choice(words) if inside else rng.choice([w for w in _pick(world, rng, 10) if w not in words])
    user = rng.choice(
        (f"Is {word} in this list? {listed(words)}", f"Do you see the word {word} here? {' '.join(words)}")
    )
    thought = f"I look for {word}. " + ("It is there." if inside else "It is not there.")
    answer = f"Yes, {word} is there." if inside else f"No, {word} is not there."
    return Draft((Exchange(user, thought, answer, (word, *words)),))


def one_sentence(world: World, rng: Random, max_tokens: int) -> Draft:
    """A sentence with a given word, taken from a story."""
    known = frozenset(world.words.common)
    fitting: list[str] = []
    # In a small collection few sentences hold a word that may be asked for.
    for _ in range(1000):
        sentence = rng.choice(rng.choice(world.stories).sentences)
        if 4 <= len(sentence.split()) <= 16 and '"' not in sentence:
            fitting = sorted(known.intersection(sentence.lower().rstrip(".!?").split()))
        if fitting:
            break
    else:
        raise ConfigError(
            f"no sentence with a plain word in {len(world.stories)} stories of the {world.words.split} "
            "split; expected thousands of stories; check --corpus"
        )
    word = rng.choice(fitting)
    asked = rng.choice(
        ("Make a sentence with {}.", "Use the word {} in a sentence.", "Write one sentence with the word {}.")
    )
    thought = f"I need a sentence with the word {word}."
    return Draft((Exchange(asked.format(word), thought, sentence, (word,)),))
