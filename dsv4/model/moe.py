"""Mixture of experts: route, run the chosen experts, add the shared one."""

from torch import Tensor

from dsv4.config import LayerSpec
from dsv4.model.bundle import Bundle
from dsv4.model.step import Step


class Moe:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec) -> None:
        self.ops, self.config = b.ops, b.config
        tensors = b.weights.tensors
        self.gate = tensors[f"{name}.gate"]
        self.table = b.plain(f"{name}.gate.tid2eid") if spec.hash_routed else None
        self.bias = None if spec.hash_routed else b.plain(f"{name}.gate.bias")
        names = [f"{name}.experts.{expert}" for expert in range(b.config.num_experts)]
        self.experts = [tuple(tensors[f"{n}.{w}"] for w in ("w1", "w3", "w2")) for n in names]
        self.shared = tuple(tensors[f"{name}.shared_experts.{w}"] for w in ("w1", "w3", "w2"))
        self.activations = b.activations_of(f"{names[0]}.w1")
        self.shared_activations = b.activations_of(f"{name}.shared_experts.w1")

    def __call__(self, x: Tensor, ids: Tensor, step: Step) -> Tensor:
        """x [T, D] normalised, ids [T] -> [T, D]."""
        c, ops = self.config, self.ops
        if self.table is not None:
            chosen, weights = ops.route.by_hash(x, self.gate, self.table[ids], c.route_scale)
        else:
            chosen, weights = ops.route.by_score(x, self.gate, self.bias, c.experts_per_token, c.route_scale)
        routed = ops.experts.routed(x, chosen, weights, self.experts, c.swiglu_limit, self.activations)
        shared = ops.experts.ffn(x, self.shared, c.swiglu_limit, self.shared_activations)
        return (routed + shared.float()).to(x.dtype)
