"""Pieces of one answer to blocks: a thought, a text, a call, one after the other. Knows no API."""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dsv4.serve.answer import Piece, join_calls

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    kind: Kind
    index: int  # among all blocks
    id: str = ""
    name: str = ""
    call: int = -1  # number of the call
    parts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a text's tokens

    @property
    def text(self) -> str:
        """Of a call, its arguments."""
        return "".join(self.parts)


class Blocks:
    """`push` tells what happens: ("open" | "more" | "close", block, what was added).

    `logprobs` are those of the text that was added last.
    """

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self.logprobs: list[dict[str, Any]] = []
        self._open: Block | None = None
        # Of tokens whose text is held back.
        self._held: dict[Kind, list[dict[str, Any]]] = {"reasoning": [], "text": []}

    def push(self, piece: Piece) -> Iterator[tuple[str, Block, str]]:
        kinds: tuple[tuple[Kind, str, str], ...] = (
            ("reasoning", piece.reasoning, "reasoning_content"),
            ("text", piece.content, "content"),
        )
        for kind, text, name in kinds:
            self._held[kind] += piece.logprobs.get(name, ())
            if text:
                self.logprobs, self._held[kind] = self._held[kind], []
                yield from self._add(Block(kind, len(self.all)), text)
        for call in join_calls([piece]):
            function, index = call["function"], call["index"]
            block = Block("call", len(self.all), call.get("id", ""), function.get("name", ""), index)
            yield from self._add(block, function["arguments"])
        self.finish_reason, self.stop = piece.finish_reason, piece.stop

    def close(self) -> Iterator[tuple[str, Block, str]]:
        if self._open is not None:
            yield "close", self._open, ""
        self._open = None

    def _add(self, block: Block, text: str) -> Iterator[tuple[str, Block, str]]:
        """To the open block, if it is the one that goes on."""
        if self._open is None or (self._open.kind, self._open.call) != (block.kind, block.call):
            yield from self.close()
            self.all.append(block)
            self._open = block
            yield "open", block, ""
        if text:
            self._open.parts.append(text)
            self._open.logprobs += self.logprobs if block.kind != "call" else ()
            yield "more", self._open, text


_SEAL = "dsv4:"


def sealed(thought: str) -> str:
    """A thought as clients keep it that do not show it. It is theirs, so it is no secret."""
    return base64.b64encode((_SEAL + thought).encode()).decode()


def unsealed(seal: str) -> str:
    """The thought in a seal; empty for one of another server."""
    try:
        text = base64.b64decode(seal, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.removeprefix(_SEAL) if text.startswith(_SEAL) else ""
