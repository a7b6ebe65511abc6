"""Short ASCII texts to ids, word by word. Splitting a text is most of the library's work, and words recur."""

import re
from typing import Any

import tokenizers

# What V4 splits words by, its digits apart, which are taken first: one by one, or three at a time.
_V4_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_V4_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DIGITS = {r"\p{N}": "[0-9]", r"\p{N}{1,3}": "[0-9]{1,3}"}
# The same for printable ASCII, tabs and line ends. A digit ends a word as the end of the text does.
_MARK = r"[!-/:-@\[-`{-~]"
_ASCII_WORDS = (
    rf"{_MARK}[A-Za-z]+|[ \t]?[A-Za-z]+| ?{_MARK}+[\r\n]*"
    r"|[ \t\r\n]*[\r\n]+|[ \t\r\n]+(?![^ \t\r\n0-9])|[ \t\r\n]+"
)
_SYMBOLS = str.maketrans(" \t\r\n", "ĠĉčĊ")  # of the byte-level alphabet; the others stand for themselves
_MAX_KNOWN = 1 << 14
_MAX_CHARACTERS = 32


class Words:
    """The words seen lately and their ids; `digits` is how digits are split."""

    def __init__(self, bpe: tokenizers.Tokenizer, digits: str) -> None:
        self._model = bpe.model
        self._find = re.compile(f"{digits}|{_ASCII_WORDS}").findall
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(cls, bpe: tokenizers.Tokenizer, pre_tokenizer: Any) -> "Words | None":
        """None for a tokenizer.json that splits otherwise than V4's."""
        digits = next(
            (ours for theirs, ours in _DIGITS.items() if _v4_splits(theirs) == _plain(pre_tokenizer)), None
        )
        return None if digits is None else cls(bpe, digits)

    def ids(self, text: str) -> list[int] | None:
        """As the library's; None for a text with other characters."""
        words = self._find(text)
        if "".join(words) != text:
            return None
        ids: list[int] = []
        for word in words:
            ids += self._known.get(word) or self._learn(word)
        return ids

    def _learn(self, word: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(word.translate(_SYMBOLS))]
        if len(word) <= _MAX_CHARACTERS:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[word] = ids
        return ids


def _v4_splits(digits: str) -> list[Any]:
    return [digits, _V4_CJK, _V4_WORDS, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]


def _plain(pre_tokenizer: Any) -> list[Any] | None:
    """The patterns of isolating splits, one spelling for each; other steps as they are."""
    if not isinstance(pre_tokenizer, dict) or pre_tokenizer.get("type") != "Sequence":
        return None
    found: list[Any] = []
    for step in pre_tokenizer.get("pretokenizers", ()):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
                found.append(regex.replace('\\"', '"').replace("\r", "\\r").replace("\n", "\\n"))
            case {"type": "ByteLevel"}:
                found.append({name: value for name, value in step.items() if name != "trim_offsets"})
            case _:
                found.append(step)
    return found
