"""A small model as the bench has it: weights of its own, and the list of launches of its step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.cache.store import Cache
from dsv4.config import preset
from dsv4.gpu.tiles import Bank, Tiled
from dsv4.lab.bench.decode import Wanted
from dsv4.lab.bench.subject import DTYPE
from dsv4.lab.synthetic import make_weights
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.quant.formats import QuantTensor
from dsv4.step.run import Decoder

TINY = preset("tiny")


def size_of(value: Any) -> int:
    if isinstance(value, Bank):
        return value.w13.num_bytes + value.w2.num_bytes
    if isinstance(value, Tiled | QuantTensor):
        return value.num_bytes
    return value.numel() * value.element_size()


def tiny_bundle(layout: str = "modelopt") -> Bundle:
    ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
    return Bundle(TINY, make_weights(TINY, layout, "cpu"), ops, Numerics(DTYPE, "a16", True))


def tiny_decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The real list of launches; none can be launched here."""
    sizes = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    bundle, layout = tiny_bundle(), Wanted(600).layout(TINY)
    cache = Cache(layout, "cpu", DTYPE)
    return Decoder(bundle, Model(bundle, layout.max_context, "cpu"), cache, 1)
