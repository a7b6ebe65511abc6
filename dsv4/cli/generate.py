"""`dsv4 generate`: prompts in, continuations out."""

import os.path
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli.clock import Stopwatch
from dsv4.cli.options import engine_options
from dsv4.cli.show import count_bar, ctrl_c, err, load_engine, out, print_json, text
from dsv4.config import EngineConfig
from dsv4.disk import read_text
from dsv4.engine.request import SamplingParams
from dsv4.errors import RequestError

if TYPE_CHECKING:
    from dsv4.engine.chat import ChatCompletion, ChatStream
    from dsv4.engine.engine import Engine
    from dsv4.engine.request import Completion
    from dsv4.engine.stream import Stream

EPILOG = """
[bold]Examples[/]
  dsv4 generate "Once upon a time" --max-tokens 64 --temperature 0
  dsv4 generate --chat "What is 27 + 58?" --thinking --stats
  dsv4 generate --chat --max-tokens 100 < question.txt
  dsv4 generate "first prompt" "second prompt" --model ./model --json
"""


@engine_options
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="one or more prompts, run together; - is stdin")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="model folder; default: the embedded model")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="a prompt's text, from a file; repeatable")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option(help="a prompt as token ids, e.g. 0,17,42; repeatable")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="send each prompt as a user message")] = False,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="with --chat: let the model think first")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON object per prompt and line")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="show the time from the program's start to the first token")
    ] = False,
    *,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Continue one or more prompts: given, from files, or from stdin.

    A single prompt is streamed, unless log-probabilities are asked for. Several are shown in their order
    when all are done; Ctrl-C shows what there is.
    """
    if thinking and not chat:
        raise RequestError("--thinking goes with --chat; a plain prompt is continued as it is")
    # Before a model is loaded, which may take minutes.
    given: list[str | list[int]] = [*_texts(prompts or [], prompt_file or [], ids, model)]
    given += [_parse_ids(one) for one in ids or []]
    if chat and ids:
        raise RequestError("--chat makes a message of a text; give token ids without it")
    engine = load_engine(model, config)
    streams: list[Any] = [_open(engine, one, params, chat, thinking) for one in given]
    watch = Stopwatch(sum(stream.output.sequence.num_prompt for stream in streams))
    with ExitStack() as stack, ctrl_c() as pressed:
        for stream in streams:
            stack.enter_context(stream)
        is_single = len(streams) == 1 and not json and params.logprobs is None
        if is_single:
            ended = _show_stream(engine, streams[0], watch, pressed)
        else:
            _run(engine, streams, watch, pressed)
        stack.close()  # what was stopped is cancelled, and complete as far as it got
        if not is_single:
            for index, (one, stream) in enumerate(zip(given, streams, strict=True)):
                if not json and len(streams) > 1:
                    _show_prompt(index, one)
                _show(engine, index, stream.completion(), params.logprobs is not None, json)
    drafts = str(engine.counts)
    if is_single:
        speed = watch.since_start(drafts) if stats else watch.since_prompt()
        err.print(f"[dim]{speed}; ended by {'Ctrl-C' if pressed else ended}[/]")
    elif stats:
        err.print(f"[dim]{watch.since_start(drafts)}[/]")
    if pressed:
        raise typer.Exit(130)


def _texts(prompts: list[str], files: list[Path], ids: list[str] | None, model: Path | None) -> list[str]:
    """The prompts that are texts; one that was probably meant as something else is refused."""
    for prompt in prompts:
        if model is None and os.path.isfile(os.path.join(prompt, "config.json")):
            rest = " ".join(f'"{other}"' for other in prompts if other != prompt) or '"your prompt"'
            raise RequestError(f"{prompt!r} is a model folder: dsv4 generate -m {prompt} {rest}")
        path = prompt.removeprefix("@")
        if prompt != "-" and os.path.isfile(path):
            raise RequestError(f"{path!r} is a file; to use its text as a prompt: --prompt-file {path}")
    if not (prompts or files or ids) and not sys.stdin.isatty():
        prompts = ["-"]
    if prompts.count("-") > 1:
        raise RequestError("stdin can be one prompt; give - once")
    texts = [_read_stdin() if prompt == "-" else prompt for prompt in prompts]
    texts += [read_text(path).removesuffix("\n") for path in files]
    if not (texts or ids) or (prompts == ["-"] and not texts[0]):
        raise RequestError(
            'no prompt given; pass one in quotes, by --prompt-file, or on stdin: echo "hi" | …'
        )
    return texts


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text (byte {error.start}); convert it first") from None


def _parse_ids(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found:
        raise RequestError(f"--ids {text!r}: expected numbers separated by commas, e.g. 0,17,42")
    return found


def _open(
    engine: "Engine", prompt: str | list[int], params: SamplingParams, chat: bool, thinking: bool
) -> "Stream | ChatStream":
    if not chat:
        return engine.stream(engine.request(prompt, params))
    return engine.chat_stream([{"role": "user", "content": prompt}], params, thinking=thinking)


def _show_stream(
    engine: "Engine", stream: "Stream | ChatStream", watch: Stopwatch, pressed: list[int]
) -> str:
    """Show the tokens as they come; -> how it ended."""
    from dsv4.cli.answer import Answer

    answer = Answer(engine.tokenizer is not None)
    while not (pressed or stream.is_done):
        for delta in stream.advance():
            watch.count()
            answer.push(delta)
    out.print()
    return answer.ended


def _run(engine: "Engine", streams: list[Any], watch: Stopwatch, pressed: list[int]) -> None:
    """All of them together; nothing is printed before the last is done, so a bar says how many are."""
    with count_bar("generating") as update:
        update(0, len(streams))
        while engine.num_unfinished and not pressed:
            deltas = engine.step()
            watch.count(len(deltas))
            if any(delta.finish_reason for delta in deltas):
                update(len(streams) - engine.num_unfinished, len(streams))


def _show_prompt(index: int, prompt: str | list[int]) -> None:
    """Its first line, above its answer."""
    lines = prompt.strip().splitlines() if isinstance(prompt, str) else [" ".join(map(str, prompt))]
    text(f"{index + 1}. {lines[0] if lines else ''}\n", "bold")


def _show(
    engine: "Engine",
    index: int,
    done: "Completion | ChatCompletion",
    logprobs: bool,
    json: bool,
) -> None:
    reasoning = getattr(done, "reasoning", None)
    ids = [token.id for token in done.tokens]
    if not json:
        if reasoning:
            text(reasoning + "\n", "dim")
        text((done.text if engine.tokenizer else " ".join(map(str, ids))) + "\n")
        for token in done.tokens if logprobs else ():
            others = "".join(f"  {id}:{logprob:.4f}" for id, logprob in token.top)
            text(f"{token.id:>7} {token.logprob:9.4f} {others}\n")
        text("\n")
        return
    value: dict[str, Any] = {
        "index": index,
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": len(ids),
        "finish_reason": done.finish_reason,
        "seed": done.seed,
        "ids": ids,
        "text": done.text,
    }
    if reasoning is not None:
        value["reasoning"] = reasoning
    if logprobs:
        value["logprobs"] = [
            {"id": t.id, "logprob": t.logprob, "top": [{"id": i, "logprob": p} for i, p in t.top]}
            for t in done.tokens
        ]
    print_json(value)
