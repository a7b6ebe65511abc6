"""The embedded model's sizes run the launches of a published model, and none of the general kernels."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.config import ModelConfig, preset
from dsv4.engine.sizes import check_sizes
from dsv4.model.params import declare
from dsv4.ops.attention import decode as attention
from dsv4.ops.index import decode as index
from dsv4.ops.index import prefill_queries as queries
from dsv4.step.run import Decoder
from recipes.tiny.train import model_config
from recipes.tiny.twin import stored_bytes
from tests.support.dry import planned

CONFIG = model_config(4096)
CONTEXT = 4096
MOST_BYTES = 28_000_000


def launches(c: ModelConfig) -> set[str]:
    """The names of a decode step's launches; a prompt is planned too."""
    decoder: Decoder = planned(c, 1, context=CONTEXT, layout="nvfp4", prompts=(700,))
    assert decoder.buffers.attends_in_one and decoder.buffers.selects
    return {launch.name for launch in decoder.launches}


def test_a_step_makes_the_launches_of_a_published_model() -> None:
    check_sizes(CONFIG, CONFIG.max_positions)
    flash = preset("flash")
    flash = replace(flash, layers=tuple(dict.fromkeys(CONFIG.layers)), vocab_size=512, index_topk=256)
    want, got = launches(flash), launches(CONFIG)
    assert got == want, got ^ want


def test_sizes_are_those_of_the_special_kernels() -> None:
    c = CONFIG
    assert (c.head_dim, c.rope_dim) == (attention.WIDTH, attention.ROPE)
    assert (c.index_heads, c.index_dim) == (index.HEADS, index.WIDTH)
    assert c.index_dim == queries.WIDTH and c.num_heads in (8, 16)
    kinds = {(layer.kind, layer.ratio) for layer in c.layers}
    assert kinds == {("sliding", 0), ("csa", 4), ("hca", 128)}
    assert {layer.hash_routed for layer in c.layers} == {True, False} and c.num_mtp_layers == 1


def test_it_is_small() -> None:
    assert sum(stored_bytes(param) for param in declare(CONFIG, CONFIG.num_mtp_layers)) <= MOST_BYTES
