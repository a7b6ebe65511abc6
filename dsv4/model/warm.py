"""Makes a model ready before the first request: every kernel of prompts compiled and loaded."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.config import ModelConfig
from dsv4.gpu import build
from dsv4.gpu.ahead import Compiled, compile_ahead
from dsv4.gpu.tiles import Bank, Tiled
from dsv4.model.model import Model
from dsv4.model.prompt import Prompt
from dsv4.model.step import Step


def spans(config: ModelConfig, max_context: int) -> list[tuple[int, int]]:
    """(start position, tokens) of prompt steps that between them launch every variant of every kernel.

    One token that closes no block and sees no entry; for each layer kind two, of which the first closes its
    first block; and, where contexts get that long, two that see more entries than an indexer selects.
    """
    starts = {layer.ratio - 1 for layer in config.layers if layer.ratio}
    starts |= {layer.ratio * (config.index_topk + 1) - 1 for layer in config.layers if layer.kind == "csa"}
    return [
        (0, 1),
        *((start, min(2, max_context - start)) for start in sorted(starts) if start < max_context),
    ]


def one_of_each(model: Model, cache: Cache) -> tuple[Model, Cache]:
    """The model and its cache cut down to the first of all layers that launch the same variants."""
    first: dict[tuple[object, ...], int] = {}
    for number, block in enumerate(model.blocks):
        first.setdefault((block.attention.spec, *_weights(block)), number)
    small, its_cache = copy.copy(model), copy.copy(cache)
    small.blocks, small.staging = [model.blocks[number] for number in first.values()], None
    its_cache.layers = [cache.layers[number] for number in first.values()]
    its_cache.layers += cache.layers[len(model.blocks) :]
    if dspark := model.config.dspark:  # which taps the first layer as often as it has targets
        taps = replace(dspark, target_layers=(0,) * len(dspark.target_layers))
        small.config = replace(model.config, dspark=taps)
    return small, its_cache


def _weights(part: object) -> Iterator[tuple[object, ...]]:
    """What a launch can depend on, of every weight in this part of a model."""
    if isinstance(part, Tensor):
        yield part.dtype, part.shape
    elif isinstance(part, Tiled):
        yield part.format, part.shape, part.count, part.halves, part.fits_bf16, part.fits_fp8
    elif isinstance(part, list | tuple):
        for item in part:
            yield from _weights(item)
    elif isinstance(part, Bank) or type(part).__module__.startswith("dsv4.model."):
        for item in vars(part).values():
            yield from _weights(item)


def run_spans(model: Model, cache: Cache, steps: list[tuple[int, int]]) -> None:
    """Each as one prompt step of slot 0, on token 0, with the last row's logits."""
    for start, count in steps:
        step = Step.build([(0, start, [0] * count)], cache.page_table.device)
        model.logits(model.read(step, cache)[-1:])


@torch.inference_mode()
def warm_up(
    model: Model,
    cache: Cache,
    chunk: int,
    decode: Callable[[], None] | None = None,
    sizes: Sequence[int] = (),
    progress: Compiled | None = None,
) -> int:
    """Load the CUDA kernels, compile and load all Triton kernels, then run prompts, up to `chunk` tokens.

    For an engine in which nothing runs yet: slot 0 and page 0 are written to, as by a sequence that ended.
    `decode` launches every decode step once, on padding; its kernels are compiled with the others, and so are
    those of prompt steps of fixed `sizes`. The last prompt takes as much memory as any can: too little shows
    here. -> variants compiled, or found on disk.
    """
    max_context = cache.layout.max_context
    steps, small = spans(model.config, max_context), one_of_each(model, cache)

    def prompts() -> None:
        run_spans(*small, steps)
        for size in sizes:
            Prompt(*small, size).run()

    def everything() -> None:
        prompts()
        if decode is not None:
            decode()

    build.load_all(cache.page_table.device)
    num_kernels = compile_ahead(everything, progress)
    prompts()
    run_spans(model, cache, [(0, min(chunk, max_context))])
    torch.cuda.synchronize(cache.page_table.device)
    return num_kernels
