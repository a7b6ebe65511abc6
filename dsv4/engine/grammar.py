"""Which tokens may come next, by a grammar. The one user of llguidance, which is loaded when first asked for.

Grammars are llguidance's Lark; special tokens stand in them as <[id]>. What a grammar costs is limited by
fuel, not by time: at compilation about a second, then at most some 20 ms per token. llguidance would spell
out text that a grammar forces, and tokenise it, without fuel: 120 bytes can force a gigabyte. So it does not;
the model writes forced text as any other, under the mask.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from dsv4.engine.request import SamplingParams
from dsv4.errors import RequestError, TextError
from dsv4.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KNOWN = 64
MAX_KNOWN_CHARACTERS = 4 << 20  # a compiled grammar takes a few times the bytes of its text
MAX_GRAMMAR_CHARACTERS = 1 << 20
MAX_GRAMMAR_SYMBOLS = 200_000
MAX_LEXER_STATES = 25_000  # of 1 to 2 kB
PANICKED = "the grammar library gave up on it"
NO_FORCING = '%llguidance {"no_forcing": true}\n'
COMPILE_FUEL, STEP_FUEL, STEP_ITEMS = 5_000_000, 200_000, 50_000


class _Words:
    """The vocabulary in the form llguidance asks for; output rows without a token have no bytes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id, self.eos_token_id = tokenizer.bos_id, tokenizer.eos_id
        self.special_token_ids = list(tokenizer.special_texts)
        self.tokens = [self._bytes(id) for id in range(vocab_size)]

    def _bytes(self, id: int) -> bytes:
        try:
            return self._tokenizer.bytes_of(id)
        except TextError:
            return b""

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_text(text)


class Matcher:
    """One sequence's place in its grammar."""

    def __init__(self, state: "LLMatcher", vocab_size: int) -> None:
        self._state, self._num_bytes = state, -(-vocab_size // 8)

    def mask(self, ahead: tuple[int, ...] = ()) -> bytes | None:
        """Bit i: whether token i may come next, or after those `ahead`; None: the grammar refuses these, or
        allows nothing after them.
        llguidance gives more bytes than there are tokens for."""
        if ahead:
            return self._ahead(ahead)
        with _own_failure():
            bits: bytes = self._state.compute_bitmask()[: self._num_bytes]
        self._check()
        if not any(bits):
            raise RequestError("the output's grammar allows no token here; simplify it")
        return bits

    def _ahead(self, ids: tuple[int, ...]) -> bytes | None:
        there = Matcher(self._state.deep_copy(), 8 * self._num_bytes)
        try:
            for id in ids:
                there.accept(id)
            return there.mask()
        except RequestError:
            return None

    def accept(self, id: int) -> None:
        with _own_failure():
            self._state.consume_token(id)
        self._check()

    def _check(self) -> None:
        if self._state.is_error():
            raise RequestError(
                f"the output's grammar cannot go on ({_short(self._state.get_error())}); simplify it"
            )


class Bounds:
    """What `min_tokens`, `bad_words` and `allowed_ids` leave of the vocabulary, and a grammar of it."""

    def __init__(
        self, params: SamplingParams, stop_ids: Iterable[int], vocab_size: int, grammar: Matcher | None
    ) -> None:
        self._params, self._grammar = params, grammar
        self._stops, self._num_bytes = _bits(tuple(sorted(stop_ids))), -(-vocab_size // 8)
        self._allowed = _bits(tuple(params.allowed_ids)) if params.allowed_ids else (1 << vocab_size) - 1
        self._ids: list[int] = []

    def mask(self, ahead: tuple[int, ...] = ()) -> bytes | None:
        """As a Matcher's."""
        bits, ids = self._allowed, [*self._ids, *ahead]
        if self._grammar is not None:
            allowed = self._grammar.mask(ahead)
            if allowed is None:
                return None
            bits &= int.from_bytes(allowed, "little")
        if len(ids) < self._params.min_tokens:
            bits &= ~self._stops
        for *begin, last in self._params.bad_words:
            if len(begin) <= len(ids) and ids[len(ids) - len(begin) :] == begin:
                bits &= ~(1 << last)
        if not bits and ahead:
            return None
        if not bits:
            raise RequestError(
                "min_tokens, bad_words, allowed ids and the form together allow no token here; loosen one"
            )
        return bits.to_bytes(self._num_bytes, "little")

    def accept(self, id: int) -> None:
        if self._grammar is not None:
            self._grammar.accept(id)
        self._ids.append(id)


@lru_cache(16)
def _bits(ids: tuple[int, ...]) -> int:
    """Bit i: whether i is among them. Not by adding up: a hundred thousand shifts take seconds."""
    data = bytearray(max(ids, default=0) // 8 + 1)
    for id in ids:
        data[id // 8] |= 1 << id % 8
    return int.from_bytes(data, "little")


class Grammars:
    """Compiled grammars of one model, by their text, the most recently used ones. Usable from any thread."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._words: LLTokenizer | None = None
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, text: str) -> Matcher:
        """At the grammar's beginning; compiles it if it is not known, which can take a second."""
        with self._lock:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                return Matcher(known.deep_copy(), self._vocab_size)
        made = self._compiled(text)
        Matcher(made, self._vocab_size).mask()  # the first costs most, and here no stream waits for it
        with self._lock:
            self._known[text] = made
            while len(self._known) > MAX_KNOWN or sum(map(len, self._known)) > MAX_KNOWN_CHARACTERS:
                self._known.popitem(last=False)
            return Matcher(made.deep_copy(), self._vocab_size)

    def _compiled(self, text: str) -> "LLMatcher":
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"the grammar has {len(text)} characters, expected at most {MAX_GRAMMAR_CHARACTERS}"
            )
        words = self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        with _own_failure():
            state = LLMatcher(words, NO_FORCING + text, log_level=0, limits=limits)
        if state.is_error():
            raise RequestError(f"the grammar cannot be used: {_short(state.get_error())}")
        return state

    def prepare(self) -> "LLTokenizer":
        """The vocabulary as llguidance wants it, made once: half a second for a large one, which holds the
        interpreter, so a server does it before anybody waits."""
        if self._tokenizer is None:
            raise RequestError("grammars need a tokenizer.json in the model folder")
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ModuleNotFoundError:
            raise RequestError(
                "llguidance is not installed; grammars need it: pip install 'dsv4[serve]'"
            ) from None
        with self._lock:
            if self._words is None:
                wrapper = TokenizerWrapper(_Words(self._tokenizer, self._vocab_size))
                self._words = LLTokenizer(wrapper, self._vocab_size, self._tokenizer.eos_id)
            return self._words


@contextmanager
def _own_failure() -> Iterator[None]:
    """What llguidance raises is the error of its own request. A panic is one too, and no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"the output's grammar failed ({PANICKED}); simplify it") from error


def _short(error: str) -> str:
    """llguidance's message without its state and stack. A panic's names paths of the machine."""
    first = error.strip().split("\n")[0][:300]
    return PANICKED if "panic" in first else first
