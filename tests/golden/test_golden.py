"""Logits that the official reference computation gave for tiny models, in five checkpoint formats.

One model lies in tests/data; the other formats run where a folder `shared/golden` lies beside the checkout.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.lab.score import score_ids
from tests.support.feeding import claim, feed_all

HERE = Path(__file__).parents[1] / "data" / "golden"
SHARED = Path(__file__).parents[3] / "shared" / "golden"
FORMATS = ("official", "bf16", "modelopt", "ct", "hfnvfp4")
CASES = [(f, mode) for f in FORMATS for mode in ("noqat", "a16", "a8") if (f, mode) != ("bf16", "a8")]


def folder(format: str) -> Path:
    found = next((root / format for root in (HERE, SHARED) if (root / format).is_dir()), None)
    if found is None:
        pytest.skip(f"golden model {format} is not here: only 'official' ships with the repository")
    return found


@cache
def run(format: str, mode: str, chunk: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the engine gives and what it should; the tests only read them."""
    expected = load_file(folder(format) / f"expected_{mode}.safetensors")
    config = EngineConfig(
        activations="a8" if mode == "a8" else "a16",
        qat="off" if mode == "noqat" else "on",
        chunk=chunk,
        max_batch=1,
        max_context=340,
    )
    engine = Engine.load(folder(format), config)
    got = score_ids(engine, expected["ids"].tolist(), 300, mtp="mtp_logits" in expected)
    return got, expected


def distances(got: Tensor, want: Tensor) -> tuple[Tensor, float]:
    r = (got - want).norm(dim=1) / want.norm(dim=1)
    top1 = (got.argmax(1) == want.argmax(1)).float().mean().item()
    return r, top1


@pytest.mark.parametrize(("format", "mode"), CASES)
def test_marks(format: str, mode: str) -> None:
    got, expected = run(format, mode, chunk=300)
    assert got.keys() == expected.keys() - {"ids"}
    for name in got:
        r, top1 = distances(got[name], expected[name])
        median, p90 = r.median().item(), r.quantile(0.9).item()
        what = f"{name}: median {median:.1e}, p90 {p90:.1e}, max {r.max():.1e}, top-1 {top1:.3f}"
        if mode == "noqat":
            assert r.max() <= 1e-4, what
        elif name == "mtp_logits":
            # One value rounded the other way in the trunk moves the draft block's whole window (docs/log.md).
            # The block is held to the sharp mark without rounding (noqat), and to the same choices here.
            assert p90 <= 1e-1 and top1 >= 0.94, what
        elif mode == "a16":
            assert median <= 1e-4 and p90 <= 1e-2 and top1 >= 0.99, what
        else:
            assert median <= 2e-2 and top1 >= 0.96, what


CHUNKED = [(f, "a16", (64,)) for f in FORMATS] + [("official", "a8", (3,)), ("bf16", "noqat", (1,))]


@pytest.mark.parametrize(("format", "mode", "chunks"), CHUNKED)
def test_chunks_change_nothing(format: str, mode: str, chunks: tuple[int, ...]) -> None:
    whole, _ = run(format, mode, chunk=300)
    for chunk in chunks:
        part, _ = run(format, mode, chunk)
        for name in whole:
            assert torch.equal(part[name], whole[name]), f"{name} with chunks of {chunk}"


@pytest.mark.parametrize("format", FORMATS)
def test_among_other_sequences_nothing_changes(format: str) -> None:
    """The golden prompt in pieces, each piece in one step with pieces of three other sequences."""
    whole, expected = run(format, "a16", chunk=300)
    engine = Engine.load(folder(format), EngineConfig(max_batch=4, max_context=340))
    texts = [
        torch.randint(0, 160, (300,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)
    ]
    texts.insert(1, expected["ids"].tolist()[:300])
    slots = [claim(engine, 340) for _ in texts]
    for start in range(0, 300, 50):
        shifts = (
            0,
            0,
            min(start, 7),
            min(start, 20),
        )  # the others stand elsewhere, or process another number
        spans = [
            (slot, max(0, start - shift), ids[max(0, start - shift) : start + 50 - shift])
            for slot, ids, shift in zip(slots, texts, shifts, strict=True)
        ]
        logits = feed_all(engine, spans)
        row = len(spans[0][2])
        assert torch.equal(logits[row : row + 50], whole["prefill_logits"][start : start + 50]), start


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_give_the_same_logits(format: str) -> None:
    """Weights decoded at every use instead of once: the same products, bit for bit."""
    expected = load_file(folder(format) / "expected_a16.safetensors")
    ids = expected["ids"][:150].tolist()
    results = []
    for weights in ("dense", "packed"):
        engine = Engine.load(folder(format), EngineConfig(weights=weights, max_batch=1, max_context=160))
        results.append(score_ids(engine, ids, 145))
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name
