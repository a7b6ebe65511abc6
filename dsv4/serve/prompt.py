"""Texts to token ids beside the event loop: long ones in pieces and in turns, never more than can fit."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dsv4.serve.ask import check_fits
from dsv4.text.tokenizer import PIECE_CHARACTERS, Segment, Tokenizer

# Tokens of one turn, at least: conversations are made of many small pieces.
_TURN_TOKENS = 2048
# A text with no more characters than this for each token of the context is counted in full, though it may
# not fit: agents shorten their conversation by what the refusal says.
_COUNTED_PER_TOKEN = 8

# Work on so many characters takes a millisecond, less than it takes to have a thread do it.
_SMALL = 2048

Result = TypeVar("Result")


async def beside(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Runs the function in a thread if `size` characters are much to work on."""
    return function(*args) if size <= _SMALL else await asyncio.to_thread(function, *args)


class Encoder:
    """The tokenizer of one server. Threads do the work, which holds no GIL; short texts pass long ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._turn = asyncio.Lock()

    async def ids(self, segments: Sequence[Segment], max_context: int | None, field: str) -> list[int]:
        """The ids; of a text much longer than can fit no more than is needed to refuse it."""
        size = sum(len(segment) for segment in segments if isinstance(segment, str))
        most = max_context if max_context is not None and size > _COUNTED_PER_TOKEN * max_context else None
        if most is not None:
            check_fits(self.tokenizer.fewest_tokens(segments), None, most, field, "at least ")
        if size <= PIECE_CHARACTERS:
            return await beside(size, self.tokenizer.encode_prompt, segments)
        ids: list[int] = []
        pieces = self.tokenizer.prompt_pieces(segments)
        while True:
            async with self._turn:
                more = await asyncio.to_thread(_some, pieces)
            if not more:
                return ids
            ids += more
            if most is not None:
                check_fits(len(ids), None, most, field, "at least ")


def _some(pieces: Iterator[list[int]]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        ids += piece
        if len(ids) >= _TURN_TOKENS:
            break
    return ids
