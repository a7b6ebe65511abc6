"""`dsv4 generate`: prompts in, continuations out."""

import os.path
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli.clock import Stopwatch
from dsv4.cli.options import engine_options
from dsv4.cli.show import count_bar, err, load_engine, out, print_json, text
from dsv4.config import EngineConfig
from dsv4.errors import RequestError

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine
    from dsv4.engine.request import Completion, FinishReason, Request, SamplingParams

EPILOG = """
[bold]Examples[/]
  dsv4 generate "Once upon a time" --max-tokens 64 --temperature 0
  dsv4 generate --chat "What is 27 + 58?" --thinking --stats
  dsv4 generate "first prompt" "second prompt" --model ./model --json
  dsv4 generate --ids 0,17,42 --model ./model --temperature 0 --logprobs 3 --json
"""


@engine_options
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="one or more prompts, run together")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="model folder; default: the embedded model")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option(help="a prompt as token ids, e.g. 0,17,42; repeatable")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="send each prompt as a user message")] = False,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="with --chat: let the model think first")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="length of an answer; default: until the context is full")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="keep the N likeliest tokens; 0: all")] = 0,
    top_p: Annotated[
        float, typer.Option(help="keep the likeliest tokens that together have this probability")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="drop tokens less likely than this share of the likeliest")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="subtracted once from every token already present")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="subtracted per earlier occurrence")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="above 1 makes seen tokens (prompt included) less likely")
    ] = 1.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="added to a token's logit, e.g. 17=-100; repeatable")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="default: a new one each time")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; repeatable")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="end after this token id; repeatable")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="go on after the end-of-text token")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="log-probabilities with this many alternatives")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object per prompt")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="show the time from the program's start to the first token")
    ] = False,
    *,
    config: EngineConfig,
) -> None:
    """Continue one or more prompts. A single prompt is streamed, unless log-probabilities are asked for."""
    from dsv4.engine.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop_ids=tuple(stop_id or ()),
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_parse_biases(logit_bias or []),
    )
    if thinking and not chat:
        raise RequestError("--thinking goes with --chat; a plain prompt is continued as it is")
    if not prompts and not ids:
        raise RequestError('no prompt given; pass one in quotes, or token ids with --ids "0,17,42"')
    for prompt in prompts or () if model is None else ():
        if os.path.isfile(os.path.join(prompt, "config.json")):
            raise RequestError(f"the prompt {prompt!r} is a model folder; name the model with --model")
    # Before a model is loaded, which may take minutes.
    parsed = [_parse_ids(given) for given in ids or []]
    engine = load_engine(model, config)
    requests = [_text_request(engine, prompt, params, chat, thinking) for prompt in prompts or []]
    requests += [engine.request(given, params) for given in parsed]
    watch = Stopwatch(sum(len(request.ids) for request in requests))
    if len(requests) == 1 and not json and logprobs is None:
        reason = _stream(engine, requests[0], watch, (thinking if chat and not stop else None))
        speed = watch.since_start(engine.num_accepted, engine.num_drafted) if stats else watch.since_prompt()
        err.print(f"[dim]{speed}; ended by {reason}[/]")
        return
    completions = _complete(engine, requests, watch)
    for request, done in zip(requests, completions, strict=True):
        if json:
            print_json(_as_dict(request, done))
            continue
        text((done.text if engine.tokenizer else " ".join(map(str, done.ids))) + "\n")
        for token in done.tokens if logprobs is not None else ():
            others = "".join(f"  {id}:{logprob:.4f}" for id, logprob in token.top)
            text(f"{token.id:>7} {token.logprob:9.4f} {others}\n")
        text("\n")
    if stats:
        err.print(f"[dim]{watch.since_start(engine.num_accepted, engine.num_drafted)}[/]")


def _parse_ids(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found:
        raise RequestError(f"--ids {text!r}: expected numbers separated by commas, e.g. 0,17,42")
    return found


def _parse_biases(texts: list[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for given in texts:
        id, _, bias = given.partition("=")
        try:
            number, value = int(id), float(bias)
        except ValueError:
            raise RequestError(
                f"--logit-bias {given!r}: expected a token id and a number, e.g. 17=-100"
            ) from None
        if number in found:
            raise RequestError(
                f"--logit-bias {given!r}: token {number} has a bias already; give one for each"
            )
        found[number] = value
    return found


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


def _stream(
    engine: "Engine", request: "Request", watch: Stopwatch, thinking: bool | None
) -> "FinishReason | None":
    """Show the tokens as they come; `thinking` is None where the text is shown as it is, without markup."""
    from dsv4.cli.answer import Answer

    answer = Answer(engine.tokenizer, thinking) if engine.tokenizer and thinking is not None else None
    reason: FinishReason | None = None
    for delta in engine.stream(request):
        reason = delta.finish_reason
        watch.count()
        if answer and delta.token:
            answer.push(delta.token.id)
        else:
            text(delta.text if engine.tokenizer else f"{delta.token.id} " if delta.token else "")
    if answer:
        answer.finish(reason == "stop")
    else:
        out.print()
    return reason


def _complete(engine: "Engine", requests: "list[Request]", watch: Stopwatch) -> "list[Completion]":
    """All of them together; nothing is printed before the last is done, so a bar says how many are."""
    with ExitStack() as stack:
        update = stack.enter_context(count_bar("generating"))
        streams = [stack.enter_context(engine.stream(request)) for request in requests]
        update(0, len(requests))
        while engine.num_unfinished:
            deltas = engine.step()
            watch.count(len(deltas))
            if any(delta.finish_reason for delta in deltas):
                update(len(requests) - engine.num_unfinished, len(requests))
        return [stream.completion() for stream in streams]


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
