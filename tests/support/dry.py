"""A decode step planned without a GPU: real launches of a real model's sizes, none of which runs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.cache.store import Cache
from dsv4.config import Activations, ModelConfig
from dsv4.kernels.common import quantize
from dsv4.kernels.common.tiles import Tiled, empty
from dsv4.kernels.decode import attend, attention, choose, index, matvec, mhc, prepare, sample
from dsv4.lab import synthetic
from dsv4.lab.bench.decode import Wanted
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.decode import Decoder
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.quant.formats import Format

MULTIPROCESSORS = 132


def _unmade(
    format: Format, shape: tuple[int, int], count: int, halves: int, device: str, generator: Any
) -> Tiled:
    return empty(format, shape, count, halves, "meta")


def planned(
    c: ModelConfig,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    context: int = 600,
    layout: str = "modelopt",
    activations: Activations = "a16",
) -> Decoder:
    """The step, each launch planned and asked for once: whatever a launcher asserts has been asserted."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, major=9, minor=0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
        patch.setattr(synthetic, "_random", _unmade)
        for module in (prepare, index, attend, quantize):
            patch.setattr(module, "launch", lambda kernel, grid, num_warps, overlap, **arguments: None)
        for module in (mhc, choose, matvec, sample, attention, index, quantize):
            patch.setattr(module, "call", lambda *arguments, **how: None)
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        bundle = Bundle(c, synthetic.make_weights(c, layout, "cpu"), ops, Numerics(dtype, activations, True))
        stored = replace(Wanted(context, rows).layout(c), rope_itemsize=dtype.itemsize)
        model = Model(bundle, stored.max_context, "cpu")
        decoder = Decoder(bundle, model, Cache(stored, "cpu", dtype), rows)
        for launch in decoder.launches:
            launch.run()
    return decoder
