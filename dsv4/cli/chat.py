"""`dsv4 chat`: talk to the model. Reasoning is dimmed; Ctrl-C stops the answer, not the program."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli.options import engine_options
from dsv4.cli.show import err, load_engine, out, say, text
from dsv4.config import EngineConfig
from dsv4.errors import RequestError, TextError

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine
    from dsv4.engine.request import SamplingParams

EPILOG = """
[bold]Examples[/]

  dsv4 chat ./model

  dsv4 chat ./model --no-thinking --temperature 0.6 --system "Answer in one sentence."
"""
HELP = (
    "/reset forgets the conversation, /think on|off, /system TEXT, /exit (or Ctrl-D); Ctrl-C stops an answer"
)


@engine_options
def chat(
    model: Annotated[Path, typer.Argument(help="model folder with a tokenizer.json")],
    system: Annotated[str, typer.Option(help="system message")] = "",
    thinking: Annotated[bool, typer.Option(help="let the model think first")] = True,
    max_tokens: Annotated[
        int | None, typer.Option(help="per answer; default: until the context is full")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option(help="default: a new one each time")] = None,
    *,
    config: EngineConfig,
) -> None:
    """Talk to the model in the terminal."""
    from dsv4.engine.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    engine = load_engine(model, config)
    if engine.tokenizer is None:
        raise RequestError(f"{model} has no tokenizer.json; chat needs one")
    _Conversation(engine, params, system, thinking).loop()


class _Conversation:
    def __init__(self, engine: "Engine", params: "SamplingParams", system: str, thinking: bool) -> None:
        self.engine, self.params, self.system, self.thinking = engine, params, system, thinking
        self.turns: list[dict[str, Any]] = []

    def loop(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):  # it has no Windows version, where input() edits lines by itself
                import readline  # noqa: F401
            err.print(f"[dim]{HELP}[/]")
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line.strip():
                self.answer(line)

    def command(self, line: str) -> bool:
        """Handle a slash command; False ends the program."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit") and not rest:
            return False
        answer = HELP
        if name == "/reset" and not rest:
            self.turns, answer = [], "a new conversation"
        elif name == "/think" and rest in ("on", "off"):
            self.thinking, answer = rest == "on", f"thinking is {rest}"
        elif name == "/system":
            self.system, answer = rest, f"the system message is {rest!r}" if rest else "no system message"
        err.print(answer, style="dim", markup=False)
        return True

    def messages(self) -> list[dict[str, Any]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def answer(self, line: str) -> None:
        from dsv4.text.chat import encode

        self.turns.append({"role": "user", "content": line})
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        try:
            ids = tokenizer.encode_prompt(encode(self.messages(), thinking=self.thinking))
            reply = self.stream(ids)
        except (RequestError, TextError) as error:
            self.turns.pop()
            say("error", "bold red", f"{error} (/reset forgets the conversation)")
            return
        self.turns.append({"role": "assistant", **reply})

    def stream(self, ids: list[int]) -> dict[str, str]:
        """Print the answer as it comes; -> the assistant message, as far as it got."""
        from dsv4.text.deltas import Content, Reasoning
        from dsv4.text.stream import OutputParser

        parser = OutputParser(thinking=self.thinking, tokenizer=self.engine.tokenizer)
        parts: dict[str, list[str]] = {"reasoning_content": [], "content": []}

        def show(deltas: list[Any]) -> None:
            for delta in deltas:
                if isinstance(delta, Reasoning):
                    parts["reasoning_content"].append(delta.text)
                    text(delta.text, "dim")
                elif isinstance(delta, Content):
                    if not parts["content"] and parts["reasoning_content"]:
                        out.print()
                    parts["content"].append(delta.text)
                    text(delta.text)
                elif call := getattr(delta, "name", getattr(delta, "text", "")):
                    text(call, "cyan")

        start, count, end = time.perf_counter(), 0, "stopped"
        with self.engine.stream(self.engine.request(ids, self.params)) as stream, _ctrl_c() as pressed:
            # Step by step, not delta by delta: a long prompt can be stopped too.
            while not (pressed or stream.is_done):
                for delta in stream.advance():
                    end = delta.finish_reason or end
                    if delta.token is None:
                        continue
                    count += 1
                    try:
                        show(parser.push_id(delta.token.id))
                    except TextError:  # an output row without an entry in the tokenizer
                        show(parser.push_text("\ufffd"))
        show(parser.finish("stop" if end == "stop" else "length")[0])
        out.print()
        seconds = time.perf_counter() - start
        notes = {"stop": "", "length": "; cut by the token limit", "stopped": "; stopped"}
        err.print(f"[dim]{count} tokens, {count / max(seconds, 1e-9):.1f}/s{notes[end]}[/]")
        return {name: "".join(texts) for name, texts in parts.items()}


@contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """While open, Ctrl-C fills the list instead of raising inside a step; a second one ends the program."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_line() -> str | None:
    """One line from the person; None at the end of input. Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            out.print()


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(chat)
