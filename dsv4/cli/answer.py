"""Shows one answer as it comes: plain, or as Markdown with a live last part."""

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from dsv4.cli.show import out, text, visible

REFRESH_SECONDS = 0.05
FENCES = ("```", "~~~")


class Answer:
    """Takes the deltas of a stream, of a conversation or of a plain prompt; `ended`: how it ended."""

    def __init__(self, has_text: bool = True) -> None:
        self._has_text = has_text  # else ids are shown, for a model without a tokenizer
        self._section = ""
        self.ended = "stopped"  # by a person, unless a delta says otherwise

    def push(self, delta: Any) -> None:
        if not self._has_text:
            text(f"{delta.token.id} " if delta.token else "")
        self._show("reasoning", getattr(delta, "reasoning", ""))
        self._show("text", delta.text)
        for call in getattr(delta, "tool_calls", ()):
            self._show("call", f"{call.name}({call.arguments})\n")
        self.ended = delta.finish_reason or self.ended

    def finish(self) -> None:
        out.print()

    def _show(self, section: str, piece: str) -> None:
        if piece:
            if self._section == "reasoning" != section:
                out.print()
            self._section = section
            text(piece, {"reasoning": "dim", "call": "cyan"}.get(section))


class MarkdownAnswer(Answer):
    """For a terminal. Reasoning is shown while it comes, and then folded to one line."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(highlight=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._tail = ""  # not yet printed for good
        self._begun = self._refreshed = time.perf_counter()
        self._thought = 0  # tokens
        self._is_first = True
        self._live.start()

    def push(self, delta: Any) -> None:
        self._thought += bool(delta.reasoning)
        super().push(delta)

    def finish(self) -> None:
        self._fold()
        self._keep(self._tail)
        self._live.stop()

    def _show(self, section: str, piece: str) -> None:
        if not piece:
            return
        if section != self._section:
            self._fold()
            self._section = section
        self._tail += visible(piece)
        if section != "reasoning" and (end := _end_of_blocks(self._tail)):
            self._keep(self._tail[:end])
            self._tail = self._tail[end:]
        if time.perf_counter() - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = time.perf_counter()
            style = "dim" if section == "reasoning" else ""
            lines = Text(self._tail.strip("\n"), style).wrap(self._console, self._console.width)
            room = max(1, self._console.height - 2)
            self._live.update(Text("\n").join(lines[-room:]), refresh=True)

    def _fold(self) -> None:
        """The end of the reasoning: one line instead of it."""
        if self._section == "reasoning":
            seconds = time.perf_counter() - self._begun
            self._live.update("", refresh=True)
            self._console.print(f"[dim]▸ thought for {seconds:.1f} s, {self._thought} tokens[/]")
            self._tail, self._section = "", ""

    def _keep(self, markup: str) -> None:
        self._live.update("", refresh=True)
        if markup.strip():
            if not self._is_first:
                self._console.print()
            self._is_first = False
            self._console.print(as_markdown(markup))


def as_markdown(markup: str) -> Markdown:
    """Markdown in which <tags> are text, as a model means them; rich would drop them."""
    from markdown_it import MarkdownIt

    rendered = Markdown("", hyperlinks=False, code_theme="ansi_dark")
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    rendered.markup, rendered.parsed = markup, parser.parse(markup)
    return rendered


def _end_of_blocks(markup: str) -> int:
    """Where the last paragraph or code begins that can still grow; 0: there is nothing before it."""
    end = position = 0
    fence, before = "", "text"
    for line in markup.splitlines(keepends=True):
        bare = line.strip()
        if not fence and not before and bare and not line.startswith((" ", "\t")):
            end = position
        if bare[:3] in FENCES and (not fence or bare[:3] == fence):
            fence = "" if fence else bare[:3]
        before, position = bare, position + len(line)
    return end
