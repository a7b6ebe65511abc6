"""Rules of docs/model.md, each broken as it can be misread: golden logits must tell.

Two would go unseen there, the order of Sinkhorn's steps (its sums have converged) and SwiGLU's clamp (no
value of the model reaches it): test_spec_ops.py has their values.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4.config import LayerSpec
from dsv4.lab.reference import open_model
from dsv4.spec import ops
from dsv4.spec.model import Model
from dsv4.spec.rounding import MODES
from dsv4.weights.load import Checkpoint
from tests.golden.test_golden import folder

Rope = tuple[Tensor, Tensor]
# The functions as they are: the tests replace them in their modules.
rotate, attend, sinkhorn, compress, mix_out = ops.rotate, ops.attend, ops.sinkhorn, ops.compress, ops.mix_out
rms_norm, in_window, is_visible, top_k = ops.rms_norm, ops.in_window, ops.is_visible, ops.top_k
output, compressed, route = Model.output, Model.compressed, Model.route


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    rest, a, b = x.split((x.shape[-1] - 2 * r, r, r), -1)
    return torch.cat((rest, a * cos - b * sin, a * sin + b * cos), -1)


def first_channels(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    return torch.cat((rotate(first, cos, sin), rest), -1)


def plain_rope(model: Model, positions: Tensor, layer: LayerSpec) -> Rope:
    return ops.rope_table(positions, model.config.rope_theta, model.config.rope_dim, None)


def turned_twice(model: Model, o: Tensor, name: str, rope: Rope) -> Tensor:
    return output(model, ops.rotate_heads(o, *rope), name, rope)


def swapped(values: Tensor, scores: Tensor, ratio: int, overlaps: bool) -> Tensor:
    if overlaps:
        values, scores = (t.roll(t.shape[-1] // 2, -1) for t in (values, scores))
    return compress(values, scores, ratio, overlaps)


def biased_values(model: Model, x: Tensor, name: str, layer: LayerSpec) -> Tensor:
    bias = model[f"{name}.ape"][torch.arange(x.shape[-2]) % layer.ratio]
    values = model.product(x, model[f"{name}.wkv"]) + bias
    pooled = compress(values, model.pool_scores(x, name, layer), layer.ratio, layer.kind == "csa")
    starts = torch.arange(pooled.shape[-2]) * layer.ratio
    return rotate(model.norm(pooled, f"{name}.norm"), *model.rope(starts, layer))


def at_last_token(model: Model, x: Tensor, name: str, layer: LayerSpec) -> Tensor:
    entries = compressed(model, x, name, layer)
    return rotate(entries, *model.rope(torch.full(entries.shape[-2:-1], layer.ratio - 1), layer))


def zeros_compete(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    best = top_k(scores.masked_fill(~visible, 0.0), k)
    return visible & torch.zeros_like(visible).scatter(-1, best, True)


def without_relu(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("...thd,...cd,...th->...tc", q, keys, weights)


def biased_weights(model: Model, x: Tensor, ids: Tensor, name: str, hashed: bool) -> tuple[Tensor, Tensor]:
    chosen, weights = route(model, x, ids, name, hashed)
    if hashed:
        return chosen, weights
    scores = ops.route_scores(model.product(x, model[name])) + model[f"{name}.bias"]
    return chosen, ops.route_weights(scores, chosen, model.config.route_scale)


def even_weights(model: Model, x: Tensor, ids: Tensor, name: str, hashed: bool) -> tuple[Tensor, Tensor]:
    chosen, weights = route(model, x, ids, name, hashed)
    return chosen, weights.mean(-1, keepdim=True).expand_as(weights) if hashed else weights


def heads(turn: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Another rotation, of vectors and of heads."""
    return {"rotate": turn, "rotate_heads": lambda x, cos, sin: turn(x, cos.unsqueeze(1), sin.unsqueeze(1))}


# The rule, and the functions of spec.ops, methods of Model or keys of its config that break it.
BROKEN: dict[str, dict[str, Any]] = {
    "streams mix over comb's first index": {"mix_out": lambda y, s, g, comb: mix_out(y, s, g, comb.mT)},
    "comb is doubly stochastic": {"sinkhorn_iters": 1},
    "mixes are of normed streams": {"mixes": lambda streams, fn, eps: streams.flatten(-2) @ fn.mT},
    "neighbours rotate": heads(halves),
    "last channels rotate": heads(first_channels),
    "layers with entries have a RoPE of their own": {"rope": plain_rope},
    "queries are normed": {"rms_norm": lambda x, w, eps: x if w is None else rms_norm(x, w, eps)},
    "the sink counts": {"attend": lambda q, k, seen, sinks: attend(q, k, seen, sinks - math.inf)},
    "the window has W tokens": {"in_window": lambda q, k, w: in_window(q, k, w - 1)},
    "outputs are rotated back": {"output": turned_twice},
    "a complete block is visible": {"is_visible": lambda p, n, ratio: is_visible(p - 1, n, ratio)},
    "first halves belong to the next block": {"compress": swapped},
    "position bias on scores alone": {"compressed": biased_values},
    "entries stand at their first token": {"compressed": at_last_token},
    "invisible entries never win": {"select": zeros_compete},
    "index products pass a relu": {"index_scores": without_relu},
    "the bias chooses and does not weigh": {"route": biased_weights},
    "the gate weighs in hash layers too": {"route": even_weights},
    "weights sum to the route scale": {"route_scale": 1.0},
}


@contextmanager
def broken(model: Model, changes: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Model]:
    with patch.context() as inside:
        for name, value in changes.items():
            if hasattr(model.config, name):
                model = replace(model, config=replace(model.config, **{name: value}))
            else:
                inside.setattr(ops if hasattr(ops, name) else Model, name, value)
        yield model


def test_each_rule_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The farthest row of logits: 2e-6 from the golden ones as it stands, 0.5 and more with a broken rule."""
    want = load_file(folder("official") / "expected_noqat.safetensors")
    checkpoint = Checkpoint.open(folder("official"))
    with checkpoint.reader, torch.inference_mode():
        model = open_model(checkpoint, MODES["off"])
        model = replace(model, tensors={name: model[name] for name in model.tensors})
        for rule, changes in {"": {}, **BROKEN}.items():
            with broken(model, changes, monkeypatch) as changed:
                got = changed.logits(want["ids"][:300])
            r = ((got - want["prefill_logits"]).norm(dim=1) / want["prefill_logits"].norm(dim=1)).max()
            print(f"{r:.1e} {rule}")
            assert r > 0.5 if rule else r < 1e-5, rule
