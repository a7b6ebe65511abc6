"""`dsv4 generate`: prompts in, continuations out."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli.options import engine_options
from dsv4.cli.show import err, load_engine, out, print_json, text
from dsv4.config import EngineConfig
from dsv4.errors import RequestError

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine
    from dsv4.engine.request import Completion, Request, SamplingParams

EPILOG = """
[bold]Examples[/]

  dsv4 generate ./model "Once upon a time" --max-tokens 64 --temperature 0

  dsv4 generate ./model --chat "What is 2 + 2?" --thinking

  dsv4 generate ./model "first prompt" "second prompt" --json

  dsv4 generate ./model --ids 0,17,42 --temperature 0 --logprobs 3 --json
"""


@engine_options
def generate(
    model: Annotated[Path, typer.Argument(help="model folder")],
    prompts: Annotated[list[str] | None, typer.Argument(help="one or more prompts, run together")] = None,
    ids: Annotated[
        list[str] | None, typer.Option(help="a prompt as token ids, e.g. 0,17,42; repeatable")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="send each prompt as a user message")] = False,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="with --chat: let the model think first")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="default: until the context is full")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: all")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option(help="default: a new one each time")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; repeatable")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="end after this token id; repeatable")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="log-probabilities with this many alternatives")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object per prompt")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Continue one or more prompts. A single prompt is streamed, unless log-probabilities are asked for."""
    from dsv4.engine.request import SamplingParams

    params = SamplingParams(
        *(max_tokens, temperature, top_k, top_p, min_p, seed, tuple(stop_id or ()), tuple(stop or ())),
        *(ignore_eos, logprobs),
    )
    if thinking and not chat:
        raise RequestError("--thinking goes with --chat; a plain prompt is continued as it is")
    if not prompts and not ids:
        raise RequestError('no prompt given; pass one in quotes, or token ids with --ids "0,17,42"')
    engine = load_engine(model, config)
    requests = [_text_request(engine, prompt, params, chat, thinking) for prompt in prompts or []]
    requests += [engine.request(_parse_ids(given), params) for given in ids or []]
    if len(requests) == 1 and not json and logprobs is None:
        _stream(engine, requests[0])
        return
    for request, done in zip(requests, engine.generate(requests), strict=True):
        if json:
            print_json(_as_dict(request, done))
            continue
        text(_shown(engine, done) + "\n")
        for token in done.tokens if logprobs is not None else ():
            others = "".join(f"  {id}:{logprob:.4f}" for id, logprob in token.top)
            text(f"{token.id:>7} {token.logprob:9.4f} {others}\n")
        text("\n")


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f"--ids {text!r}: expected numbers separated by commas, e.g. 0,17,42") from None


def _text_request(
    engine: "Engine", prompt: str, params: "SamplingParams", chat: bool, thinking: bool
) -> "Request":
    if not chat:
        return engine.request(prompt, params)
    from dsv4.text.chat import encode

    if engine.tokenizer is None:
        raise RequestError("the model folder has no tokenizer.json; --chat needs one")
    segments = encode([{"role": "user", "content": prompt}], thinking=thinking)
    return engine.request(engine.tokenizer.encode_prompt(segments), params)


def _stream(engine: "Engine", request: "Request") -> None:
    start, first, count, reason = time.perf_counter(), 0.0, 0, None
    for delta in engine.stream(request):
        first = first or time.perf_counter() - start
        count += 1
        reason = delta.finish_reason
        shown = delta.text if engine.tokenizer else f"{delta.token.id} " if delta.token else ""
        text(shown)
    out.print()
    rate = (count - 1) / max(1e-9, time.perf_counter() - start - first)
    err.print(
        f"[dim]{len(request.ids)} prompt tokens, first token after {first:.2f} s; "
        f"{count} tokens at {rate:.1f}/s; ended by {reason}[/]"
    )


def _shown(engine: "Engine", done: "Completion") -> str:
    return done.text if engine.tokenizer else " ".join(map(str, done.ids))


def _as_dict(request: "Request", done: "Completion") -> dict[str, Any]:
    value: dict[str, Any] = {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": len(done.tokens),
        "finish_reason": done.finish_reason,
        "seed": done.seed,
        "ids": done.ids,
        "text": done.text,
    }
    if request.params.logprobs is not None:
        value["logprobs"] = [
            {"id": t.id, "logprob": t.logprob, "top": [{"id": i, "logprob": p} for i, p in t.top]}
            for t in done.tokens
        ]
    return value


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(generate)
