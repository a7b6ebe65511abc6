"""`dsv4 chat`: talk to the model. Reasoning is dimmed; Ctrl-C stops the answer, not the program."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli.clock import Stopwatch
from dsv4.cli.options import engine_options
from dsv4.cli.show import ctrl_c, err, load_engine, out, say_error
from dsv4.config import EngineConfig
from dsv4.errors import RequestError, TextError

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine
    from dsv4.engine.request import SamplingParams

EPILOG = """
[bold]Examples[/]
  dsv4 chat
  dsv4 chat ./model --no-thinking --temperature 0.6 --system "Answer in one sentence."
"""
HELP = (
    "/reset forgets the conversation, /think on|off, /system TEXT, /exit (or Ctrl-D); Ctrl-C stops an answer"
)


@engine_options
def chat(
    model: Annotated[
        Path | None, typer.Argument(help="model folder with a tokenizer.json; default: the embedded model")
    ] = None,
    system: Annotated[str, typer.Option(help="system message")] = "",
    thinking: Annotated[bool, typer.Option(help="let the model think first")] = True,
    max_tokens: Annotated[
        int | None, typer.Option(help="per answer; default: until the context is full")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="keep the likeliest tokens that together have this probability")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="default: a new one each time")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="show timing after each answer")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Talk to the model in the terminal."""
    from dsv4.engine.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    engine = load_engine(model, config)
    if engine.tokenizer is None:
        raise RequestError(f"{model} has no tokenizer.json; chat needs one")
    _Conversation(engine, params, system, thinking, stats).loop()


class _Conversation:
    def __init__(
        self, engine: "Engine", params: "SamplingParams", system: str, thinking: bool, stats: bool
    ) -> None:
        self.engine, self.params, self.stats = engine, params, stats
        self.system, self.thinking = system, thinking
        self.turns: list[dict[str, Any]] = []
        self.is_first = True  # no answer has come yet since the program's start

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

    def answer(self, line: str) -> None:
        from dsv4.text.chat import encode

        self.turns.append({"role": "user", "content": line})
        system = [{"role": "system", "content": self.system}] if self.system else []
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        try:
            ids = tokenizer.encode_prompt(encode(system + self.turns, thinking=self.thinking))
            reply = self.stream(ids)
        except (RequestError, TextError) as error:
            self.turns.pop()
            say_error(f"{error} (/reset forgets the conversation)")
            return
        self.turns.append({"role": "assistant", **reply})

    def stream(self, ids: list[int]) -> dict[str, str]:
        """Print the answer as it comes; -> the assistant message, as far as it got."""
        from dsv4.cli.answer import Answer

        assert self.engine.tokenizer is not None
        answer, watch, end = Answer(self.engine.tokenizer, self.thinking), Stopwatch(len(ids)), "stopped"
        accepted, drafted = self.engine.num_accepted, self.engine.num_drafted
        with self.engine.stream(self.engine.request(ids, self.params)) as stream, ctrl_c() as pressed:
            # Step by step, not delta by delta: a long prompt can be stopped too.
            while not (pressed or stream.is_done):
                for delta in stream.advance():
                    end = delta.finish_reason or end
                    if delta.token is not None:
                        watch.count()
                        answer.push(delta.token.id)
        answer.finish(end == "stop")
        limit = "cut by the token limit"
        if self.params.max_tokens is None:
            limit = f"cut: the context of {self.engine.settings.max_context} tokens is full, see /reset"
        notes = {"stop": "", "length": f"; {limit}", "stopped": "; stopped"}
        speed = watch.overall()
        if self.stats:
            show = watch.since_start if self.is_first else watch.since_prompt
            speed = show(self.engine.num_accepted - accepted, self.engine.num_drafted - drafted)
        self.is_first = False
        err.print(f"[dim]{speed}{notes[end]}[/]")
        return {"reasoning_content": answer.reasoning, "content": answer.content}


def _read_line() -> str | None:
    """One line from the person; None at the end of input. Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            out.print()
