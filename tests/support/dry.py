"""Decode and prompt steps planned without a GPU: real launches of a real model's sizes, none of which runs,
over tensors that have no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from bench.echo import Echo, echo_peers
from dsv4.cache.store import Cache
from dsv4.config import Activations, ModelConfig
from dsv4.gpu import architectures, tiles
from dsv4.gpu.build import HOPPER
from dsv4.lab import synthetic
from dsv4.lab.bench.decode import Wanted
from dsv4.lab.synthetic import num_stages
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.model.prompt import Prompt
from dsv4.model.warm import run_spans
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.attention import decode as attention
from dsv4.ops.attention import decode_any, prepare
from dsv4.ops.attention import prefill_sm90 as prompt_attention
from dsv4.ops.draft import decode as draft
from dsv4.ops.draft import round as rounds
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.index import decode as index
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.index import prefill_queries as queries
from dsv4.ops.linear import decode as matvec
from dsv4.ops.linear import prefill_product as product
from dsv4.ops.linear import prefill_unpack as unpack
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.mhc import prefill_sm90 as streams
from dsv4.ops.route import decode as routing
from dsv4.ops.rows import quantize
from dsv4.ops.sample import decode as sample
from dsv4.parallel.mesh import Mesh
from dsv4.quant.formats import Format
from dsv4.step.round import Round
from dsv4.step.run import Decoder

MULTIPROCESSORS = 132
CUDA = (mhc, routing, selecting, matvec, sample, attention, index, exchange, quantize)
CUDA += (product, prompt_attention, queries, streams, unpack)


def _unmade(format: Format, shape: tuple[int, int], count: int, halves: int, *_: Any) -> tiles.Tiled:
    return tiles.empty(format, shape, count, halves, "meta")


def _values(*shape: Any, dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _address(tensor: Tensor) -> int:
    return 4096 + tensor.storage_offset() * tensor.element_size()


def _list(tensor: Tensor) -> list[int]:
    """Where prompts ask how many tokens an expert has: all of them are the first's."""
    return [1] + [0] * (tensor.numel() - 1)


@contextmanager
def _unlaunched(multiprocessors: int, capability: int) -> Iterator[None]:
    """Inside, every tensor is one of such a GPU, and no kernel runs."""
    sizes = SimpleNamespace(multi_processor_count=multiprocessors)
    nothing = lambda *arguments, **how: None  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
        patch.setattr(architectures, "capability", lambda device: capability)
        for module in (product, prompt_attention, streams):
            patch.setattr(module, "architecture", lambda device: HOPPER if capability == 90 else "")
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        patch.setattr(torch.Tensor, "data_ptr", _address, raising=False)
        patch.setattr(torch.Tensor, "tolist", _list, raising=False)
        for module in (prepare, index, decode_any, quantize, draft, rounds):
            patch.setattr(module, "launch", nothing)
        for module in CUDA:
            patch.setattr(module, "call", nothing)
        patch.setattr(triton.runtime.jit.JITFunction, "run", nothing)
        yield


def planned(
    c: ModelConfig,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    context: int = 600,
    layout: str = "modelopt",
    activations: Activations = "a16",
    capability: int = 90,
    multiprocessors: int = MULTIPROCESSORS,
    ranks: int = 1,
    prompts: tuple[int, ...] = (),
) -> Decoder:
    """The step, each launch planned and asked for once: whatever a launcher asserts has been asserted. Then
    steps of prompts of so many tokens, at the beginning and the end of the context. With DSpark also a round
    of speculation in which each of the rows verifies a whole block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_random", _unmade)
        patch.setattr(torch, "randn", _values)
        patch.setattr(torch, "randint", lambda low, high, shape, **_: _values(shape, dtype=torch.long))
        with _unlaunched(multiprocessors, capability):
            blocks = num_stages(c)
            weights = synthetic.make_weights(c, layout, "cpu", ranks=ranks, draft_blocks=blocks)
    with _unlaunched(multiprocessors, capability):
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        mesh = Mesh() if ranks == 1 else Mesh(0, ranks, Echo(ranks))
        bundle = Bundle(c, weights, ops, Numerics(dtype, activations, True), mesh)
        stored = Wanted(context, rows).layout(c)
        stored = replace(stored, rope_itemsize=dtype.itemsize, num_mtp_layers=blocks)
        model, cache = Model(bundle, stored.max_context, "meta"), Cache(stored, "meta", dtype)
        peers = None if ranks == 1 else echo_peers(c, ranks, rows, torch.device("meta"))
        decoder = Decoder(bundle, model, cache, rows, peers=peers)
        for launch in decoder.launches:
            launch.run()
        if model.dspark is not None and c.dspark is not None:
            most = c.dspark.block_size
            state, costs = (
                rounds.state_of(stored.num_slots, most, "meta"),
                torch.ones(most + 1, device="meta"),
            )
            Round(bundle, model, cache, rows, most, state, costs).run()
        for tokens in prompts:
            last = max(0, stored.max_context - tokens)
            run_spans(model, cache, [(start, min(tokens, stored.max_context - start)) for start in (0, last)])
            if ranks == 1:
                Prompt(model, cache, tokens).run()
    return decoder
