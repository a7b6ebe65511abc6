"""Text to token ids and back, from tokenizer.json. Knows V4's special tokens by name, not their use."""

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from dsv4.errors import TextError
from dsv4.text.words import Words

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"

CHAT_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML, LATEST_REMINDER)
# The first ends a turn; the others can only begin the next one, so they end it too.
STOP_TOKENS = (EOS, USER, BOS, ASSISTANT)

V4_IDS = {
    BOS: 0,
    EOS: 1,
    "<｜▁pad▁｜>": 2,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    USER: 128803,
    ASSISTANT: 128804,
    THINK: 128821,
    END_THINK: 128822,
    DSML: 128825,
    LATEST_REMINDER: 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜extracted_url｜>": 128844,
    "<｜read_url｜>": 128845,
}
V4_VOCAB_SIZE = 129280

# Long texts are tokenised in pieces of this size, which takes some ten milliseconds and 10 MB each.
PIECE_CHARACTERS = 1 << 14
_SHORT_CHARACTERS = 1 << 11
# What has no boundary between words is one piece however long it is; the longest one takes about 60 MB.
MAX_WORD_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class Special:
    """One special token, by its text. A plain `str` beside it is text and never becomes a special token."""

    text: str


Segment = str | Special

_SELF_TEST = (
    Special(USER),
    "你好",
    Special(ASSISTANT),
    Special(THINK),
    "推理",
    Special(END_THINK),
    "答案",
    Special(EOS),
)
_SELF_TEST_IDS = [128803, 30594, 128804, 128821, 36101, 128822, 7624, 1]


def _byte_symbols() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(sorted(set(range(256)) - set(printable))):
        symbols[chr(256 + offset)] = byte
    return symbols


class Tokenizer:
    """A byte-level BPE vocabulary. Ordinary text can never produce the id of an added token."""

    def __init__(self, content: dict[str, Any], name: str) -> None:
        """`content` is the parsed tokenizer.json, `name` is what errors call it; most callers use `load`."""
        model, added = _checked_parts(content, name)
        self.special_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_texts: dict[int, str] = {id: text for text, id in self.special_ids.items()}
        self._name = name
        # An added token listed in the BPE vocabulary as well must not be reachable by merging.
        vocab = {text: id for text, id in model["vocab"].items() if text not in self.special_ids}
        self._token_bytes = self._byte_table(vocab)
        self._longest = max(map(len, vocab))  # in bytes, each of which is one symbol
        plain = {
            **content,
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
            "model": {**model, "vocab": vocab},
        }
        try:
            self._bpe = tokenizers.Tokenizer.from_str(json.dumps(plain, ensure_ascii=False))
        except Exception as error:  # the library raises nothing narrower
            raise TextError(
                f"{name} is not a usable byte-level BPE ({error}); fetch the model's tokenizer.json again"
            ) from error
        self._words = Words.of(self._bpe, content.get("pre_tokenizer"))
        self._check_chat_tokens()
        if missing := [text for text in (BOS, EOS) if text not in self.special_ids]:
            raise TextError(
                f"{name} has no token {missing[0]}; expected a DeepSeek-V4 tokenizer; check the path"
            )
        self.bos_id = self._role(BOS)
        self.eos_id = self._role(EOS)
        self.stop_ids: tuple[int, ...] = tuple(
            self.special_ids[text] for text in STOP_TOKENS if text in self.special_ids
        )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads a tokenizer.json, or the one inside a model folder."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = json.loads(file.read_bytes())
        except OSError as error:
            raise TextError(
                f"cannot read {file} ({error.strerror}); expected the model's tokenizer.json; check the path"
            ) from error
        except (ValueError, RecursionError) as error:
            raise TextError(
                f"{file} is not valid JSON ({error}); fetch the model's tokenizer.json again"
            ) from error
        return cls(content, str(file))

    def _byte_table(self, vocab: dict[str, int]) -> list[bytes | None]:
        """The bytes of each id; None where no token has that id."""
        symbols = _byte_symbols()
        if missing := [f"{byte:#04x}" for symbol, byte in symbols.items() if symbol not in vocab]:
            raise TextError(
                f"{self._name} has no token for {len(missing)} of 256 bytes (first {missing[0]}); text would "
                "be lost, so a byte-level vocabulary is needed"
            )
        table: list[bytes | None] = [None] * (1 + max(*vocab.values(), *self.special_ids.values(), 0))
        for text, id in self.special_ids.items():
            table[id] = text.encode()
        for text, id in vocab.items():
            if table[id] is not None:
                raise TextError(
                    f"{self._name} gives id {id} to two tokens ({text!r} is one); fetch the file again"
                )
            try:
                table[id] = bytes(map(symbols.__getitem__, text))
            except KeyError:
                raise TextError(
                    f"{self._name}: token {text!r} (id {id}) is not written in byte-level symbols; expected "
                    "a byte-level BPE vocabulary"
                ) from None
        return table

    def _check_chat_tokens(self) -> None:
        if USER not in self.special_ids:
            return
        full = self.special_ids[USER] == V4_IDS[USER]
        if missing := [t for t in (V4_IDS if full else CHAT_TOKENS) if t not in self.special_ids]:
            raise TextError(
                f"{self._name} has {USER} but not {', '.join(missing)}; expected all of V4's chat tokens; "
                "fetch the model's tokenizer.json again"
            )

    def _role(self, text: str) -> int:
        if text not in self.special_ids:
            raise TextError(f"this model's vocabulary has no token {text}")
        return self.special_ids[text]

    @property
    def end_think_id(self) -> int:
        return self._role(END_THINK)

    @property
    def dsml_id(self) -> int:
        return self._role(DSML)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self._token_bytes)

    def check_v4_ids(self) -> list[str]:
        """What differs from the published V4 vocabulary, one sentence each; empty when nothing does."""
        found = [
            f"{text} has id {self.special_ids.get(text, 'none')}, expected {id}"
            for text, id in V4_IDS.items()
            if self.special_ids.get(text) != id
        ]
        if self.vocab_size != V4_VOCAB_SIZE:
            found.append(f"the vocabulary has {self.vocab_size} ids, expected {V4_VOCAB_SIZE}")
        if not found and (ids := self.encode_prompt(_SELF_TEST)) != _SELF_TEST_IDS:
            found.append(f"the self-test text encodes to {ids}, expected {_SELF_TEST_IDS}")
        return found

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text: no BOS, and no string in it, `<｜User｜>` included, is special."""
        return [id for piece in self.text_pieces(text) for id in piece]

    def encode_prompt(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of text and special tokens in turn; texts that touch are encoded as one piece."""
        return [id for piece in self.prompt_pieces(segments) for id in piece]

    def prompt_pieces(self, segments: Iterable[Segment]) -> Iterator[list[int]]:
        """The ids of `encode_prompt`, a piece at a time."""
        texts: list[str] = []
        for segment in segments:
            if isinstance(segment, str):
                texts.append(segment)
                continue
            yield from self.text_pieces("".join(texts))
            texts.clear()
            yield [self._role(segment.text)]
        yield from self.text_pieces("".join(texts))

    def text_pieces(self, text: str) -> Iterator[list[int]]:
        """The ids of `encode_text`, a piece at a time: each takes little time, memory, and no GIL."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"the text holds a lone surrogate at character {error.start}, which is not Unicode; remove it"
            ) from None
        if self._words is not None and len(text) <= _SHORT_CHARACTERS:
            ids = self._words.ids(text)
            if ids is not None:
                yield ids
                return
        start, size = 0, PIECE_CHARACTERS
        while start < len(text):
            window = text[start : start + size]
            encoding = self._encoded(window)
            is_last = start + size >= len(text)
            num_tokens, num_characters = (len(encoding), size) if is_last else _settled(encoding, window)
            if num_tokens:
                yield encoding.ids[:num_tokens]
                start, size = start + num_characters, PIECE_CHARACTERS
            elif size < MAX_WORD_CHARACTERS:
                size *= 4
            else:
                raise TextError(
                    f"the text has a word or a run of spaces of more than {MAX_WORD_CHARACTERS} characters, "
                    f"from character {start} on; expected shorter ones"
                )

    def _encoded(self, text: str) -> tokenizers.Encoding:
        try:
            if len(text) <= _SHORT_CHARACTERS:
                return self._bpe.encode(text, add_special_tokens=False)
            # Holds no GIL, and costs half a millisecond more.
            return self._bpe.encode_batch([text], add_special_tokens=False)[0]
        except BaseException as error:
            # The library panics where a regular expression gives up; that is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise TextError(f"the text cannot be tokenised ({error}); shorten its longest word") from None

    def fewest_tokens(self, segments: Iterable[Segment]) -> int:
        """No encoding of the segments can be shorter than this."""
        num_bytes = sum(
            len(segment.encode(errors="replace")) for segment in segments if isinstance(segment, str)
        )
        return -(-num_bytes // self._longest)

    def bytes_of(self, id: int) -> bytes:
        """The bytes a token stands for; an added token stands for its text in UTF-8."""
        found = self._token_bytes[id] if 0 <= id < len(self._token_bytes) else None
        if found is None:
            raise TextError(
                f"token id {id} is not in the tokenizer's vocabulary, "
                f"whose ids end at {self.vocab_size - 1}; check that the tokenizer belongs to the model"
            )
        return found

    def decode(self, ids: Iterable[int], keep_special: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD, added tokens their text or nothing."""
        stream = TextStream(self)
        pieces: list[str] = []
        for id in ids:
            hidden = not keep_special and id in self.special_texts
            pieces.append(stream.finish() if hidden else stream.push(id))
        return "".join(pieces) + stream.finish()


class TextStream:
    """Ids to text, one at a time: a character is given out once all its bytes have arrived."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes, often empty inside a character."""
        return self._decoder.decode(self._tokenizer.bytes_of(id))

    def finish(self) -> str:
        """U+FFFD for a character left incomplete, else nothing; the stream can then be used again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _settled(encoding: tokenizers.Encoding, window: str) -> tuple[int, int]:
    """How many tokens of a window, and of how many characters, stay as they are whatever follows it.

    Words are found from left to right, and a word depends on nothing but itself, the character after it and
    spaces further on. So the last word that is not all spaces is open, and what follows it.
    """
    words, count, end = encoding.word_ids, len(encoding), len(window)
    while count:
        word = words[count - 1]
        while count and words[count - 1] == word:
            count -= 1
        start = (encoding.token_to_chars(count) or (0, 0))[0]
        if not window[start:end].isspace():
            return count, start
        end = start
    return 0, 0


def _checked_parts(content: Any, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The model and the added tokens of a tokenizer.json, or an error that says what is wrong with it."""
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise TextError(f"{name} holds no BPE model; expected a tokenizer.json of the tokenizers library")
    if not all(isinstance(id, int) and id >= 0 for id in model["vocab"].values()):
        raise TextError(f"{name}: the vocabulary has an id that is not a whole number; fetch the file again")
    normalizer = content.get("normalizer")
    if normalizer not in (None, {"type": "Sequence", "normalizers": []}):
        raise TextError(
            f"{name} normalises text ({json.dumps(normalizer)[:80]}); expected no normalizer, as in V4"
        )
    added = content.get("added_tokens")
    if not isinstance(added, list) or not all(
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and isinstance(token.get("id"), int)
        and token["id"] >= 0
        for token in added
    ):
        raise TextError(
            f"{name}: added_tokens is not a list of tokens with content and id; fetch the file again"
        )
    return model, added
