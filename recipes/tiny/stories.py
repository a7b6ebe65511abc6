"""What can be said about a story without understanding it: its hero, its words, its start, middle and end."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from recipes.tiny.corpus import Corpus
from recipes.tiny.words import BOYS, GIRLS, is_held_out_word, row

MIN_SIMPLE = 0.90  # share of common words; below it a small model learns rare words it cannot use
CLIP_WORDS = 12

_SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"']))(?<!Mr\.)(?<!Ms\.)(?<!Dr\.)(?<!St\.)(?<!Mrs\.)\s+(?=[\"'A-Z])"
)
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_NAME_INSIDE = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+\b")
_DESCRIBED = re.compile(
    r"\bthere (?:was|lived) (an?(?:,? [a-z]+){1,4}?)(?= named| called| who|\.| that| in | with| living| on )"
)
_RELATION = re.compile(r"\b(friend|sister|brother|mom|dad|mother|father|owner|neighbor)\b")
_TURN = re.compile(r"(But|Suddenly|Then|So|One day|However)\b")
_LESSON = re.compile(r"\blearn(?:ed|t) that ((?!he\b|she\b|they\b|it\b)[a-z][^.!?\"]{10,70})[.!]")
_SAID = re.compile(
    r"(?<![a-z], )\"([^\"]{4,80}[.!?,])\" ([A-Z][a-z]+) (?:said|asked|says|asks|shouted|cried)"
    r"(?=\.| as | and | to )"
)
_HAPPY = re.compile(
    r"\b(happy|happily|smil\w+|friends|laugh\w*|proud|love\w*|fun|glad|safe|hug\w*|together|thank\w*)\b"
)
_NOT_HAPPY = re.compile(r"\b(sad|never|cry|cried|died|dead|not|lost|alone|sorry|hurt|no more|gone)\b")
_NOT_HEROES = frozenset(
    row(
        "Mom Dad Mommy Daddy Mum Mummy Mama Papa Mother Father Grandma Grandpa Granny Mr Mrs Ms Miss Dr God "
        "Sir Lord King Queen Prince Princess Monday Tuesday Wednesday Thursday Friday Saturday Sunday "
        "Christmas The And But She He They It You We Yes No Oh Aunt Uncle One Once Then So What When Why How "
        "This That There Let Please Thank Hello Hi Hey Come Look Can Do Don Not My Your Our His Her I'm Okay "
        "Wow Who Where Are Is If Of In On At To A An English African Little Old Big"
    )
)


def sentences_of(text: str) -> list[str]:
    """The sentences in order, with no line break inside."""
    return [s.strip() for part in text.split("\n") for s in _SENTENCE_END.split(part) if s.strip()]


def clip(sentence: str, num_words: int = CLIP_WORDS) -> str:
    """The first words, marked `...` where something is left out."""
    words = sentence.split()
    return sentence if len(words) <= num_words else " ".join(words[:num_words]).rstrip(",;:") + " ..."


def quoted(sentence: str) -> str:
    """In quotation marks, those inside made single."""
    return '"' + sentence.strip('"').replace('"', "'") + '"'


def article(noun: str) -> str:
    """`a` or `an`, by spelling; the few silent letters that children's words have are listed."""
    vowel = noun[0].lower() in "aeiou" and not noun.lower().startswith(("uni", "use", "eu", "one"))
    return "an" if vowel or noun.lower().startswith(("hour", "honest", "heir")) else "a"


def listed(words: Iterable[str], quote: str = "") -> str:
    """`rain, door and blue`."""
    *head, last = [f"{quote}{word}{quote}" for word in words]
    return f"{', '.join(head)} and {last}" if head else last


@dataclass(frozen=True)
class Story:
    """A story and what its source tells about it."""

    text: str
    source: str
    title: str = ""
    elements: dict[str, str] = field(default_factory=dict)

    @cached_property
    def sentences(self) -> list[str]:
        return sentences_of(self.text)

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each word occurs, in lower case."""
        return Counter(word.lower() for word in _WORD.findall(self.text))

    @cached_property
    def plain_words(self) -> Counter[str]:
        """How often each word occurs that is written small: no names, no first words."""
        return Counter(word for word in _WORD.findall(self.text) if word.islower())

    @cached_property
    def hero(self) -> str | None:
        """Of the names that stand inside sentences the commonest, if used at least three times."""
        names = [n for n in dict.fromkeys(_NAME_INSIDE.findall(self.text)) if n not in _NOT_HEROES]
        best = max(names, key=lambda name: self.counts[name.lower()], default=None)
        return best if best and self.counts[best.lower()] >= 3 else None

    @cached_property
    def hero_phrase(self) -> str | None:
        """`a little girl named Lily`, `a big pink shark`; None where the hero is not introduced so."""
        if "character" in self.elements:
            return corrected_article(self.elements["character"])
        if self.hero:
            found = re.search(rf"\b(an?(?: [a-z]+){{1,3}}) (?:named|called) {self.hero}\b", self.text)
            if found and not _RELATION.search(found[1]):
                return f"{found[1]} named {self.hero}"
            for names, kind in ((GIRLS, "girl"), (BOYS, "boy")):
                if self.hero in names and re.search(rf"\b{kind}\b", self.text):
                    return f"a {kind} named {self.hero}"
            return None
        found = _DESCRIBED.search(" ".join(self.sentences[:2]))
        return found[1] if found else None

    @cached_property
    def outline(self) -> tuple[str, str, str]:
        """Start, middle and end, clipped: the first sentence, the first later turn, the last sentence."""
        later = self.sentences[1:-1]
        middle = next((s for s in later if _TURN.match(s)), later[len(later) // 2] if later else "")
        return clip(self.sentences[0]), clip(middle), clip(self.last)

    @property
    def last(self) -> str:
        """The last sentence that tells something."""
        return next(s for s in reversed(self.sentences) if s.strip('".!').lower() not in ("the end", "end"))

    @property
    def ends_well(self) -> bool:
        end = " ".join(self.sentences[-3:])
        return bool(_HAPPY.search(end)) and not _NOT_HAPPY.search(end)

    @property
    def lesson(self) -> str | None:
        if "teaching" in self.elements:
            return self.elements["teaching"]
        found = _LESSON.search(self.text)
        return found[1] if found else None

    @property
    def setting(self) -> str | None:
        setting = self.elements.get("setting", "").removesuffix(" where our story unfolds")
        return corrected_article(setting) if setting.startswith(("a ", "an ")) else None

    def sayings(self) -> list[tuple[str, str]]:
        """(who, what) for each first thing a named one says."""
        found: dict[str, str] = {}
        for said, who in _SAID.findall(self.text):
            if who not in _NOT_HEROES:
                found.setdefault(who, said if said[-1] in ".!?" else said[:-1] + ".")
        return list(found.items())

    def sentence_with(self, word: str) -> str | None:
        pattern = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
        return next((s for s in self.sentences if pattern.search(s)), None)

    def use_of(self, word: str) -> str:
        """The ten words around its first use, or nothing where it is only part of other words."""
        for sentence in self.sentences:
            words = sentence.split()
            for at, found in enumerate(words):
                if _WORD.findall(found.lower()) == [word]:
                    first = max(0, min(at - 6, len(words) - 10))
                    part = " ".join(words[first : first + 10])
                    return f"{'... ' * (first > 0)}{part}{' ...' * (first + 10 < len(words))}"
        return ""

    def has_thing(self, noun: str) -> bool:
        """Whether the word is used as a thing: `the old watch`, not `to watch`."""
        return bool(re.search(rf"\b(?:a|an|the|his|her) (?:[a-z]+ )?{noun}\b", self.text))

    def renamed(self, rng: Random, girls: list[str], boys: list[str]) -> "Story":
        """The same story with other names, girls' for girls': the hero is to be read, not remembered."""
        present = {word for word in _WORD.findall(self.text) if word[0].isupper()}
        changes: dict[str, str] = {}
        for known, choices in ((GIRLS, girls), (BOYS, boys)):
            free = [name for name in choices if name not in present]
            old = sorted(present & set(known))
            changes |= dict(zip(old, rng.sample(free, min(len(old), len(free))), strict=False))
        if not changes:
            return self
        pattern = re.compile(rf"\b({'|'.join(changes)})\b")
        return Story(pattern.sub(lambda found: changes[found[1]], self.text), self.source, self.title)


def corrected_article(phrase: str) -> str:
    """`a ethical fish` -> `an ethical fish`."""
    head, _, rest = phrase.partition(" ")
    return f"{article(rest)} {rest}" if head in ("a", "an") and rest else phrase


# A source's stories count so many times when one is drawn.
STORY_WEIGHTS = {"tinystories_subset": 3, "fables_open_models": 1, "open_storybooks": 1}


def read_stories(corpus: Corpus) -> list[Story]:
    """Every plain story; of a source's others the hard ones are left out."""
    found = []
    for source in STORY_WEIGHTS:
        for record in corpus[source]:
            story = Story(record["text"], source, record.get("title", ""), record.get("elements", {}))
            if record["simple"] >= MIN_SIMPLE and len(story.sentences) >= 5:
                found.append(story)
    return found


def requestable_words(corpus: Corpus, stories: list[Story]) -> frozenset[str]:
    """Content words in 0.4 to 6 % of the small children's stories: rare enough to ask for, common enough to
    have been learned."""
    num_with: Counter[str] = Counter()
    simple = [story for story in stories if story.source == "tinystories_subset"]
    for story in simple:
        num_with.update(story.plain_words.keys())
    known = {record["word"] for record in corpus["wordnet_definitions"]}
    low, high = 0.004 * len(simple), max(0.06 * len(simple), 2)
    return frozenset(w for w, n in num_with.items() if low <= n <= high and len(w) > 2 and w in known)


def plain_vocabulary(corpus: Corpus) -> frozenset[str]:
    """Words used at least ten times in stories and books."""
    counts: Counter[str] = Counter()
    for source in ("tinystories_subset", "open_storybooks", "childrens_books_pd"):
        for record in corpus[source]:
            counts.update(re.findall("[a-z]+", record["text"]))
    return frozenset(word for word, count in counts.items() if count >= 10)


def words_to_request(story: Story, allowed: frozenset[str], rng: Random, held_out: bool) -> list[str]:
    """Three of its words in the order of the story, best those used twice; none if it has too few."""
    found = [w for w in story.plain_words if w in allowed and (held_out or not is_held_out_word(w))]
    if len(found) < 3:
        return []
    often = [word for word in found if story.plain_words[word] > 1]
    pool = often if len(often) >= 3 and rng.random() < 0.7 else found
    chosen = set(rng.sample(pool, 3))
    return [word for word in found if word in chosen]
