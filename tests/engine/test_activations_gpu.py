"""`--activations a8` and `a4` through the GPU's kernels: as near to the CPU as rounding allows, and no bit
depends on company, graphs or chunks."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_engine_gpu import engine_on_gpu, prompts

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.lab.score import score_ids, score_text
from tests.golden.test_golden import MARKS, check, folder

pytestmark = pytest.mark.gpu
ROUNDED = pytest.mark.parametrize("activations", ["a8", "a4"])


def test_golden_a8() -> None:
    """The official code's own arithmetic, at the CPU's marks."""
    expected = load_file(folder("official") / "expected_a8.safetensors")
    config = EngineConfig(
        device="cuda", compute_dtype="float32", activations="a8", chunk=300, max_batch=1, max_context=512
    )
    engine = Engine.load(folder("official"), config)
    assert engine.settings.tiled
    got = score_ids(engine, expected["ids"].tolist(), 300)
    for name in got:
        check(got[name].cpu(), expected[name], MARKS["a8"], f"official a8 {name}")


def test_golden_a8_in_bfloat16() -> None:
    """Prompts on FP8 tensor cores: as near to the official code as the CPU is in bfloat16."""
    expected = load_file(folder("official") / "expected_a8.safetensors")
    ids, medians = expected["ids"].tolist(), list[float]()
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            device=device,
            compute_dtype="bfloat16",
            activations="a8",
            chunk=300,
            max_batch=1,
            max_context=512,
        )
        got = score_ids(Engine.load(folder("official"), config), ids, 300)["prefill_logits"].cpu()
        want = expected["prefill_logits"]
        medians.append(((got - want).norm(dim=1) / want.norm(dim=1)).median().item())
    print(medians)
    assert medians[1] <= 1.3 * medians[0] + 1e-3, medians


@ROUNDED
@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("format", ["official", "modelopt", "hfnvfp4"])
def test_nearer_to_the_cpu_than_unrounded_inputs_are(
    checkpoint: Callable[..., Path], format: str, generated: bool, activations: str
) -> None:
    """In float32. A value at a tie may fall to either side, so the distance is held against what the rounding
    itself does. `generated`: through the decode step instead of the prompt's kernels."""
    ids = (prompts(1, 300, 90)[0] * 90)[:90]

    def logits(device: str, how: str) -> torch.Tensor:
        config = EngineConfig(
            device=device,
            compute_dtype="float32",
            activations=how,
            max_context=512,
            max_batch=1,  # type: ignore[arg-type]
        )
        engine = Engine.load(checkpoint(format), config)
        assert engine.settings.tiled == (device == "cuda")
        found = score_ids(engine, ids, 1 if generated else len(ids))
        return found["decode_logits" if generated else "prefill_logits"].cpu()

    want, got, plain = logits("cpu", activations), logits("cuda", activations), logits("cpu", "a16")
    size = want.norm(dim=1)
    found, rounding = ((other - want).norm(dim=1) / size for other in (got, plain))
    print(format, activations, f"median {found.median():.1e}, a16 {rounding.median():.1e}")
    assert found.median() <= 0.3 * rounding.median()


@ROUNDED
def test_company_graphs_and_overlap_change_nothing(checkpoint: Callable[..., Path], activations: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)
    requests, results = prompts(5, 300), []
    for no_graph, no_overlap in product((False, True), repeat=2):
        engine = engine_on_gpu(
            checkpoint("modelopt"),
            max_batch=4,
            activations=activations,
            no_graph=no_graph,
            no_overlap=no_overlap,
        )
        results.append([c.tokens for c in engine.generate(requests, params)])
        results.append([engine.generate([ids], params)[0].tokens for ids in requests])
    assert all(result == results[0] for result in results)


@ROUNDED
def test_bits_per_byte_are_the_cpus(activations: str) -> None:
    """Of the embedded model, in float32: rounding may fall to the other side of a tie now and then."""
    text = Path(__file__).parents[1].joinpath("data", "story.txt").read_text()
    found = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            device=device,
            compute_dtype="float32",
            activations=activations,  # type: ignore[arg-type]
            max_context=512,
            max_batch=1,
        )
        found.append(score_text(Engine.load(None, config), text).bits_per_byte)
    print(activations, found)
    assert abs(found[0] - found[1]) <= 0.01 * found[0]


@ROUNDED
@pytest.mark.parametrize("format", ["modelopt", "official"])
def test_chunks_change_nothing(checkpoint: Callable[..., Path], format: str, activations: str) -> None:
    ids = (prompts(1, 300, 90)[0] * 300)[:300]
    runs = []
    for chunk in (300, 64, 37, 7, 1):
        engine = engine_on_gpu(
            checkpoint(format), max_batch=1, activations=activations, chunk=chunk, max_context=512
        )
        runs.append(score_ids(engine, ids, 300)["prefill_logits"])
    assert all(torch.equal(runs[0], run) for run in runs[1:])
