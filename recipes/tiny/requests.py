"""Stories on request: what the user asks for is taken from the story that will be the answer."""

from random import Random

from recipes.tiny.reading import questions_about
from recipes.tiny.records import Draft, Exchange
from recipes.tiny.stories import Story, clip, listed, words_to_request
from recipes.tiny.words import ANIMALS, OBJECTS, is_held_out_word
from recipes.tiny.world import World

# (wording, its end mark); "{short}" becomes short, little, long or nothing, as the story is.
OPENERS = (
    ("Write a {short}story", "."),
    ("Tell me a {short}story", "."),
    ("Please tell me a {short}story", "."),
    ("Can you tell me a {short}story", "?"),
    ("Could you write a {short}story", "?"),
    ("I want to hear a {short}story", "."),
    ("I would like a {short}story", "."),
    ("Make up a {short}story", "."),
    ("Give me a {short}story", "."),
    ("Write me a {short}story", "."),
    ("Tell me a bedtime story", "."),
    ("Tell a {short}story", "."),
    ("Will you tell me a {short}story", "?"),
    ("Please write a {short}story for a child", "."),
    ("Write a {short}tale", "."),
    ("My child wants a {short}story", "."),
    ("I need a {short}story", "."),
    ("Do you know a {short}story", "?"),
    ("Let me hear a {short}story", "."),
    ("Can I have a {short}story", "?"),
    ("How about a {short}story", "?"),
    ("Hi! Please tell me a {short}story", "."),
    ("Think of a {short}story", "."),
    ("Could I hear a {short}bedtime story", "?"),
    ("Write down a {short}story", "."),
    ("It is bedtime. Tell me a {short}story", "."),
)
FABLE_OPENERS = (("Tell me a fable", "."), ("Write a fable", "."), ("Can you tell me a fable", "?"))
# Each wish as words within the first sentence, or as a sentence after it.
WISHES = {
    "words": (
        (
            " with the words {}",
            " that uses the words {}",
            " using the words {}",
            " that has the words {} in it",
        ),
        (
            "Use the words {}.",
            "Please use these words: {}.",
            "It must have the words {}.",
            "The words are {}.",
        ),
    ),
    "about": (
        (" about {}", " about {}", " with {} in it"),
        ("It should be about {}.", "Make it about {}.", "The hero is {}."),
    ),
    "ending": (
        (" with a happy ending", " that ends well"),
        ("It should end well.", "I want a happy ending.", "Please give it a happy ending."),
    ),
    "lesson": (
        (" that teaches that {}", " with the lesson that {}"),
        ("It should teach that {}.", "The lesson is that {}."),
    ),
    "place": ((" set in {}", " that happens in {}"), ("It happens in {}.",)),
    "title": ((' called "{}"', ' with the title "{}"'), ('Call it "{}".',)),
}
NOTES = {
    "words": "I need the words {}.",
    "about": "The story is about {}.",
    "ending": "It ends well.",
    "lesson": "The lesson is that {}.",
    "place": "It happens in {}.",
    "title": 'The title is "{}".',
}
CONTINUE = (
    "Continue this story:\n\n{}",
    "Go on with this story.\n\n{}",
    "How does this story go on?\n\n{}",
    "Please finish this story for me:\n\n{}",
    "{}\n\nWhat happens next?",
    "Here is the start of a story. Write the rest.\n\n{}",
)
THANKS = (
    "Thank you!",
    "Thanks, that was nice.",
    "I liked it.",
    "That was a good story.",
    "Nice story!",
    "Wow!",
)
WELCOME = (
    "You are welcome! Do you want to hear another story?",
    "I am glad you liked it! Shall I tell you one more?",
    "Thank you for listening!",
)


def story_request(world: World, rng: Random, max_tokens: int) -> Draft:
    """A wish and its story; now and then a question or thanks after it."""
    story = world.story(rng, max_tokens - 160)
    roll = rng.random()
    if roll < 0.1 and len(story.sentences) >= 8:
        return Draft((_continuation(story, rng),))
    first = _with_first_sentence(story, rng) if roll < 0.15 else _wish(world, story, rng)
    if rng.random() < 0.8:
        return Draft((first,))
    if rng.random() < 0.4:
        thanks = Exchange(rng.choice(THANKS), "The user liked the story. I am glad.", rng.choice(WELCOME))
        return Draft((first, thanks))
    return Draft((first, *questions_about(story, rng, 1)))


def possible_wishes(world: World, story: Story, rng: Random) -> dict[str, str]:
    """What may be asked so that this story answers it, by kind of wish."""
    found: dict[str, str] = {}
    if words := words_to_request(story, world.requestable, rng, world.words.held_out):
        found["words"] = listed(words)
    topics = [t for t in (*ANIMALS, *OBJECTS) if story.counts[t] >= 3 and story.has_thing(t)]
    topics = [t for t in topics if world.words.held_out or not is_held_out_word(t)]
    if story.hero_phrase and (not topics or rng.random() < 0.7):
        found["about"] = story.hero_phrase
    elif topics:
        topic = rng.choice(topics)
        found["about"] = f"{'an' if topic[0] in 'aeiou' else 'a'} {topic}"
    elif story.hero:
        found["about"] = story.hero
    if story.ends_well:
        found["ending"] = ""
    if story.lesson:
        found["lesson"] = story.lesson
    if story.setting:
        found["place"] = story.setting
    if 3 < len(story.title) < 40:
        found["title"] = story.title
    return found


def wish_text(wishes: dict[str, str], story: Story, rng: Random) -> str:
    """The request: one opener, at most two wishes inside it, the others behind."""
    short = (
        rng.choice(("short ", "short ", "little ", ""))
        if len(story.text) < 1100
        else rng.choice(("", "long "))
    )
    opener, mark = rng.choice(FABLE_OPENERS if story.elements and rng.random() < 0.5 else OPENERS)
    inside, behind = "", []
    for wish in sorted(wishes, key=lambda name: name != "about"):
        within, after = WISHES[wish]
        value = wishes[wish]
        if wish == "words" and rng.random() < 0.5:
            value = listed(value.replace(" and ", ", ").split(", "), '"')
        # "a story about a dog that ends well": only these forms are clear behind another wish.
        if inside:
            within = tuple(
                form for form in within if form.startswith((" with the words", " with a happy", " using"))
            )
        if within and rng.random() < 0.7 and inside.count(" with ") == 0:
            inside += rng.choice(within).format(value)
        else:
            behind.append(rng.choice(after).format(value))
    rng.shuffle(behind)
    return " ".join([opener.format(short=short) + inside + mark, *behind])


def _wish(world: World, story: Story, rng: Random) -> Exchange:
    possible = possible_wishes(world, story, rng)
    wanted = [w for w in possible if w == "words" and rng.random() < 0.6]
    others = [w for w in possible if w != "words"]
    num_others = rng.choices((0, 1, 2), weights=(4, 5, 2) if wanted else (1, 6, 2))[0]
    wanted += rng.sample(others, min(num_others, len(others)))
    rng.shuffle(wanted)
    wishes = {wish: possible[wish] for wish in wanted}
    items = tuple(wishes["words"].replace(" and ", ", ").split(", ")) if "words" in wishes else ()
    user = wish_text(wishes, story, rng)
    return Exchange(user, thought_of(wishes, story), story.text, items)


def thought_of(wishes: dict[str, str], story: Story) -> str:
    """The wishes, the hero and an outline that the story then follows."""
    notes = [
        NOTES[wish].format(value.replace(" and ", ", ")) for wish, value in wishes.items() if wish == "words"
    ]
    notes += [NOTES[wish].format(value) for wish, value in wishes.items() if wish != "words"]
    if story.hero and story.hero not in wishes.get("about", ""):
        notes.append(f"The hero is {story.hero}.")
    start, middle, end = story.outline
    # Where words are asked for, the outline says how each will come in: what is foretold is kept.
    words = wishes["words"].replace(" and ", ", ").split(", ") if "words" in wishes else []
    uses = [f"{word}: {use}" for word in words if (use := story.use_of(word))]
    between = uses or ([f"Middle: {middle}"] if middle else [])
    return " ".join([*notes, f"Start: {start}", *between, f"End: {end}"])


def _with_first_sentence(story: Story, rng: Random) -> Exchange:
    start = story.sentences[0]
    user = rng.choice(
        (
            f'Write a story that starts with "{start}"',
            f"Tell me a story. It starts like this: {start}",
            f"The first sentence of my story is: {start} Tell me the whole story.",
        )
    )
    _, middle, end = story.outline
    return Exchange(user, f"The start is given. Middle: {middle} End: {end}", story.text)


def _continuation(story: Story, rng: Random) -> Exchange:
    """Cut at a sentence in the first half; the layout of the rest is kept."""
    num_given = rng.randrange(2, 1 + len(story.sentences) // 2)
    at = 0
    for sentence in story.sentences[:num_given]:
        at = story.text.index(sentence, at) + len(sentence)
    given, rest = story.text[:at], story.text[at:].strip()
    about = f"The story is about {story.hero}. " if story.hero else ""
    following, end = clip(story.sentences[num_given]), story.outline[2]
    return Exchange(rng.choice(CONTINUE).format(given), f"{about}Next: {following} End: {end}", rest)
