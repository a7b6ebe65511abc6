"""Questions about a text and about words: the thought quotes the place that holds the answer."""

import re
from random import Random

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import Story, article, clip, quoted, sentences_of
from recipes.tiny.words import ANIMALS, row
from recipes.tiny.world import World

READ = (
    "Read this story.\n\n{}\n\n{}",
    "{}\n\n{}",
    "Here is a story.\n\n{}\n\n{}",
    "{1}\n\n{0}",
    "I have a question about this text.\n\n{}\n\n{}",
    "Story: {}\n\nQuestion: {}",
    "Read the text and answer. {1}\n\n{0}",
)
_AUXILIARY = "is|was|were|are|did|do|does|will|would|had|has|have|can|could|should|might|kind|time"
_SUBJECT_QUESTION = re.compile(rf"^(who|what) (?!(?:{_AUXILIARY})\b)[a-z]+(?:ed|t|d|k|w|e|n|g)\b.*\?$")
_THING = re.compile(r"(a|an|the|his|her|their|some|two|three|[A-Z]\w+)\b")
_SMALL = frozenset(
    row(
        "the a an of to in and was were is are did do does he she it his her they their them for on at with "
        "that had has what who why how where when be not as by from him"
    )
)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """With a capital letter and an end mark."""
    text = capitalized(text.strip())
    return text if text.endswith((".", "!", "?", '"')) else text + "."


def _content(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if word not in _SMALL}


def best_sentence(text: str, question: str, answer: str) -> str | None:
    """The sentence that shares most words with the answer, then with the question, if any does."""
    wanted, asked = _content(answer), _content(question)
    ranked = [(2 * len(wanted & (words := _content(s))) + len(asked & words), s) for s in sentences_of(text)]
    score, best = max(ranked, key=lambda pair: pair[0], default=(0, ""))
    return best if score >= 2 else None


def full_answer(question: str, answer: str) -> str:
    """`who sat under the tree?` and `a snail` -> `A snail sat under the tree.`; else the answer alone."""
    found = _SUBJECT_QUESTION.match(question.strip().lower())
    if found and _THING.match(answer) and len(answer.split()) <= 6 and len(question.split()) <= 10:
        # The question in its own letters, so that names keep their capitals.
        rest = question.strip()[len(found[1]) :].rstrip("?")
        return sentence(answer.rstrip(".") + rest)
    return sentence(answer)


def tale_questions(world: World, rng: Random, max_tokens: int) -> Draft:
    """A part of a fairy tale, or all of it where it fits, and up to three of the teachers' questions."""
    tale = rng.choice(world.corpus["fairytale_qa"])
    sections = tale["sections"]
    whole = "\n\n".join(sections.values())
    if len(whole) < 3 * (max_tokens - 200) and rng.random() < 0.5:
        text, asked = whole, tale["qa"]
    else:
        item = rng.choice(tale["qa"])
        used = [key for key in item["sections"] if key in sections]
        text = "\n\n".join(sections[key] for key in used)
        asked = [other for other in tale["qa"] if set(other["sections"]) <= set(used)]
        if not text or len(text) > 3 * (max_tokens - 100):
            return story_questions(world, rng, max_tokens)
    exchanges: list[Exchange] = []
    for item in rng.sample(asked, min(len(asked), rng.choice((1, 2, 3)))):
        question = sentence(item["q"])
        quote = best_sentence(text, item["q"], item["a"])
        thought = (
            f"I read: {quoted(clip(quote, 20))}"
            if quote
            else "The text does not say it in one place. I put it together."
        )
        user = question if exchanges else rng.choice(READ).format(text, question)
        exchanges.append(Exchange(user, thought, full_answer(item["q"], item["a"])))
    return Draft(tuple(exchanges))


def story_questions(world: World, rng: Random, max_tokens: int) -> Draft:
    """A story of the collection with one to three made questions."""
    story = world.story(rng, max_tokens - 200)
    first, *others = questions_about(story, rng, rng.choice((1, 2, 3)))
    told = Exchange(rng.choice(READ).format(story.text, first.user), first.thought, first.answer, first.items)
    return Draft((told, *others))


def questions_about(story: Story, rng: Random, count: int) -> list[Exchange]:
    """Different questions on a story that was told before."""
    made = [_how_it_starts(story, rng), _how_it_ends(story, rng), _summary(story, rng), _animal(story, rng)]
    if story.hero:
        made += [_hero(story, rng), _hero(story, rng), *([named] if (named := _times_named(story)) else [])]
    if sayings := story.sayings():
        who, said = rng.choice(sayings)
        line = f'{who} said, "{said}"'
        made.append(
            Exchange(f"What did {who} say first?", f"I look for the first thing {who} says. {line}", line)
        )
    rng.shuffle(made)
    chosen: dict[str, Exchange] = {}
    for exchange in made:
        chosen.setdefault(exchange.answer, exchange)
    return list(chosen.values())[:count]


def _hero(story: Story, rng: Random) -> Exchange:
    asked = rng.choice(("Who is the story about?", "What is the name of the hero?", "Who is it about?"))
    quote = story.sentence_with(story.hero or "") or story.sentences[0]
    return Exchange(asked, f"I read: {quoted(clip(quote))}", f"The story is about {story.hero}.")


def _how_it_starts(story: Story, rng: Random) -> Exchange:
    asked = rng.choice(("How does the story start?", "What is the first sentence?", "How does it begin?"))
    return Exchange(asked, "I look at the first sentence.", story.sentences[0])


def _how_it_ends(story: Story, rng: Random) -> Exchange:
    asked = rng.choice(("How does the story end?", "What is the last sentence?", "What happens in the end?"))
    return Exchange(asked, "I look at the last sentence.", story.last)


def _summary(story: Story, rng: Random) -> Exchange:
    asked = rng.choice(
        ("Tell me in short what happens.", "Give me a short summary.", "What happens in the story? Be brief.")
    )
    start, middle, end = story.outline
    who = f"about {story.hero}" if story.hero else "short"
    thought = f"The story is {who}. I take the start, the middle and the end."
    return Exchange(asked, thought, f"First: {start} Then: {middle} In the end: {end}")


def _animal(story: Story, rng: Random) -> Exchange:
    present = [animal for animal in ANIMALS if story.counts[animal]]
    absent = [a for a in ANIMALS if not story.counts[a] and a + "s" not in story.counts]
    if present and rng.random() < 0.6:
        animal = rng.choice(present)
        quote = clip(story.sentence_with(animal) or "")
        return Exchange(
            f"Is there {article(animal)} {animal} in the story?",
            f"I look for {article(animal)} {animal}. {quoted(quote)}",
            f"Yes, there is {article(animal)} {animal} in the story.",
        )
    animal = rng.choice(absent)
    return Exchange(
        f"Is there {article(animal)} {animal} in the story?",
        f"I look for {article(animal)} {animal}. I do not find one.",
        f"No, there is no {animal} in the story.",
    )


def _times_named(story: Story) -> Exchange | None:
    hero = story.hero or ""
    count = story.counts[hero.lower()] + story.counts[hero.lower() + "'s"]
    if count > 6:
        return None
    counted = ", ".join(f"{hero} {n}" for n in range(1, count + 1))
    return Exchange(
        f"How many times is {hero} named?", f"I count. {counted}.", f"{hero} is named {count} times."
    )


SUMMARIZE = (
    *("Summarize this text.\n\n{}", "Give me a short summary:\n\n{}", "What happens here? Be brief.\n\n{}"),
    *("{}\n\nSummarize this in two sentences.", "Make this shorter:\n\n{}", "TL;DR\n\n{}", "Sum this up: {}"),
)


def summary(world: World, rng: Random, max_tokens: int) -> Draft:
    """A short text in its own words: how a part of a story begins, turns and ends."""
    story = world.story(rng, max_tokens - 250)
    first = rng.randrange(max(1, len(story.sentences) - 5))
    part = Story(" ".join(story.sentences[first : first + rng.randrange(4, 14)]), story.source)
    start, last = part.sentences[0], part.last
    who = f"It is about {part.hero}. " if part.hero else ""
    later = [s for s in part.sentences[1:-1] if part.hero and part.hero in s]
    middle = f" {later[len(later) // 2]}" if later and rng.random() < 0.5 else ""
    thought = f"{who}I take the first and the last sentence{', and one between' if middle else ''}."
    return Draft((Exchange(rng.choice(SUMMARIZE).format(part.text), thought, f"{start}{middle} {last}"),))
