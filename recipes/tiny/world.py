"""What the generators draw from: one split of the collection and its words. Makes no record itself."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from dsv4.errors import ConfigError
from recipes.tiny.corpus import Corpus
from recipes.tiny.stories import (
    STORY_WEIGHTS,
    Story,
    plain_vocabulary,
    read_stories,
    requestable_words,
)
from recipes.tiny.words import Words

MIN_COMMON_WORDS = 12


@dataclass(frozen=True)
class World:
    """One split. `count` gives a text's tokens, so that records fit the row they are made for."""

    corpus: Corpus
    words: Words
    stories: list[Story]
    weights: list[int]  # cumulative, for drawing stories
    requestable: frozenset[str]
    vocabulary: frozenset[str]  # words that stories and books use often
    friendly: list[dict[str, Any]]  # small talk in the manner the model has by itself
    count: Callable[[str], int]

    @classmethod
    def build(cls, corpus: Corpus, count: Callable[[str], int], model: "World | None" = None) -> "World":
        """`model` is the world of the training split: a smaller one takes its counted words."""
        stories = read_stories(corpus)
        requestable = model.requestable if model else requestable_words(corpus, stories)
        vocabulary = model.vocabulary if model else plain_vocabulary(corpus)
        total, weights = 0, []
        for story in stories:
            total += STORY_WEIGHTS[story.source]
            weights.append(total)
        world = cls(
            corpus,
            Words(
                corpus.split,
                sorted(word for word in requestable if len(word) <= 9),
                sorted(word for word in vocabulary if 3 <= len(word) <= 9),
            ),
            stories,
            weights,
            requestable,
            vocabulary,
            [record for record in corpus["chitchat_smalltalk"] if record["persona"] == "friendly"],
            count,
        )
        world._check()
        return world

    def _check(self) -> None:
        """Every generator must find something to draw."""
        found = {
            "stories": len(self.stories),
            "friendly answers": len(self.friendly),
            **{source: len(records) for source, records in self.corpus.records.items()},
        }
        if empty := [name for name, count in found.items() if not count]:
            raise ConfigError(
                f"the {self.corpus.split} split has no {', '.join(empty)}; expected some of each; "
                "check --corpus"
            )
        if len(self.words.common) < MIN_COMMON_WORDS:
            raise ConfigError(
                f"the {self.corpus.split} split has {len(self.words.common)} plain words, expected at least "
                f"{MIN_COMMON_WORDS}; the collection is too small; check --corpus"
            )

    def story(self, rng: Random, max_tokens: int) -> Story:
        """A story that fits, mostly under other names; the row cuts it where twenty draws find none."""
        story = rng.choices(self.stories, cum_weights=self.weights)[0]
        # Three characters a token is below what any source measures, so this never lets a longer one through.
        for _ in range(20):
            if len(story.text) < 3 * max_tokens:
                break
            story = rng.choices(self.stories, cum_weights=self.weights)[0]
        if story.source == "tinystories_subset" and (self.words.held_out or rng.random() < 0.7):
            return story.renamed(rng, self.words.girls, self.words.boys)
        return story
