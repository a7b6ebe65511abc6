"""What a step takes on a CPU lies below its bound, and not far: memory that no step uses is not asked for."""

import itertools
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cache.layout import CacheLayout, most_drafts
from dsv4.config import Dspark, ModelConfig, preset
from dsv4.engine import memory
from dsv4.engine.memory import SAMPLED, largest_linear, reference_workspace
from dsv4.engine.settings import cache_layout
from dsv4.model.params import num_parts
from dsv4.model.step import SIZES, Span, Step, prompt_sizes
from dsv4.ops._exact import padded
from dsv4.ops.attention import cpu as attend
from dsv4.ops.experts import cpu as experts
from dsv4.ops.sample.cpu import HISTORY, choose, pack, pack_penalties
from dsv4.quant.formats import Format
from dsv4.step.buffers import graph_rows
from dsv4.weights.load import Checkpoint
from tests.support.checkpoints import SMALL, write_model
from tests.support.feeding import cache_of, claim


class Peak(TorchDispatchMode):
    """The most memory that results of operations took at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def drop(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            memory = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if memory is None or memory.data_ptr() in given or memory.data_ptr() in self.sizes:
                continue
            self.sizes[memory.data_ptr()] = memory.nbytes()
            weakref.finalize(memory, self.drop, memory.data_ptr())
            self.now += memory.nbytes()
            self.peak = max(self.peak, self.now)
        return result


def bound(engine: Engine, folder: Path) -> int:
    checkpoint, config, s = Checkpoint.open(folder), engine.config, engine.settings
    layout = cache_layout(checkpoint.config, s, config, checkpoint.inventory.num_mtp_layers)
    decoded = 0 if s.dense else largest_linear(source.param for source in checkpoint.inventory.sources)
    return reference_workspace(
        layout, s.chunk, decoded, drafts=most_drafts(checkpoint.config) if s.drafts is None else s.drafts
    )


# As in published models, each wider than a small model has it: what takes most differs.
WIDE = replace(
    preset("tiny"),
    hidden_size=512,
    num_heads=8,
    o_groups=8,
    o_rank=64,
    expert_width=256,
    num_experts=16,
    experts_per_token=4,
    index_heads=16,
    index_topk=128,
    num_mtp_layers=0,
)
LONG = {"chunk": 64, "max_context": 16384}
SHORT = {"chunk": 256, "max_context": 512}
# By the stage that takes most.
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "mixing": (preset("tiny"), {"chunk": 1024, "max_context": 2048}),
    "keys of runs": (replace(SMALL, index_topk=16), {"chunk": 64, "max_context": 512}),
    "queries": (replace(SMALL, num_heads=48), {"chunk": 256, "max_context": 256}),
    "experts": (WIDE, SHORT),
    "experts in BF16": (WIDE, {**SHORT, "compute_dtype": "bfloat16"}),
    "experts of a few rows": (replace(WIDE, num_experts=64, experts_per_token=8), {**SHORT, "chunk": 8}),
    "index scores": (WIDE, LONG),
    "index scores in BF16": (WIDE, {**LONG, "compute_dtype": "bfloat16"}),
    "index keys": (SMALL, {**LONG, "chunk": 1}),
    "a layer's weight": (WIDE, {**SHORT, "chunk": 1, "weights": "packed"}),
    "the head": (replace(WIDE, vocab_size=8192), {**SHORT, "chunk": 1, "weights": "packed"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_less_than_its_bound(case: str, tmp_path: Path) -> None:
    """At the end of the longest context."""
    shape, options = CASES[case]
    write_model(tmp_path / "model", "modelopt", shape)
    engine = Engine.load(tmp_path / "model", EngineConfig(max_batch=1, **{"weights": "dense", **options}))
    context, chunk = options["max_context"], options["chunk"]
    slot = claim(engine, context)
    peak = peak_of(engine, [(slot, context - chunk, [7 + i % 50 for i in range(chunk)])])
    ratio = bound(engine, tmp_path / "model") / peak
    assert 1 < ratio < (1.8 if case == "experts of a few rows" else 1.4), ratio


def peak_of(engine: Engine, spans: list[Span]) -> int:
    for _ in range(2):  # the first meets shapes that have to be measured
        with Peak() as step:
            streams = engine.model.forward(Step.build(spans, "cpu"), cache_of(engine))
            engine.model.logits(streams[-1:])
            del streams
    return step.peak


def test_sequences_that_all_close_a_block_take_less_than_the_bound(tmp_path: Path) -> None:
    """A decode step, at the end of a block of 128 tokens in every slot."""
    few = {"hidden_size": 64, "q_rank": 16, "num_heads": 3, "o_groups": 1, "index_heads": 1, "window": 8}
    shape = replace(SMALL, head_dim=512, experts_per_token=1, expert_width=32, vocab_size=64, **few)
    write_model(tmp_path / "model", "modelopt", shape)
    engine = Engine.load(
        tmp_path / "model", EngineConfig(max_batch=8, max_context=256, chunk=1, speculate="off")
    )
    spans = [(claim(engine, 256), 255, [7]) for _ in range(8)]
    assert 1 < bound(engine, tmp_path / "model") / peak_of(engine, spans) < 1.6


def test_a_window_longer_than_the_context_takes_no_more(tmp_path: Path) -> None:
    """Neither at the start nor in a step, that of the first token included."""
    with Peak() as start:
        write_model(tmp_path / "model", "modelopt", replace(SMALL, window=20000))
        config = EngineConfig(max_context=256, max_batch=1, prefix_snapshots=0)
        engine = Engine.load(tmp_path / "model", config)
    assert start.peak < 100 << 20
    with Peak() as step:
        engine.generate([[7] * 40], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert step.peak < bound(engine, tmp_path / "model") < 50 << 20


def test_a_drawn_token_takes_what_was_counted() -> None:
    rows, vocab = 8, 4096
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    wishes = pack(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, index=1, num_top=20, has_mask=True, penalties=0
    )
    mask = torch.full((rows, vocab // 32), -1, dtype=torch.int32)
    penalties = pack_penalties(presence=0.5, repetition=1.2, num_prompt=2, ids=[5, 6, 7, 8])
    with Peak() as step:
        choose(logits, torch.tensor([wishes] * rows), mask, torch.tensor([penalties], dtype=torch.int32))
    assert 0.98 < SAMPLED / (step.peak / logits.numel() + 4) < 1.05, step.peak / logits.numel()


@pytest.mark.parametrize("dspark", [None, Dspark(5, 3, (0, 1, 2), 16)], ids=["mtp", "dspark"])
def test_requests_of_all_kinds_stay_below(tmp_path: Path, dspark: Dspark | None) -> None:
    """A whole engine, with drafts: prompts whose tokens are scored, several sequences, all filters."""
    blocks = 1 if dspark is None else 3
    shape = replace(SMALL, vocab_size=2048, num_mtp_layers=blocks, dspark=dspark)
    write_model(tmp_path / "model", "modelopt", shape)
    config = EngineConfig(max_context=256, max_batch=3, chunk=64, speculate="2", prefix_snapshots=0)
    engine = Engine.load(tmp_path / "model", config)
    params = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, logprobs=5, prompt_logprobs=3, seed=1)
    prompts = [[5 + (i + j) % 500 for i in range(80)] for j in range(3)]
    for _ in range(2):
        with Peak() as step:
            engine.generate(prompts, params)
    assert 1 < bound(engine, tmp_path / "model") / step.peak < 1.7


def test_what_is_said_of_the_ops_is_so() -> None:
    assert (memory.RUN, memory.MASKS, memory.FEW) == (attend.BLOCK, attend.MASKS, experts.FEW)
    assert (HISTORY, SIZES[-1]) == (memory.HISTORY, memory.RECORDED)
    assert max(prompt_sizes(4096, spills=True)) == memory.RECORDED_SPILLED
    counts = (0, 1, 64, 256, 257, 600)
    assert [memory._padded(n) for n in counts] == [padded(n) for n in counts]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("model", ["flash", "pro", "tiny"])
def test_a_plan_is_never_below_what_an_engine_counts(model: str, ranks: int) -> None:
    """At every context and batch, and hardly above."""
    c = preset(model)
    ranks = min(ranks, num_parts(c))
    for context, batch in itertools.product((4096, 32768, c.max_positions), (1, 3, 8, 64)):
        layout = CacheLayout(c, Format.KV8, Format.MXFP4, 2, context, batch, c.num_mtp_layers, 64)
        for spills, whole in ((False, False), (False, True), (True, False)):
            plan = memory.planned_memory(0, layout, 4096, False, spills, ranks).total
            kinds = {"spills": spills, "ranks": ranks, "whole_experts": whole}
            rows = graph_rows(batch)
            engine = memory.gpu_memory(0, layout, torch.bfloat16, rows, 4096, **kinds).total
            assert engine <= plan < engine + (150 << 20), (context, batch, engine, plan)
