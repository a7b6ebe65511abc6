"""Shows one answer as it comes: the thought dimmed, then what the model says to the user."""

from dsv4.cli.show import out, text
from dsv4.errors import TextError
from dsv4.text.deltas import Content, Delta, Reasoning
from dsv4.text.stream import OutputParser
from dsv4.text.tokenizer import Tokenizer


class Answer:
    """`reasoning` and `content` are what was shown so far."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self._parser = OutputParser(thinking=thinking, tokenizer=tokenizer)
        self.reasoning = self.content = ""

    def push(self, id: int) -> None:
        try:
            self._show(self._parser.push_id(id))
        except TextError:  # an output row without an entry in the tokenizer
            self._show(self._parser.push_text("\ufffd"))

    def finish(self, ended: bool) -> None:
        """`ended`: by the model itself, not by a limit or a person."""
        self._show(self._parser.finish("stop" if ended else "length")[0])
        out.print()

    def _show(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Reasoning):
                self.reasoning += delta.text
                text(delta.text, "dim")
            elif isinstance(delta, Content):
                if self.reasoning and not self.content:
                    out.print()
                self.content += delta.text
                text(delta.text)
            elif call := getattr(delta, "name", getattr(delta, "text", "")):
                text(call, "cyan")
