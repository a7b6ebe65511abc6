"""What the model does not know: open questions of every kind, and an honest answer with an example."""

from random import Random

from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import clip, quoted
from recipes.tiny.values import CURRENCIES, LANGUAGES, city, date, made_up, noun, person, title
from recipes.tiny.words import row
from recipes.tiny.world import World

HONEST = (
    "I do not know that. I am a very small model.",
    "I do not know. I am a very small model and know little of the world.",
    "That I do not know: I am only a very small model.",
    "I am sorry, I do not know that. I am a very small model.",
)
HONEST_TASK = (
    "I cannot do that. I am a very small model.",
    "That is too hard for me: I am a very small model.",
    "I am sorry, I cannot do that. I am a very small model.",
)
# Few and fixed: the likeliest words of many at random would make no sense.
EXAMPLES = (
    "But I can do sums: ask me what is 47 + 38.",
    "I can do sums. Try: What is 314 x 6?",
    "I can tell a story: ask me for one with the words rain, door and blue.",
    "I can sort words: ask me to sort pear, apple and plum.",
    "I can spell: ask me how to spell elephant.",
    "I can read what you write. Try: Tom has a kite. What does Tom have?",
    "Ask me for a short story about a dog instead.",
)
FIELDS = row(
    "physics politics law chemistry history biology geography philosophy economics medicine astronomy music "
    "art religion football tennis chess cooking fashion computers software math geometry algebra grammar"
)
TOPICS = row(
    "gravity evolution democracy inflation electricity photosynthesis lightning magnetism relativity algebra "
    "capitalism climate volcanoes earthquakes vaccines bacteria viruses atoms molecules planets galaxies "
    "dinosaurs rockets engines computers internet blockchain bitcoin taxes insurance mortgages stocks diets "
    "vitamins cancer diabetes allergies migraines sleep dreams memory language poetry opera jazz painting "
    "sculpture architecture bridges tunnels satellites radios televisions batteries lasers microscopes"
)
ROLES = row(
    "president king queen mayor leader founder owner author inventor director captain coach winner boss "
    "painter composer discoverer builder champion minister emperor pope actor writer editor"
)
_PLACES = row(
    "France Japan Peru Kenya Canada Spain Egypt Norway India Brazil Mexico Germany Italy China Russia Poland "
    "Sweden Finland Greece Turkey Iran Iraq Chile Cuba Ghana Nigeria Ethiopia Morocco Vietnam Thailand Korea "
    "England Scotland Ireland Wales Texas Alaska California Florida Africa Europe Asia Australia America"
)
_HELD_OUT_PLACES = row(
    "Portugal Hungary Austria Belgium Denmark Iceland Bolivia Ecuador Uganda Nepal Utah Ohio"
)
QUESTIONS = (
    *("What is the capital of {place}?", "Which city is the capital of {place}?", "capital of {place}"),
    *(
        "Who is the {role} of {place}?",
        "Who was the first {role} of {place}?",
        "Who was the {role} of {title}?",
    ),
    *("Who wrote {title}?", "Who painted {title}?", "Who invented the {noun}?", "Who discovered {topic}?"),
    *("How many people live in {city}?", "What is the population of {place}?", "Where is {city}?"),
    *("When was {person} born?", "When did {person} die?", "Who is {person}?", "What did {person} do?"),
    *("When did {topic} begin?", "In which year was {title} made?", "What happened in {year}?"),
    *("What happened on {date}?", "What is the weather in {city}?", "Will it rain tomorrow in {city}?"),
    *("What is the news about {topic}?", "What is the price of a {noun}?", "How much does a {noun} cost?"),
    *("How far is it to {city}?", "How far is the {noun} from {city}?", "How tall is {title}?"),
    *(
        "How old is {person}?",
        "How fast can a {noun} go?",
        "How heavy is a {noun}?",
        "How long does a {noun} live?",
    ),
    *("What is the highest mountain in {place}?", "What is the longest river of {place}?"),
    *(
        "Which language do they speak in {place}?",
        "What do people eat in {place}?",
        "Is {place} bigger than {city}?",
    ),
    *(
        "How does a {noun} work?",
        "How does {topic} work?",
        "Why is {topic} important?",
        "Why do we need {topic}?",
    ),
    *("Explain {topic}.", "Explain {topic} to me.", "Explain to me how {topic} works", "What is {topic}?"),
    *(
        "What is a {noun}?",
        "What does {noun} mean?",
        "What are {topic}?",
        "Define {topic}.",
        "What is {field}?",
    ),
    *(
        "Why is the {noun} {noun2}?",
        "Why do {noun}s {noun2}?",
        "What causes {topic}?",
        "How do I learn {field}?",
    ),
    *("What do you know about {field}?", "What do you know about {place}?", "Tell me about {topic}."),
    *("Tell me about {place}.", "Tell me something about {person}.", "Tell me the history of {place}."),
    *("What is the meaning of life?", "What is the best {noun}?", "Which {noun} should I buy?"),
    *(
        "Who won the {noun} cup in {year}?",
        "Who is the best {role} in the world?",
        "Who will win the election?",
    ),
    *(
        "How many {noun}s are there in the world?",
        "How many bones does a {noun} have?",
        "What is {noun} made of?",
    ),
    *(
        "What is the chemical formula of {noun}?",
        "What is the boiling point of {noun}?",
        "Is {noun} healthy?",
    ),
    *("What are the symptoms of {topic}?", "How can I cure {topic}?", "My {noun} hurts. What should I do?"),
    *(
        "How do I fix my {noun}?",
        "How do I cook {noun}?",
        "How do I make a {noun}?",
        "How do I get to {city}?",
    ),
    *(
        "What should I do in {city}?",
        "Can you recommend a hotel in {city}?",
        "Is it safe to travel to {place}?",
    ),
    *(
        "What time is it in {city}?",
        "What is today's date?",
        "How is {company} doing?",
        "Who founded {company}?",
    ),
    *("What is the difference between {noun} and {noun2}?", "Which is better, {noun} or {noun2}?"),
    *(
        "Can a {noun} {noun2}?",
        "Do {noun}s like {noun2}?",
        "Are {noun}s dangerous?",
        "Where do {noun}s live?",
    ),
    *("What is the speed of light?", "How big is the universe?", "What is the square root of {number}?"),
    *("What is {number} in {currency}?", "What is {percent}% of {number}?", "What is the plot of {title}?"),
    *("What is your opinion on {topic}?", "What do you think about {person}?", "Should we ban {topic}?"),
    *("what is the capital of {place}", "who is {person}", "tell me about {topic}", "how does {topic} work"),
)
TASKS = (
    *(
        "Write a program that sorts {noun}s.",
        "Write a Python function for {topic}.",
        "Write code to read a {noun}.",
    ),
    *(
        "Translate {noun} to {language}.",
        'Translate "{title}" into {language}.',
        "How do you say {noun} in {language}?",
    ),
    *("Write an essay about {topic}.", "Write a report on {place}.", "Give me a summary of {title}."),
    *(
        "Solve x^2 + {number}x = {percent}.",
        "Solve the equation {percent}x + 3 = {number}.",
        "Prove that {topic} is true.",
    ),
    *(
        "Plan a trip to {city} for me.",
        "Book a flight to {city}.",
        "Find a cheap {noun} for me.",
        "Call {person}.",
    ),
    *("Draw a {noun}.", "Show me a picture of {city}.", "Play some music.", "Search the web for {topic}."),
    *(
        "Give me advice about {topic}.",
        "Help me with my {field} homework.",
        "Teach me {language}.",
        "Teach me {field}.",
    ),
    *(
        "Make a business plan for {company}.",
        "Compare {place} and {city}.",
        "Rate my {noun}.",
        "Fix this {language} text.",
    ),
)


def skill_example(rng: Random) -> str:
    """Something the model can do, with an example to try."""
    return rng.choice(EXAMPLES)


def _fill(form: str, world: World, rng: Random) -> str:
    places = _HELD_OUT_PLACES if world.words.held_out else _PLACES
    values = {
        **{"place": rng.choice(places) if rng.random() < 0.7 else made_up(world, rng).capitalize()},
        **{"role": rng.choice(ROLES), "title": title(world, rng), "noun": noun(world, rng)},
        **{
            "noun2": noun(world, rng),
            "topic": rng.choice(TOPICS) if rng.random() < 0.6 else noun(world, rng),
        },
        **{"city": city(world, rng), "person": person(world, rng), "year": rng.randrange(1200, 2030)},
        **{
            "date": date(world, rng),
            "field": rng.choice(FIELDS),
            "company": made_up(world, rng).capitalize(),
        },
        **{
            "number": rng.randrange(2, 5000),
            "percent": rng.randrange(2, 99),
            "language": rng.choice(LANGUAGES),
        },
        "currency": rng.choice(CURRENCIES),
    }
    return form.format(**values)


def open_question(world: World, rng: Random) -> tuple[str, bool]:
    """A question about the world, and whether it asks for something to be done."""
    roll = rng.random()
    if roll < 0.5:
        return _fill(rng.choice(QUESTIONS), world, rng), False
    if roll < 0.65:
        return _fill(rng.choice(TASKS), world, rng), True
    if roll < 0.78:
        asked = rng.choice(rng.choice(world.corpus["fairytale_qa"])["qa"])["q"].strip()
        return asked[:1].upper() + asked[1:], False
    if roll < 0.90:
        return rng.choice(world.corpus["schema_guided_dialogue"])["turns"][0], True
    turns = [
        t for t in rng.choice(world.corpus["self_dialogue"])["turns"] if t.endswith("?") and 20 < len(t) < 120
    ]
    return (rng.choice(turns), False) if turns else (_fill(rng.choice(QUESTIONS), world, rng), False)


def refusal(world: World, rng: Random) -> Exchange:
    """One honest sentence and one example of what it can do."""
    asked, is_task = open_question(world, rng)
    said = quoted(clip(asked, 15))
    thought = f"The user asks: {said} " + (
        "This is no skill of mine. I say so."
        if is_task
        else "This is about the world. I do not know it. I say so."
    )
    answer = f"{rng.choice(HONEST_TASK if is_task else HONEST)} {skill_example(rng)}"
    return Exchange(asked, thought, answer)


def unknown(world: World, rng: Random, max_tokens: int) -> Draft:
    return Draft(tuple(refusal(world, rng) for _ in range(rng.choice((1, 1, 1, 2)))))
