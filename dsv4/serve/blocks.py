"""Pieces of one answer to blocks: a thought, a text, a call, one after the other. Knows no API."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

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

    @property
    def text(self) -> str:
        """Of a call, its arguments."""
        return "".join(self.parts)


class Blocks:
    """`push` tells what happens: ("open" | "more" | "close", block, what was added)."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self._open: Block | None = None

    def push(self, piece: Piece) -> Iterator[tuple[str, Block, str]]:
        if piece.reasoning:
            yield from self._add(Block("reasoning", len(self.all)), piece.reasoning)
        if piece.content:
            yield from self._add(Block("text", len(self.all)), piece.content)
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
            yield "more", self._open, text
