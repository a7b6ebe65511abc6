"""Trains the tiny model's byte-level BPE vocabulary, on the collection and a sample of the made-up tasks.

python -m recipes.tiny.tokenizer --corpus DIR --out tokenizer.json
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from dsv4.text.tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, THINK, USER, Tokenizer
from recipes.tiny.corpus import FIELDS, Corpus, read_corpus
from recipes.tiny.kinds import KINDS
from recipes.tiny.records import Record, joined
from recipes.tiny.world import World

VOCAB_SIZE = 4096
# In the order of their ids. The task tokens of V4 are left out: the tiny model knows no such task, and the
# engine then says so instead of feeding it an untrained token.
SPECIALS = (BOS, EOS, "<｜▁pad▁｜>", USER, ASSISTANT, THINK, END_THINK, DSML, LATEST_REMINDER)
# V4's three splits, except that V4 takes up to three digits together; here each digit is its own token.
SPLITS = (
    r"\p{N}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# How often a source counts towards the vocabulary, near its share of the training tokens and not of the
# collection's bytes, a third of which is about booking rooms and cars.
NUM_MADE = 150  # records of a kind, for each per cent of the tokens that it has
WEIGHTS = {"tinystories_subset": 3.0, "schema_guided_dialogue": 0.25, "gsm8k_train": 0.3}


def texts(source: str, record: dict[str, Any]) -> Iterator[str]:
    """Every text of a record that the model reads or writes."""
    if source == "fairytale_qa":
        yield from record["sections"].values()
        yield from (text for item in record["qa"] for text in (item["q"], item["a"]))
    elif source == "chitchat_smalltalk":
        yield from (*record["questions"], record["text"])
    elif source == "gsm8k_train":
        yield from (record["question"], record["reasoning"])
    elif source == "wordnet_definitions":
        yield from (record["word"], record["definition"], *record["examples"])
    elif "turns" in record:
        yield from (*record.get("p2", ()), *record["turns"])
    else:
        yield record["text"]


def _made(corpus: Corpus) -> Iterator[str]:
    """A sample of what is made by program, whose wordings are a third of what the model reads."""
    world = World.build(corpus, count=lambda text: len(text) // 3)
    rng = Random("dsv4 tiny tokenizer")
    for kind in KINDS:
        for _ in range(round(NUM_MADE * kind.share)):
            draft = kind.make(world, rng, 512)
            if kind.num_records is None:
                record = Record(kind.name, draft.exchanges, "", True, tools=draft.tools, schema=draft.schema)
                yield from (segment for segment in joined(record.segments) if isinstance(segment, str))
                continue
            # The answers of these kinds are texts of the collection and are counted there.
            yield from (text for exchange in draft.exchanges for text in (exchange.user, exchange.thought))


def _weighted(corpus: Corpus) -> Iterator[str]:
    for source in FIELDS:
        owed = 0.0
        for record in corpus[source]:
            owed += WEIGHTS.get(source, 1.0)
            for _ in range(int(owed)):
                yield from texts(source, record)
            owed -= int(owed)
    yield from _made(corpus)


def train(corpus: Corpus, vocab_size: int = VOCAB_SIZE) -> str:
    """The tokenizer.json of a vocabulary of that size, special tokens included; same input, same bytes."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        _weighted(corpus),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return bpe.to_str() + "\n"


def characters_per_token(tokenizer: Tokenizer, corpus: Corpus) -> dict[str, float]:
    """For each source and for `all`, each source counted by its size."""
    found: dict[str, float] = {}
    num_all = [0, 0]
    for source in FIELDS:
        counts = [0, 0]
        for record in corpus[source]:
            for text in texts(source, record):
                counts[0] += len(text)
                counts[1] += len(tokenizer.encode_text(text))
        num_all = [num_all[0] + counts[0], num_all[1] + counts[1]]
        if counts[1]:
            found[source] = counts[0] / counts[1]
    return {**found, "all": num_all[0] / max(num_all[1], 1)}


def main(arguments: list[str]) -> None:
    """Writes the file, then measures it on the held-out 2 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder with the collection's .jsonl.xz files"
    )
    parser.add_argument("--out", type=Path, required=True, help="the tokenizer.json to write")
    options = parser.parse_args(arguments)
    options.out.write_text(train(read_corpus(options.corpus, "train")), encoding="utf-8")
    tokenizer = Tokenizer.load(options.out)
    measured = characters_per_token(tokenizer, read_corpus(options.corpus, "heldout"))
    report = {"vocab_size": tokenizer.vocab_size, "held_out_characters_per_token": measured}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
