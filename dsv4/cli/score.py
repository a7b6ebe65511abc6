"""`dsv4 score`: logits of given ids, or bits per byte of a text."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dsv4.cli.options import engine_options
from dsv4.cli.show import count_bar, err, load_engine, out, print_json
from dsv4.config import EngineConfig
from dsv4.errors import ConfigError, RequestError

EPILOG = """
[bold]Examples[/]
  dsv4 score --text story.txt
  dsv4 score ./model --text story.txt --activations a8 --json
  dsv4 score ./model --ids ids.safetensors --prompt-len 300 --logits out.safetensors --chunk 64 --mtp
  dsv4 score ./model --ids ids.safetensors --prompt-len 9 --logits out.safetensors --draft-logits --walk 0/3
"""


@engine_options
def score(
    model: Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")] = None,
    ids: Annotated[Path | None, typer.Option(help="safetensors file with a tensor `ids` [T]")] = None,
    prompt_len: Annotated[
        int | None, typer.Option(help="how many ids are the prompt; the rest go one by one")
    ] = None,
    logits: Annotated[Path | None, typer.Option(help="safetensors file to write the logits to")] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="also write the draft block's logits")] = False,
    draft_logits: Annotated[
        bool, typer.Option("--draft-logits", help="also write what is drafted after the positions `anchors`")
    ] = False,
    walk: Annotated[
        str | None,
        typer.Option(
            metavar="A/K,...", help="verify K drafts a step, of which A are right, after the prompt"
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="text file (UTF-8) to measure")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Run given tokens through the model: write logits (--ids), or measure a text (--text)."""
    if (ids is None) == (text is None):
        raise RequestError("give either --ids with --prompt-len and --logits, or --text")
    if text is not None:
        if logits is not None or mtp or draft_logits or walk or prompt_len is not None:
            raise RequestError(
                "--logits, --prompt-len, --mtp, --draft-logits and --walk go with --ids, not with --text"
            )
        _score_text(model, text, json, config)
        return
    if prompt_len is None or logits is None:
        raise RequestError("--ids needs --prompt-len N and --logits OUT.safetensors")
    assert ids is not None
    if not logits.parent.is_dir() or logits.is_dir():
        raise ConfigError(f"--logits {logits}: expected the name of a file in an existing folder")
    from dsv4.lab.score import Anchors, parse_walk, read_ids, score_ids, write_logits

    given, steps = read_ids(ids), parse_walk(walk) if walk else []
    anchors = Anchors.read(ids) if draft_logits else None
    if config.max_context is None:
        config = replace(config, max_context=max(1, len(given)))
    engine = load_engine(model, replace(config, max_batch=1))
    with count_bar("scoring") as update:
        result = score_ids(engine, given, prompt_len, mtp, update, anchors, steps)
    write_logits(logits, result)
    shapes = {name: list(value.shape) for name, value in result.items()}
    if json:
        print_json({"logits": str(logits), "shapes": shapes})
    else:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        out.print(f"{logits}: {listed}", markup=False)


def _score_text(model: Path | None, path: Path, json: bool, config: EngineConfig) -> None:
    from dsv4.disk import read_text
    from dsv4.lab.score import score_text

    content = read_text(path)
    engine = load_engine(model, replace(config, max_batch=1))
    with count_bar("scoring") as update:
        result = score_text(engine, content, update)
    if json:
        print_json(result.as_dict())
        return
    out.print(f"tokens          {result.tokens:>12,}")
    out.print(f"nats per token  {result.nats_per_token:>12.4f}")
    out.print(f"perplexity      {result.perplexity:>12.4f}")
    out.print(f"bits per byte   {result.bits_per_byte:>12.4f}")
    if result.tokens > engine.settings.max_context:
        err.print(
            f"[dim]measured in pieces of {engine.settings.max_context} tokens, each from the start token[/]"
        )
