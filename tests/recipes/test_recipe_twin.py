"""The training twin computes what the specification and the engine compute, and has their gradients."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.config import ModelConfig, preset
from dsv4.lab.score import score_ids
from dsv4.model.params import declare
from dsv4.quant.formats import Format
from dsv4.spec.drafts import mtp
from dsv4.spec.model import Model
from dsv4.spec.ops import hadamard
from dsv4.spec.rounding import MODES, Rounding
from recipes.tiny.export import export
from recipes.tiny.train import losses
from recipes.tiny.twin import Notes, Through, Twin, official


def config() -> ModelConfig:
    return replace(
        preset("tiny"),
        **{"hidden_size": 64, "vocab_size": 96, "num_heads": 4, "head_dim": 80, "rope_dim": 16, "q_rank": 32},
        **{"o_rank": 32, "window": 24, "index_heads": 16, "index_dim": 32, "index_topk": 8},
        **{"num_experts": 6, "experts_per_token": 3, "expert_width": 32, "max_positions": 1024},
    )


def random_twin(seed: int) -> Twin:
    torch.manual_seed(seed)
    twin = Twin.make(config())
    c = twin.config
    with torch.no_grad():
        for name, p in twin.tensors.items():
            if name.endswith("tid2eid"):
                p.copy_(torch.rand(c.vocab_size, c.num_experts).argsort(1)[:, : c.experts_per_token])
            elif p.dim() == 1:
                centre = 1.0 if "norm" in name or name.endswith("scale") else 0.0
                p.copy_(centre + 0.1 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (1.0 if name == "embed" else p.shape[-1] ** -0.5))
    return twin


@pytest.mark.parametrize("qat", ["off", "on"])
def test_twin_equals_engine(qat: str, tmp_path: Path) -> None:
    twin = random_twin(0).rounds(cache=qat == "on", weights=False)
    ids = torch.randint(0, 96, (1, 289))
    with torch.no_grad():
        streams = twin.streams(ids[:, :288])[-1]
        want, want_draft = twin.head(streams)[0], twin.draft(streams, ids[:, 1:])[0]
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
    twin = random_twin(1).rounds(cache=False, weights=True)
    ids = torch.randint(0, 96, (1, 120))
    with torch.no_grad():
        want = twin.logits(ids)[0]
    export(twin, tmp_path, Format.NVFP4, Format.F32, {})
    engine = Engine.load(tmp_path, EngineConfig(qat="off", max_batch=1, max_context=120))
    got = score_ids(engine, ids[0].tolist(), 120)["prefill_logits"]
    r = (got - want).norm(dim=1) / want.norm(dim=1)
    assert r.max() <= 1e-4, f"{r.max():.1e} at {int(r.argmax())}"


def test_weights_rounded_together_are_those_rounded_alone() -> None:
    twin = random_twin(5).rounds(cache=False, weights=True)
    together = twin.with_rounded()
    assert together.rounded.keys() == twin.quantised
    for name in twin.quantised:
        assert torch.equal(together[name], twin[name]), name


def test_every_parameter_gets_a_gradient() -> None:
    twin = random_twin(2).rounds(cache=True, weights=True)
    ids = torch.randint(0, 96, (2, 168))
    loss, _, loads = losses(twin, ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))
    loss.backward()
    without = [n for n, p in twin.tensors.items() if p.requires_grad and (p.grad is None or not p.grad.any())]
    # The router's bias is balanced by counting, not by gradients.
    assert all(name.endswith("gate.bias") for name in without), without
    assert len(loads) == 5 and all(torch.allclose(load.sum(), torch.tensor(3.0)) for load in loads.values())


def test_gradients_are_those_of_the_specification() -> None:
    """One parameter's gradient through the twin and through the specification, over the same values."""
    twin = replace(random_twin(4), notes=Notes())
    stored = {param.name: official(twin, param) for param in declare(twin.config, 1)}
    model = Model(twin.config, stored, MODES["off"])
    ids = torch.randint(0, 96, (2, 169))
    out = []
    for run in (model, twin):
        streams = run.streams(ids[:, :-1])[-1]
        logits = run.head(streams), mtp(run, streams, ids[:, 1:])[1]
        for p in twin.tensors.values():
            p.grad = None
        sum(some.square().mean() for some in logits).backward()
        out.append((logits, {n: p.grad for n, p in twin.tensors.items() if p.grad is not None}))
    (want, want_grads), (got, got_grads) = out
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    # The indexer has no gradient but its own loss's.
    assert got_grads.keys() == want_grads.keys() and len(got_grads) > 100
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= 1e-4 * grad.norm(), name


def test_roundings_pass_gradients() -> None:
    x, g = torch.randn(3, 80, requires_grad=True), torch.randn(3, 80)
    y, z = torch.randn(3, 32, requires_grad=True), torch.randn(3, 32)
    entry, index = Through().entry(x, 16), Through().index(y)
    torch.testing.assert_close(entry, Rounding().entry(x, 16))
    torch.testing.assert_close(index, Rounding().index(y))
    assert torch.equal(torch.autograd.grad((entry * g).sum(), x)[0], g)
    # The transform is its own transpose.
    torch.testing.assert_close(torch.autograd.grad((index * z).sum(), y)[0], hadamard(z))


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """A document behind another gives what it gives alone, at an offset that keeps its blocks whole."""
    twin = random_twin(3)
    ids = torch.randint(0, 96, (1, 264))
    of = torch.zeros_like(ids, dtype=torch.int32)
    of[:, 128:] = 1
    with torch.no_grad():
        streams = replace(twin, documents=of).streams(ids)[-1]
        draft = replace(twin, documents=of[:, :240]).draft(streams[:, :240], ids[:, 1:241])
        row = twin.head(streams), draft
        alone = torch.cat((ids[:, 128:], ids[:, :8]), 1)
        streams = twin.streams(alone)[-1]
        want = twin.head(streams), twin.draft(streams[:, :120], alone[:, 1:121])
    torch.testing.assert_close(row[0][:, 128:], want[0][:, :136], atol=2e-4, rtol=1e-3)
    # The draft block's own window begins at the document too.
    torch.testing.assert_close(row[1][:, 128:239], want[1][:, :111], atol=2e-4, rtol=1e-3)
