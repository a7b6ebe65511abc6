"""The training twin computes what the engine computes: same weights, same logits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.config import ModelConfig, preset
from dsv4.lab.score import score_ids
from dsv4.quant.formats import Format
from recipes.tiny.export import export
from recipes.tiny.plain import Documents
from recipes.tiny.twin import Twin


def config() -> ModelConfig:
    return replace(
        preset("tiny"),
        **{"hidden_size": 64, "vocab_size": 96, "num_heads": 4, "head_dim": 80, "rope_dim": 16, "q_rank": 32},
        **{"o_rank": 32, "window": 24, "index_heads": 16, "index_dim": 32, "index_topk": 8},
        **{"num_experts": 6, "experts_per_token": 3, "expert_width": 32, "max_positions": 1024},
    )


def random_twin(seed: int) -> Twin:
    torch.manual_seed(seed)
    twin = Twin(config(), 512)
    c = twin.config
    with torch.no_grad():
        for name, p in twin.p.items():
            if name.endswith("tid2eid"):
                p.copy_(torch.rand(c.vocab_size, c.num_experts).argsort(1)[:, : c.experts_per_token])
            elif p.dim() == 1:
                centre = 1.0 if "norm" in name or name.endswith("scale") else 0.0
                p.copy_(centre + 0.1 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (1.0 if name == "embed" else p.shape[-1] ** -0.5))
    return twin.eval()


@pytest.mark.parametrize("qat", ["off", "on"])
def test_twin_equals_engine(qat: str, tmp_path: Path) -> None:
    twin = random_twin(0)
    twin.rounding.cache = qat == "on"
    ids = torch.randint(0, 96, (1, 289))
    with torch.no_grad():
        streams = twin.streams(ids[:, :288], torch.float32)
        want, want_draft = twin.logits(streams)[0], twin.draft(streams, ids[:, 1:])[0]
    export(twin, tmp_path, Format.F32, Format.F32, {})
    engine = Engine.load(tmp_path, EngineConfig(qat=qat, max_batch=1, max_context=289))
    got = score_ids(engine, ids[0].tolist(), 288, mtp=True)
    for name, expected in (("prefill_logits", want), ("mtp_logits", want_draft)):
        r = (got[name] - expected).norm(dim=1) / expected.norm(dim=1)
        # With rounding, float noise crosses a boundary now and then; without, nothing may part.
        worst = r.max() if qat == "off" else r.median()
        assert worst <= 1e-4, f"{name}: {worst:.1e} at {int(r.argmax())}"


def test_rounded_weights_are_what_is_stored(tmp_path: Path) -> None:
    """Logits of the twin with NVFP4 rounding on equal the engine's on the exported NVFP4 file."""
    twin = random_twin(1)
    twin.rounding.weights = True
    ids = torch.randint(0, 96, (1, 120))
    with torch.no_grad():
        want = twin.logits(twin.streams(ids, torch.float32))[0]
    export(twin, tmp_path, Format.NVFP4, Format.F32, {})
    engine = Engine.load(tmp_path, EngineConfig(qat="off", max_batch=1, max_context=120))
    got = score_ids(engine, ids[0].tolist(), 120)["prefill_logits"]
    r = (got - want).norm(dim=1) / want.norm(dim=1)
    assert r.max() <= 1e-4, f"{r.max():.1e} at {int(r.argmax())}"


def test_every_parameter_gets_a_gradient() -> None:
    twin = random_twin(2).train()
    twin.wants_index_loss = True
    ids = torch.randint(0, 96, (2, 170))
    streams = twin.streams(ids[:, :-2], torch.float32)
    loss = (
        twin.logits(streams).float().square().mean()
        + twin.draft(streams, ids[:, 1:-1]).float().square().mean()
    )
    (loss + torch.stack(twin.index_losses).sum()).backward()
    without = [n for n, p in twin.p.items() if p.requires_grad and (p.grad is None or not p.grad.any())]
    # The router's bias is balanced by counting, not by gradients.
    assert all(name.endswith("gate/bias") for name in without), without


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """A document behind another gives what it gives alone, at an offset that keeps its blocks whole."""
    twin = random_twin(3)
    ids = torch.randint(0, 96, (1, 264))
    of = torch.zeros_like(ids, dtype=torch.int32)
    of[:, 128:] = 1
    with torch.no_grad():
        streams = twin.streams(ids, torch.float32, Documents(of))
        row = twin.logits(streams), twin.draft(streams[:, :240], ids[:, 1:241], Documents(of[:, :240]))
        alone = torch.cat((ids[:, 128:], ids[:, :8]), 1)
        streams = twin.streams(alone, torch.float32)
        want = twin.logits(streams), twin.draft(streams[:, :120], alone[:, 1:121])
    torch.testing.assert_close(row[0][:, 128:], want[0][:, :136], atol=2e-4, rtol=1e-3)
    # The draft block's own window begins at the document too.
    torch.testing.assert_close(row[1][:, 128:239], want[1][:, :111], atol=2e-4, rtol=1e-3)
