"""Ready means ready: what is compiled at the start covers every launch of every prompt.

Here on a CPU: Triton's own launch code says which variant a launch wants, for a Hopper that is not there.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted functions have no variants", allow_module_level=True)

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import ModelConfig, preset
from dsv4.errors import DeviceError
from dsv4.gpu import tiles
from dsv4.gpu.ahead import check_triton, compile_ahead, noting
from dsv4.lab.synthetic import make_weights
from dsv4.model.bundle import Bundle, Numerics, Weights
from dsv4.model.model import Model
from dsv4.model.step import Step
from dsv4.model.warm import one_of_each, run_spans, spans
from dsv4.ops import Ops
from dsv4.ops.route import prefill as route
from dsv4.ops.rows import prefill as rows
from dsv4.quant.formats import Format
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.support.compiling import fake_hopper, triton

LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300)
STARTS = (0, 1, 3, 4, 125, 126, 127, 128, 500)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No CUDA C++ kernel runs; which experts are chosen is random, and so is how many tokens each gets."""
    r, choose = random.Random(5), route._choose

    def chosen(*arguments: Any) -> tuple[Tensor, Tensor]:
        ids, weights = choose(*arguments)
        experts = arguments[0].shape[1]
        few = r.sample(range(experts), r.randrange(ids.shape[1], experts + 1))
        rows = [r.sample(few, ids.shape[1]) for _ in range(ids.shape[0])]
        return torch.tensor(rows, dtype=ids.dtype), weights

    def unpacked(weight: Any, shape: tuple[int, ...], dtype: torch.dtype, parts: int) -> Tensor:
        return torch.empty(parts, *shape, dtype=dtype, device="meta")  # hundreds of megabytes elsewhere

    monkeypatch.setattr("dsv4.ops.linear.prefill_dense._unpacked", unpacked)
    monkeypatch.setattr("dsv4.ops.index.prefill.choose", lambda **arguments: None)
    monkeypatch.setattr(route, "_choose", chosen)
    with fake_hopper():
        yield


def build(config: ModelConfig, weights: Weights, dtype: torch.dtype, context: int) -> tuple[Model, Cache]:
    layout = CacheLayout(
        config=config,
        kv_format=Format.KV8,
        key_format=Format.MXFP4,
        rope_itemsize=dtype.itemsize,
        max_context=context,
        num_slots=3,
        num_mtp_layers=0,
    )
    bundle = Bundle(
        config, replace(weights, num_mtp_layers=0), Ops.choose("cuda"), Numerics(dtype, "a16", True)
    )
    return Model(bundle, context, "cpu"), Cache(layout, "cpu", dtype)


Keys = dict[tuple[str, str], str]


def launched(run: Callable[[], None]) -> Keys:
    """The variants that are launched, each with what it was specialised on."""
    found: Keys = {}
    with noting(lambda function, key, data: found.__setitem__((function.__name__, key), data)):
        run()
    return found


def check_covered(model: Model, cache: Cache, prompts: list[list[tuple[int, int, int]]]) -> Keys:
    """Each prompt step is a list of (slot, start, tokens)."""
    context = cache.layout.max_context
    warm = launched(lambda: run_spans(*one_of_each(model, cache), spans(model.config, context)))
    for prompt in prompts:

        def run(prompt: list[tuple[int, int, int]] = prompt) -> None:
            step = Step.build([(slot, start, [1] * count) for slot, start, count in prompt], "cpu")
            streams = model.forward(step, cache)
            ends = torch.tensor([count for _, _, count in prompt]).cumsum(0) - 1
            model.logits(streams[ends.tolist()])
            model.logits(streams[1:][:64])  # as a prompt's log-probabilities are taken

        late = launched(run).keys() - warm.keys()
        assert not late, f"{prompt}: compiled after the start: {sorted(late)}"
    return warm


def awkward(config: ModelConfig, context: int, lengths: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    topk = max(layer.ratio for layer in config.layers if layer.kind == "csa") * config.index_topk
    starts = (*STARTS, topk - 2, topk, topk + 3, context - 1, context - 300)
    pairs = [(s, n) for s in starts for n in lengths if 0 <= s <= context - n]
    pairs = random.Random(len(pairs)).sample(pairs, min(len(pairs), 16))
    one = [[(1, *pair)] for pair in [(0, 1), (0, 5), (topk, 1), *pairs]]
    several = [
        [(0, 0, 1), (1, 0, 1)],
        [(2, 127, 1), (0, 5, 1), (1, 3, 1)],
        [(0, 0, 17), (1, 128, 3), (2, topk, 16)],
        [(2, 0, 2), (1, topk + 1, 33)],
    ]
    return one + several


@pytest.mark.parametrize(
    ("format", "dtype"),
    [(name, torch.bfloat16) for name in ("modelopt", "official", "bf16")]
    + [("modelopt", torch.float32)]
    # Loaded, these are as modelopt.
    + [pytest.param(name, torch.bfloat16, marks=pytest.mark.slow) for name in ("ct", "hfnvfp4")],
)
def test_every_stored_format(checkpoint: Callable[..., Path], format: str, dtype: torch.dtype) -> None:
    opened = Checkpoint.open(checkpoint(format))
    model, cache = build(opened.config, load_tiled(opened, "cpu"), dtype, 1024)
    warm = check_covered(model, cache, awkward(opened.config, 1024, LENGTHS))
    assert len({name for name, _ in warm}) >= 16, "a kernel of prompts was not launched at all"


@pytest.mark.parametrize(
    ("name", "layout"),
    [("flash", "modelopt"), ("pro", "nvfp4")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("flash", "nvfp4"), ("pro", "modelopt"))],
)
def test_published_widths(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of every kind at the real widths, with a few experts and ids."""
    monkeypatch.setattr("dsv4.lab.synthetic._random", lambda *arguments: tiles.empty(*arguments[:-1]))
    whole = preset(name)
    layers = tuple({(layer.kind, layer.hash_routed): layer for layer in whole.layers}.values())
    config = replace(whole, layers=layers, num_experts=8, vocab_size=512, max_positions=8192)
    weights = make_weights(config, layout, "cpu")
    model, cache = build(config, weights, torch.bfloat16, 8192)
    check_covered(model, cache, awkward(config, 8192, (1, 17)))


def test_a_layer_of_its_own_format_is_warmed(checkpoint: Callable[..., Path]) -> None:
    """One layer's FP8 weights do not fit BF16: its products need variants that no other layer has."""
    opened = Checkpoint.open(checkpoint("official"))
    weights = load_tiled(opened, "cpu")
    name = f"layers.{opened.config.num_layers - 1}.attn.wkv"
    odd = {name: replace(weights.tensors[name], fits_bf16=False)}
    weights = replace(weights, tensors={**weights.tensors, **odd})
    model, cache = build(opened.config, weights, torch.bfloat16, 1024)
    few, _ = one_of_each(model, cache)
    assert few.blocks[-1] is model.blocks[-1]
    check_covered(model, cache, [[(0, 0, 5)], [(1, 200, 3)]])


@pytest.mark.parametrize("context", [3, 30, 128])
def test_a_short_context(checkpoint: Callable[..., Path], context: int) -> None:
    """Steps that cannot come are not compiled for, those of the very last token are."""
    opened = Checkpoint.open(checkpoint("modelopt"))
    model, cache = build(opened.config, load_tiled(opened, "cpu"), torch.bfloat16, context)
    starts = range(0, context, 1 + context // 12)
    warm = check_covered(model, cache, [[(0, start, context - start)] for start in starts])
    selects = context // 4 > opened.config.index_topk
    assert ("_scores_kernel" in {name for name, _ in warm}) == selects


def test_compiles_ahead_and_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))
    x, seen = torch.zeros(3, 64), []

    def run() -> None:
        rows.rms_norm(x, None, 1e-6)
        rows.rms_norm(x.bfloat16(), None, 1e-6)
        rows.rms_norm(x[:2], None, 1e-6)

    count = compile_ahead(run, lambda done, total, name: seen.append((done, total, name)))
    assert count == 2 and seen == [(1, 2, "_rows_kernel"), (2, 2, "_rows_kernel")]
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can launch here")
def test_a_machine_without_what_triton_needs_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    with pytest.raises(DeviceError, match=r"Triton 3\S* cannot launch kernels here .*use --device cpu"):
        check_triton()
