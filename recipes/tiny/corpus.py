"""Reads the collection: cleaning, and the 2 % of every source that is never trained on. Knows no markup."""

import json
import lzma
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.errors import ConfigError
from recipes.tiny.words import HELD_OUT_NAMES, Split, stable_hash

FIELDS = {
    "tinystories_subset": ("text", "simple"),
    "fables_open_models": ("text", "simple", "elements"),
    "open_storybooks": ("text", "simple", "title"),
    "childrens_books_pd": ("text", "simple", "book"),
    "fairytale_qa": ("title", "sections", "qa"),
    "chitchat_smalltalk": ("persona", "questions", "text"),
    "synthetic_persona_chat": ("p1", "p2", "turns"),
    "schema_guided_dialogue": ("services", "turns"),
    "self_dialogue": ("topic", "turns"),
    "gsm8k_train": ("question", "reasoning", "answer", "simple"),
    "wordnet_definitions": ("word", "pos", "definition", "examples"),
}
HELD_OUT_ONE_IN = 50

_NAMES = re.compile(rf"\b({'|'.join(sorted(HELD_OUT_NAMES))})\b")
_GLUED = re.compile(r"([a-z][.!?])([A-Z])")
_NO_STORY = re.compile(r"wordless|illustrat|this book|level \d|copyright|translat", re.IGNORECASE)
_CRUEL = re.compile(
    r"\b(kill|murder|throat|hang|hung|blood|behead|burn|stab|slay|slain|dead|die|devil|hell)", re.I
)
_UNSUITED = re.compile(
    r"editorial =|marr(y|ied)|wedding|husband|wife|spouse|honest woman|girlfriend|boyfriend|soulmate|"
    r"dat(e|ing)\b|sexy|gender|queer|trans|cisg|bi-?sexual|straight|\bgay\b|lesbian|in love|love (you|u)\b|"
    r"crush|steady|single|my heart|pissed|damn|hell\b|\bdie\b|\bkill|suicid|drunk|beer|wine|siri|cortana|"
    r"alexa|google|bixby|beautiful to you|seeing (some|any)|going out|relationship|available\?|gangst|"
    r"refer to you|(gorgeous|hot|cute|stunning|pretty|beautiful|handsome|attractive)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Corpus:
    """The cleaned records of one split, by source, and how many were left out for holding a held-out name."""

    split: Split
    records: dict[str, list[dict[str, Any]]]
    num_with_held_out_names: int

    def __getitem__(self, source: str) -> list[dict[str, Any]]:
        return self.records[source]


def is_held_out(line: str) -> bool:
    """By a stable hash of the record's line, so that no order of reading and no added record changes it."""
    return stable_hash(line.rstrip("\n")) % HELD_OUT_ONE_IN == 0


def is_held_out_question(question: str) -> bool:
    """Small talk has few answers and many ways to ask: there 2 % of the ways are held out instead."""
    return stable_hash(f"question:{question}") % HELD_OUT_ONE_IN == 0


def read_corpus(folder: Path, split: Split) -> Corpus:
    """Reads every file of the collection; a missing file or field is an error that names it."""
    missing = [f"{name}.jsonl.xz" for name in FIELDS if not (folder / f"{name}.jsonl.xz").is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}; expected the collection's {len(FIELDS)} files; "
            "check --corpus"
        )
    records: dict[str, list[dict[str, Any]]] = {}
    num_named = 0
    for source, fields in FIELDS.items():
        kept = []
        with lzma.open(folder / f"{source}.jsonl.xz", "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                by_question = source == "chitchat_smalltalk"
                if not by_question and is_held_out(line) != (split == "heldout"):
                    continue
                # The plain search is ten times as fast and nearly always settles it.
                if split == "train" and any(name in line for name in HELD_OUT_NAMES) and _NAMES.search(line):
                    num_named += 1
                    continue
                record = json.loads(line)
                if absent := [name for name in fields if name not in record]:
                    raise ConfigError(
                        f"{source} line {number} has no {', '.join(absent)}; expected {', '.join(fields)}; "
                        "the file is of another collection"
                    )
                if (cleaned := _cleaned(source, record, split)) is not None:
                    kept.append(cleaned)
        records[source] = kept
    return Corpus(split, records, num_named)


def _cleaned(source: str, record: dict[str, Any], split: Split) -> dict[str, Any] | None:
    """The record as it is used, or None for one that would teach bad manners or bad layout."""
    if source == "chitchat_smalltalk":
        fitting = [q for q in record["questions"] if not _UNSUITED.search(q)]
        asked = [q for q in fitting if is_held_out_question(q) == (split == "heldout")]
        mostly_unsuited = 2 * len(fitting) < len(record["questions"]) or "a name" in record["text"]
        return {**record, "questions": asked} if asked and not mostly_unsuited else None
    if source == "open_storybooks" and (_NO_STORY.search(record["text"]) or len(record["text"]) < 200):
        return None
    if "text" in record:
        return {**record, "text": unwrapped(record["text"])}
    if source == "fairytale_qa":
        sections = {key: unwrapped(text) for key, text in record["sections"].items()}
        asked = [item for item in record["qa"] if not _CRUEL.search(item["q"] + " " + item["a"])]
        return {**record, "sections": sections, "qa": asked} if asked else None
    return record


def unwrapped(text: str) -> str:
    """Joins lines that were broken to fit a page; paragraphs and lines that end a sentence stay."""
    text = _GLUED.sub(r"\1 \2", text.strip())
    paragraphs = [[line.strip() for line in p.split("\n") if line.strip()] for p in text.split("\n\n")]
    inner = [line for lines in paragraphs for line in lines[:-1]]
    broken = sum(line[-1] not in ".!?\"')" for line in inner)
    glue = " " if 5 * broken > len(inner) else "\n"
    return "\n\n".join(glue.join(lines) for lines in paragraphs if lines)
