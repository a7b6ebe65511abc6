"""Recall over long contexts: many lines of one form, stories in between, and questions on a few of them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import article
from recipes.tiny.words import COLORS, FOODS, JOBS, LOOKS, PLACES, Words
from recipes.tiny.world import World

MAX_LINES = 300
INTROS = (
    "Read this.",
    "Read the text.",
    "Here is a text.",
    "Remember these lines.",
    "Look at this list.",
    "Keep this in mind.",
    "I will ask you about this text.",
    "Text:",
)


@dataclass(frozen=True)
class Fact:
    """A line of the context and what it answers; `key` is what to look for, `value` what must be said.

    The value may stand behind the key or before it. `quote` is what the thought says of the line. `kind`:
    what is asked, for facts that a short question may follow on ("And of Cora?").
    """

    line: str
    key: str
    value: str
    questions: tuple[str, ...]
    answer: str
    items: tuple[str, ...]
    before: "Fact | None" = None  # of a two-step question, the line that leads to this one
    quote: str = ""
    kind: str = ""

    @property
    def thought(self) -> str:
        own = f'I look for {self.key}. "{self.quote or self.line}"'
        return f"{self.before.thought} {own}" if self.before else own


def _code(who: str, words: Words, rng: Random) -> Fact:
    code = str(words.code(rng))
    answer = f"The code of {who} is {code}."
    line = rng.choice(
        (answer, answer, answer, f"{code} is the code of {who}.", f"{who} has the code {code}.")
    )
    asked = (f"What is the code of {who}?", f"Tell me the code of {who}.", f"Which code does {who} have?")
    return Fact(line, who, code, asked, answer, (who, code), kind="code")


def _color(who: str, words: Words, rng: Random) -> Fact:
    color = rng.choice(COLORS)
    asked = (f"What is the favorite color of {who}?", f"Which color does {who} like best?")
    answer = f"The favorite color of {who} is {color}."
    line = rng.choice((answer, answer, f"{color.capitalize()} is the favorite color of {who}."))
    return Fact(line, who, color, asked, answer, (who,), kind="color")


def _age(who: str, words: Words, rng: Random) -> Fact:
    age = str(rng.randrange(3, 99))
    line = f"{who} is {age} years old."
    return Fact(
        line, who, age, (f"How old is {who}?", f"What is the age of {who}?"), line, (who,), kind="age"
    )


def _food(who: str, words: Words, rng: Random) -> Fact:
    food = rng.choice(FOODS)
    line = f"{who} likes to eat {food}."
    asked = (f"What does {who} like to eat?", f"Which food does {who} like?")
    return Fact(line, who, food, asked, line, (who,), kind="food")


def _job(who: str, words: Words, rng: Random) -> Fact:
    job = rng.choice(JOBS)
    line = f"{who} is {article(job)} {job}."
    return Fact(
        line, who, job, (f"What is the job of {who}?", f"What does {who} work as?"), line, (who,), kind="job"
    )


def _home(who: str, words: Words, rng: Random) -> Fact:
    place = rng.choice(PLACES)
    answer = f"{who} is in the {place}."
    line = rng.choice((answer, answer, f"In the {place} is {who}.", f"The {place} is where {who} is."))
    return Fact(
        line, who, place, (f"Where is {who}?", f"In which place is {who}?"), answer, (who,), kind="home"
    )


_FIELDS: tuple[tuple[str, Callable[[Words, Random], str]], ...] = (
    ("age", lambda words, rng: str(rng.randrange(3, 99))),
    ("code", lambda words, rng: str(words.code(rng))),
    ("color", lambda words, rng: rng.choice(COLORS)),
    ("job", lambda words, rng: rng.choice(JOBS)),
    ("place", lambda words, rng: rng.choice(PLACES)),
    ("friend", lambda words, rng: words.made_up_name(rng)),
    ("thing", lambda words, rng: rng.choice(words.objects)),
    ("town", lambda words, rng: words.made_up_name(rng)),
)


def _block(who: str, words: Words, rng: Random) -> Fact:
    """Some lines on one person, of which one is asked."""
    fields = [(key, make(words, rng)) for key, make in rng.sample(_FIELDS, rng.choice((2, 3, 4)))]
    sign = rng.choice((": ", ": ", " = ", " - "))
    lines = [f"Name{sign}{who}", *(f"{key.capitalize()}{sign}{value}" for key, value in fields)]
    at = rng.randrange(len(fields))
    key, value = fields[at]
    quote = " ".join(lines[: at + 2])
    asked = (f"What is the {key} of {who}?", f"Tell me the {key} of {who}.", f"{who}: which {key}?")
    answer = f"The {key} of {who} is {value}."
    return Fact("\n".join(lines), who, value, asked, answer, (who,), quote=quote, kind=key)


ABOUT_PEOPLE: tuple[Callable[[str, Words, Random], Fact], ...] = (
    _code,
    _code,
    _code,
    _color,
    _age,
    _food,
    _job,
    _home,
)


def _thing(words: Words, rng: Random, taken: set[str]) -> str:
    """`kite`, `red ball`, `old ball`, `bakor`: words nobody knows must be read.

    A noun comes once alone or only with looks, so that no thing is another one's name cut short.
    """
    while True:
        noun = rng.choice(words.objects) if rng.random() < 0.6 else words.made_up_name(rng).lower()
        thing = noun
        if f"... {noun}" in taken or rng.random() < 0.5:
            thing = f"{rng.choice(COLORS if rng.random() < 0.6 else LOOKS)} {noun}"
        if noun not in taken and thing not in taken:
            taken |= {thing, f"... {noun}"} if thing != noun else {thing}
            return thing


def _put(who: str, thing: str, rng: Random) -> Fact:
    place = rng.choice(PLACES)
    line = f"{who} put the {thing} in the {place}."
    asked = (f"Where is the {thing}?", f"Where did {who} put the {thing}?", f"In which place is the {thing}?")
    answer, quote = f"The {thing} is in the {place}.", f"... the {thing} in the {place}."
    return Fact(line, f"the {thing}", place, asked, answer, (who, thing), quote=quote)


def _number_of_thing(thing: str, words: Words, rng: Random) -> Fact:
    code = str(words.code(rng))
    answer = f"The number of the {thing} is {code}."
    line = rng.choice((answer, answer, f"{code} is the number of the {thing}."))
    asked = (f"What is the number of the {thing}?", f"Which number does the {thing} have?")
    return Fact(line, f"the {thing}", code, asked, answer, (thing, code), kind="number")


def _two_steps(who: str, thing: str, rng: Random, words: Words) -> tuple[Fact, Fact]:
    """`The kite belongs to Tom.` and `Tom is in the shed.`: where is the one who has the kite?"""
    answer = f"The {thing} belongs to {who}."
    has = rng.choice((answer, answer, f"{who} has the {thing}.", f"{who} is the owner of the {thing}."))
    asked = (f"Who has the {thing}?", f"Who does the {thing} belong to?", f"Whose is the {thing}?")
    first = Fact(has, f"the {thing}", who, asked, answer, (who, thing))
    if rng.random() < 0.6:
        place = rng.choice(PLACES)
        line = f"{who} is in the {place}."
        asked = (f"Where is the one who has the {thing}?", f"In which place is the person with the {thing}?")
        return first, Fact(line, who, place, asked, line, (who, thing), first)
    code = str(words.code(rng))
    line = f"The code of {who} is {code}."
    asked = (
        f"What is the code of the one who has the {thing}?",
        f"Which code has the person with the {thing}?",
    )
    return first, Fact(line, who, code, asked, line, (who, thing, code), first)


def make_facts(words: Words, rng: Random, count: int) -> list[Fact]:
    """That many lines about different people and things, in one, two or three forms."""
    forms = rng.sample(("person", "put", "number", "steps", "block"), rng.choice((1, 1, 2, 3)))
    about = rng.sample(ABOUT_PEOPLE, rng.choice((1, 1, 2)))
    # A few known names are not enough for many lines; the rest are made up, which also teaches to read names.
    share_made_up = rng.choice((0.0, 0.3, 1.0))
    people = words.names(rng, count) if share_made_up < 1 else []
    used = set(people)
    while len(people) < count:
        if (name := words.made_up_name(rng)) not in used:
            used.add(name)
            people.append(name)
    things: set[str] = set()
    facts: list[Fact] = []
    for who in people:
        form = rng.choice(forms)
        if form == "steps" and len(facts) + 2 <= count:
            facts += _two_steps(who, _thing(words, rng, things), rng, words)
        elif form == "put":
            facts.append(_put(who, _thing(words, rng, things), rng))
        elif form == "block":
            facts.append(_block(who, words, rng))
        elif form == "number":
            facts.append(_number_of_thing(_thing(words, rng, things), words, rng))
        else:
            facts.append(rng.choice(about)(who, words, rng))
        if len(facts) >= count:
            break
    return facts


@dataclass(frozen=True)
class Context:
    """The text of the lines and stories, its facts in the order of the text, and the tokens before each."""

    text: str
    facts: list[Fact]
    starts: list[int]
    num_tokens: int


def make_context(world: World, rng: Random, num_tokens: int) -> Context:
    """Lines and runs of story sentences in random order, just under that many tokens."""
    density = rng.choice((1.0, rng.uniform(0.3, 0.9), rng.uniform(0.15, 0.5)))
    glue = "\n" if rng.random() < 0.75 else " "
    # A line is ten to sixteen tokens; what is made too much is not used.
    facts = make_facts(world.words, rng, max(3, min(MAX_LINES, int(density * num_tokens / 9))))
    blocks: list[tuple[str, Fact | None]] = []
    left = num_tokens
    for fact in facts:
        size = world.count(fact.line + glue)
        if size > left - (1 - density) * num_tokens and len(blocks) >= 3:
            break
        blocks.append((fact.line, fact))
        left -= size
    used = {fact for _, fact in blocks if fact}
    while left > 30:
        story = world.story(rng, 600)
        whole = [s for s in story.sentences if s.count('"') % 2 == 0]
        at = rng.randrange(len(whole))
        run = whole[at : at + rng.randrange(1, 6)]
        while run and (size := world.count(" ".join(run) + glue)) > left:
            run.pop()
        if run:
            blocks.append((" ".join(run), None))
            left -= size
    rng.shuffle(blocks)
    found, starts, position = [], [], 0
    for text, fact in blocks:
        if fact and (fact.before is None or fact.before in used):
            found.append(fact)
            starts.append(position)
        position += world.count(text + glue)
    return Context(glue.join(text for text, _ in blocks), found, starts, position)


FOLLOW_UPS = ("And of {}?", "And {}?", "What about {}?", "And that of {}?", "Now {}.")


def ask(fact: Fact, rng: Random, before: Fact | None = None) -> Exchange:
    """A question; behind one of the same kind a short one is enough."""
    asked = rng.choice(fact.questions)
    if before and fact.kind and fact.kind == before.kind and rng.random() < 0.7:
        asked = rng.choice(FOLLOW_UPS).format(fact.key)
    return Exchange(asked, fact.thought, fact.answer, fact.items)


def _ask_missing(world: World, context: Context, rng: Random) -> Exchange:
    name = next(n for n in iter(lambda: world.words.made_up_name(rng), "") if n not in context.text)
    asked = rng.choice((f"What is the code of {name}?", f"Where is {name}?", f"How old is {name}?"))
    return Exchange(
        asked, f"I look for {name}. I do not find a line.", f"The text does not say it about {name}.", (name,)
    )


def recall(world: World, rng: Random, max_tokens: int) -> Draft:
    """A context of up to that many tokens and one to twelve questions, their lines spread evenly over it."""
    num_questions = rng.choice((1, 2, 3, 4)) if max_tokens < 1024 else rng.choice((1, 3, 4, 6, 8, 12))
    room = max_tokens - 60 - 35 * num_questions
    # Evenly on a log scale: short ones teach the act, long ones the reach; more of those where there is room.
    part = max(rng.uniform(0.15, 1.0) for _ in range(1 if max_tokens < 2048 else 2))
    num_tokens = int(80 * (max(room, 100) / 80) ** part)
    context = make_context(world, rng, num_tokens)
    chosen = rng.sample(context.facts, min(num_questions, len(context.facts)))
    if rng.random() < 0.4:
        chosen.sort(key=lambda fact: fact.kind)
    asked = [ask(fact, rng, before) for fact, before in zip(chosen, [None, *chosen], strict=False)]
    if rng.random() < 0.07:
        asked[-1] = _ask_missing(world, context, rng)
    return Draft((_first(context, asked[0], rng), *asked[1:]))


def _first(context: Context, question: Exchange, rng: Random) -> Exchange:
    intro = rng.choice(INTROS)
    user = f"{intro}\n\n{context.text}\n\n{question.user}"
    roll = rng.random()
    if roll < 0.1:
        user = f"{question.user} Look for it here.\n\n{context.text}"
    elif roll < 0.25:
        user = f"{context.text}\n\n{question.user}"
    return Exchange(user, question.thought, question.answer, question.items)
