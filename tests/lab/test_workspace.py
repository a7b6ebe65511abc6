"""What a step takes on a CPU is what was counted, or a little less: nobody is refused for memory that no step
uses, and no step takes what nobody counted."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, write_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.config import preset
from dsv4.engine.memory import largest_linear
from dsv4.engine.settings import cache_layout
from dsv4.engine.workspace import SAMPLED, Workspace
from dsv4.model.step import Step
from dsv4.ops.sample.cpu import choose, pack, pack_penalties
from dsv4.weights.load import Checkpoint
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


def workspace(engine: Engine, folder: Path) -> Workspace:
    checkpoint, config, s = Checkpoint.open(folder), engine.config, engine.settings
    layout = cache_layout(checkpoint.config, s, config, checkpoint.inventory.num_mtp_layers)
    decoded = 0 if s.dense else largest_linear(source.param for source in checkpoint.inventory.sources)
    return Workspace.of(layout, s.chunk, decoded, drafts=s.num_drafts)


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
STAGES = ("mixing", "pooling", "selection", "attention", "projection", "experts")
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "mixing": ("mixing", preset("tiny"), {"chunk": 1024, "max_context": 2048}),
    "keys of runs": ("attention", replace(SMALL, index_topk=16), {"chunk": 64, "max_context": 512}),
    "queries": ("attention", replace(SMALL, num_heads=48), {"chunk": 256, "max_context": 256}),
    "experts": ("experts", WIDE, {"chunk": 256, "max_context": 512}),
    "experts in BF16": (
        "experts",
        WIDE,
        {"chunk": 256, "max_context": 512, "compute_dtype": "bfloat16"},
    ),
    "index scores": ("selection", WIDE, {"chunk": 64, "max_context": 16384}),
    "index keys": ("selection", SMALL, {"chunk": 1, "max_context": 16384}),
    "a layer's weight": ("projection", WIDE, {"chunk": 1, "max_context": 512, "weights": "packed"}),
    "the head": (
        "logits",
        replace(WIDE, vocab_size=8192),
        {"chunk": 1, "max_context": 512, "weights": "packed"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_was_counted(case: str, tmp_path: Path) -> None:
    """One for each stage that can take most; at the end of the longest context."""
    leading, shape, options = CASES[case]
    write_model(tmp_path / "model", "modelopt", shape)
    engine = Engine.load(tmp_path / "model", EngineConfig(max_batch=1, **{"weights": "dense", **options}))
    context, chunk = options["max_context"], options["chunk"]
    slot, model = claim(engine, context), engine.model
    for _ in range(2):  # the first meets shapes that have to be measured
        with Peak() as step:
            span = (slot, context - chunk, [7 + i % 50 for i in range(chunk)])
            streams = model.forward(Step.build([span], "cpu"), cache_of(engine))
            model.logits(streams[-1:])
            del streams
    # Sampling is none of the model's, and masks are there before.
    counted = replace(workspace(engine, tmp_path / "model"), rows=0)
    takes = {name: counted.tokens * counted.alive + getattr(counted, name) for name in STAGES}
    takes["logits"] = counted.logits
    assert max(takes, key=takes.__getitem__) == leading, takes
    ratio = (counted.num_bytes - counted.masks) / step.peak
    assert 1 < ratio < 1.15, f"counted {counted.num_bytes:,}, taken {step.peak:,}"


def test_a_window_longer_than_the_context_takes_no_more(tmp_path: Path) -> None:
    """Neither at the start nor in a step, that of the first token included."""
    with Peak() as start:
        write_model(tmp_path / "model", "modelopt", replace(SMALL, window=20000))
        config = EngineConfig(max_context=256, max_batch=1, prefix_snapshots=0)
        engine = Engine.load(tmp_path / "model", config)
    assert start.peak < 100 << 20
    with Peak() as step:
        engine.generate([[7] * 40], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert step.peak < workspace(engine, tmp_path / "model").num_bytes < 50 << 20


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


def test_requests_of_all_kinds_stay_below(tmp_path: Path) -> None:
    """A whole engine, with drafts: prompts whose tokens are scored, several sequences, all filters."""
    write_model(tmp_path / "model", "modelopt", replace(SMALL, vocab_size=2048))
    config = EngineConfig(max_context=256, max_batch=3, chunk=64, drafts=2, prefix_snapshots=0)
    engine = Engine.load(tmp_path / "model", config)
    params = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, logprobs=5, prompt_logprobs=3, seed=1)
    prompts = [[5 + (i + j) % 500 for i in range(80)] for j in range(3)]
    for _ in range(2):
        with Peak() as step:
            engine.generate(prompts, params)
    counted = workspace(engine, tmp_path / "model").num_bytes
    assert 1 < counted / step.peak < 1.5, f"counted {counted:,}, taken {step.peak:,}"
