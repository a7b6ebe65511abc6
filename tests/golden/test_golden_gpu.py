"""The golden models on a GPU, through its own kernels, at the same marks as on the CPU (float32, a16)."""

import pytest
import torch
from safetensors.torch import load_file

from dsv4 import Engine, EngineConfig
from dsv4.lab.score import score_ids
from tests.golden.test_golden import FORMATS, MARKS, check, folder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", FORMATS)
def test_marks(format: str) -> None:
    expected = load_file(folder(format) / "expected_a16.safetensors")
    config = EngineConfig(device="cuda", compute_dtype="float32", chunk=300, max_batch=1, max_context=512)
    engine = Engine.load(folder(format), config)
    assert engine.settings.tiled
    got = score_ids(engine, expected["ids"].tolist(), 300)
    for name in got:
        check(got[name].cpu(), expected[name], MARKS["a16"], f"{format} {name}")


@pytest.mark.parametrize("format", FORMATS)
def test_bfloat16_is_as_close_to_the_reference_as_the_cpu(format: str) -> None:
    """In bfloat16 every rounding may fall to the other side; the distance from float32 must not grow."""
    expected = load_file(folder(format) / "expected_a16.safetensors")
    ids, medians = expected["ids"].tolist(), list[list[float]]()
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            device=device, compute_dtype="bfloat16", chunk=300, max_batch=1, max_context=512
        )
        got = score_ids(Engine.load(folder(format), config), ids, 300)
        medians.append([])
        for name in got:
            r = (got[name].cpu() - expected[name]).norm(dim=1) / expected[name].norm(dim=1)
            medians[-1].append(r.median().item())
    print(format, medians)
    for cpu, cuda in zip(*medians, strict=True):
        assert cuda <= 1.3 * cpu + 1e-3, medians


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_change_nothing(dtype: str) -> None:
    expected = load_file(folder("official") / "expected_a16.safetensors")
    ids, runs = expected["ids"].tolist(), []
    for chunk in (300, 64, 37):
        config = EngineConfig(device="cuda", compute_dtype=dtype, chunk=chunk, max_batch=1, max_context=512)
        runs.append(score_ids(Engine.load(folder("official"), config), ids, 300))
    for other in runs[1:]:
        for name in runs[0]:
            assert torch.equal(runs[0][name], other[name]), name
