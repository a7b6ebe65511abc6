"""`dsv4 chat`: talk to the model. Reasoning is dimmed; Ctrl-C stops the answer, not the program."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli.clock import Stopwatch
from dsv4.cli.options import engine_options, needs_extra
from dsv4.cli.show import ctrl_c, err, load_engine, out, say_error, say_note
from dsv4.config import EngineConfig
from dsv4.engine.request import SamplingParams
from dsv4.errors import REFUSALS, RequestError
from dsv4.models import embedded

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine

EPILOG = """
[bold]Examples[/]
  dsv4 chat
  dsv4 chat ./model --no-thinking --temperature 0.6 --system "Answer in one sentence."
[bold]In it[/]
  /help lists the commands. Alt-Enter adds a line, as do triple quotes until they are closed;
  pasted lines stay together. Ctrl-C stops an answer, Ctrl-D ends.
"""
QUOTES = '"""'
WELCOME = "/help lists commands, Alt-Enter adds a line, Ctrl-C stops an answer, Ctrl-D ends"
CHOICES = "[d]rop the oldest turns, start a [n]ew conversation with this question, or [c]ancel? "


@engine_options
def chat(
    model: Annotated[
        Path | None, typer.Argument(help="model folder with a tokenizer.json; default: the embedded model")
    ] = None,
    system: Annotated[str, typer.Option(help="system message")] = "",
    thinking: Annotated[bool, typer.Option(help="let the model think first")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="show answers as they are, not as Markdown")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="show timing after each answer")] = False,
    *,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Talk to the model in the terminal."""
    engine = load_engine(model, config)
    if engine.tokenizer is None:
        raise RequestError(f"{model} has no tokenizer.json; chat needs one")
    from dsv4.cli.answer import Answer

    name = (model or embedded()).resolve().name
    conversation = Conversation(engine, params, name, system, thinking, stats, Answer)
    if sys.stdin.isatty() and out.is_terminal:
        _loop(conversation, _typed(conversation, plain))
    else:
        _loop(conversation, _piped)


def _typed(conversation: "Conversation", plain: bool) -> Callable[[], str | None]:
    """Lines from a person."""
    from dsv4.cli.answer import MarkdownAnswer
    from dsv4.cli.commands import COMMANDS
    from dsv4.cli.terminal import open_session

    session = open_session({name: words for name, (_, words) in COMMANDS.items()}, conversation.status)
    conversation.new_answer = conversation.new_answer if plain else MarkdownAnswer
    conversation.choose = lambda: input(CHOICES)
    err.print(f"[dim]{conversation.name}: {WELCOME}[/]", soft_wrap=False)

    def read() -> str | None:
        draft, conversation.draft = conversation.draft, ""
        try:
            return session.prompt("> ", default=draft)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None

    return read


def _piped() -> str | None:
    """A line from a pipe, or several between triple quotes."""
    found = ""
    for line in sys.stdin:
        found += line
        if found.count(QUOTES) != 1:
            return found.removesuffix("\n")
    return found or None


def _loop(conversation: "Conversation", read: Callable[[], str | None]) -> None:
    from dsv4.cli.commands import run_command

    while (line := read()) is not None:
        if line.startswith("/") and not line.startswith("//"):
            if not run_command(conversation, line):
                return
        elif bare := line.strip():
            if bare.startswith(QUOTES) and bare.endswith(QUOTES) and len(bare) >= 6:
                line = bare[3:-3].strip("\n")
            conversation.ask(line[1:] if line.startswith("//") else line)


@dataclass
class Conversation:
    """What was said, how the next answer is made, and what it cost."""

    engine: "Engine"
    params: SamplingParams
    name: str
    system: str
    thinking: bool
    shows_stats: bool
    new_answer: Callable[[], Any]
    choose: Callable[[], str] | None = None  # asks the person what to do about a full context
    budget: int | None = None  # thinking tokens
    turns: list[dict[str, Any]] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)  # names and texts for the next question
    draft: str = ""  # what the next question begins with, to be edited
    last: str = ""  # the last answer's timing
    used: int = 0  # tokens of the context
    cached: int = 0
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.usual = self.params

    def status(self) -> list[str]:
        """For the line below the prompt; the most important first."""
        engine, max_context = self.engine, self.engine.settings.max_context
        thinking = f"think {self.budget or 'on'}" if self.thinking else "think off"
        parts = [f"{self.used:,} of {max_context:,} tokens", f"{self.rate:.1f}/s", f"{self.cached:,} cached"]
        if drafts := str(engine.counts):
            parts.append(drafts)
        parts += [f"{len(self.files)} files"] if self.files else []
        return [*(parts if self.used else parts[:1]), thinking, self.name]

    def ask(self, question: str) -> None:
        """Answer it, and keep both; a question that cannot be answered is forgotten."""
        for name, content in self.files:
            fence = "```"
            while fence in content:
                fence += "`"
            question = f"{name}:\n{fence}\n{content}\n{fence}\n\n{question}"
        self.turns.append({"role": "user", "content": question})
        self.answer()

    def answer(self) -> None:
        """Answer the last question."""
        try:
            if self._has_room():
                self.turns.append(self._stream())
                self.files = []
                return
        except REFUSALS as error:
            say_error(str(error))
        self.turns.pop()

    def messages(self) -> list[dict[str, Any]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def count(self) -> int:
        """The prompt's tokens."""
        from dsv4.text.chat import encode

        assert self.engine.tokenizer is not None
        release = self.engine.model_config.release
        prompt = encode(self.messages(), thinking=self.thinking, release=release)
        return len(self.engine.tokenizer.encode_prompt(prompt))

    def _has_room(self) -> bool:
        """Whether the prompt and an answer fit, if need be without what the person lets go."""
        max_context = self.engine.settings.max_context
        need = self.params.max_tokens or 1
        if self.count() + need <= max_context:
            return True
        if len(self.turns) == 1:
            most = f"of at most {max_context - need}; /set max_tokens and --max-context change that"
            say_error(f"this message makes a prompt of {self.count()} tokens, {most}")
            return False
        say = f"the conversation fills the context ({max_context:,} tokens)"
        if self.choose is None:
            say_error(f"{say}; /new starts a new one")
            return False
        say_note(say)
        try:
            choice = self.choose().strip().lower()[:1]
        except (EOFError, KeyboardInterrupt):
            choice = "c"
        before = len(self.turns)
        if choice == "n":
            self.turns = self.turns[-1:]
        elif choice == "d":
            # Room for an answer, not for its first word only.
            while len(self.turns) > 1 and self.count() + max(need, max_context // 4) > max_context:
                following = (i for i, turn in enumerate(self.turns) if i and turn["role"] == "user")
                del self.turns[: next(following)]
        else:
            return False
        say_note(f"messages dropped: {before - len(self.turns)}, kept: {len(self.turns) - 1}")
        return self._has_room()

    def _stream(self) -> dict[str, Any]:
        """Show the answer as it comes; -> its message, as far as it got."""
        engine, before = self.engine, self.engine.counts
        with (
            engine.chat_stream(self.messages(), self._params(), thinking=self.thinking) as stream,
            ctrl_c() as pressed,
        ):
            watch, answer = Stopwatch(stream.output.sequence.num_prompt), self.new_answer()
            try:
                # Step by step, not delta by delta: a long prompt can be stopped too.
                while not (pressed or stream.is_done):
                    for delta in stream.advance():
                        watch.count(delta.token is not None)
                        answer.push(delta)
            finally:
                answer.finish()
        done = stream.completion()
        drafts = str(engine.counts.since(before))
        self.last = (watch.since_prompt if self.last else watch.since_start)(drafts)
        self.cached, self.rate = done.cached_tokens, watch.rate()
        self.used = done.prompt_tokens + done.completion_tokens
        limit = "cut by the token limit"
        if self.params.max_tokens is None:
            limit = f"cut: the context of {engine.settings.max_context} tokens is full, see /new"
        notes = {"length": f"; {limit}", "stopped": "; stopped"}
        shown = self.last if self.shows_stats else watch.overall()
        err.print(f"[dim]{shown}{notes.get(answer.ended, '')}[/]")
        return done.message

    def _params(self) -> SamplingParams:
        if self.budget is None or not self.thinking:
            return self.params
        with needs_extra("/think N", "serve"):
            from dsv4.serve.grammar import Form
        assert self.engine.tokenizer is not None
        form = Form(is_free=True, max_thinking=self.budget)
        return replace(self.params, grammar=form.grammar(self.engine.tokenizer, thinking=True))
