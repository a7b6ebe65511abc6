"""How call tags and values are spelled, and where they begin in a text. Knows nothing of what calls mean."""

import json
import re
from dataclasses import dataclass
from typing import Any

from dsv4.text.tokenizer import DSML, END_THINK, STOP_TOKENS, THINK

# Inside the parser each mark is one lone surrogate, which no text can hold: lookalikes stay text.
DSML_CODE, THINK_CODE, END_THINK_CODE = "\ud800", "\ud801", "\ud802"
CODES = {DSML: DSML_CODE, THINK: THINK_CODE, END_THINK: END_THINK_CODE}
_TEXTS = {ord(code): text for text, code in CODES.items()}
_NO_TEXTS = dict.fromkeys(_TEXTS, None)
MARKS = re.compile("(" + "|".join(map(re.escape, (*STOP_TOKENS, *CODES))) + ")")

# What ends a run of text, and the ends of a text that may be the beginning of that.
EVENT = re.compile(f"(?:\n\n)?<{DSML_CODE}|</{DSML_CODE}|[{DSML_CODE}{THINK_CODE}{END_THINK_CODE}]")
EVENT_START = re.compile(r"(?:\n{1,2}(?:</?)?|</?)?\Z")
END_PARAMETER, END_INVOKE = f"</{DSML_CODE}parameter>", f"</{DSML_CODE}invoke>"

# A tag that has not closed within this many characters is text, so that little is ever held back.
_MAX_TAG = 1024
_INSIDE = f'(?:[^"<>{DSML_CODE}-{END_THINK_CODE}]|"[^"{DSML_CODE}-{END_THINK_CODE}]*")*+'
_TAG = re.compile(f"<(/?){DSML_CODE}({_INSIDE})>")
_TAG_START = re.compile(f'</?|</?{DSML_CODE}{_INSIDE}(?:"[^"{DSML_CODE}-{END_THINK_CODE}]*)?')
_BLOCK = re.compile(r"\s*(?:tool_calls|toolcalls|tool)\s*")
_INVOKE = re.compile(r'\s*invoke\s+name="([^"]+)"\s*')
_PARAMETER = re.compile(r'\s*parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*')


@dataclass(frozen=True)
class Tag:
    kind: str  # block, /block, invoke, /invoke, parameter; "" for what is no tag
    end: int = 0
    name: str = ""
    is_string: bool | None = None


def tag_at(text: str, at: int) -> Tag | None:
    """The tag that begins at `at`, or None while more text is needed to tell."""
    text = text[at : at + _MAX_TAG]
    found = _TAG.match(text)
    if found is None:
        return None if len(text) < _MAX_TAG and _TAG_START.fullmatch(text) else Tag("")
    slash, inside = found.groups()
    end = at + found.end()
    if _BLOCK.fullmatch(inside):
        return Tag(slash + "block", end)
    if slash:
        return Tag("/invoke" if inside.strip() == "invoke" else "", end)
    if invoke := _INVOKE.fullmatch(inside):
        return Tag("invoke", end, invoke[1])
    if parameter := _PARAMETER.fullmatch(inside):
        return Tag("parameter", end, parameter[1], None if parameter[2] is None else parameter[2] == "true")
    return Tag("")


def shown(coded: str) -> str:
    """The text with its marks spelled out."""
    return coded.translate(_TEXTS)


def unmarked(coded: str) -> str:
    """The text without its marks."""
    return coded.translate(_NO_TEXTS)


def overlap(text: str, patterns: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that is a beginning of a pattern, but not all of it."""
    longest = max((len(pattern) - 1 for pattern in patterns), default=0)
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[len(text) - count :]
        if any(len(pattern) > count and pattern.startswith(tail) for pattern in patterns):
            return count
    return 0


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_json(text: str) -> tuple[bool, Any]:
    """Whether the text is JSON, and its value with the numbers left as text: they may be of any size."""
    try:
        return True, json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
