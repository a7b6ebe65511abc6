"""Mixture of experts: route, run the chosen experts, add the shared one."""

import torch
from torch import Tensor

from dsv4.config import Activations, LayerSpec
from dsv4.errors import CheckpointError
from dsv4.model.bundle import Bundle
from dsv4.model.params import own_experts
from dsv4.model.step import Step
from dsv4.ops._exact import cast
from dsv4.ops.activation import Activation
from dsv4.parallel.comm import tree_sum


class Moe:
    def __init__(self, b: Bundle, name: str, spec: LayerSpec) -> None:
        self.ops, self.config, self.name, self.dtype = b.ops, b.config, name, b.numerics.dtype
        self.parts, self.mesh = b.num_parts, b.mesh  # ranks share the width of every expert
        self.sum_dtype = b.sum_dtype
        tensors = b.weights.tensors
        self.gate = tensors[f"{name}.gate"]
        self.table = b.plain(f"{name}.gate.tid2eid") if spec.hash_routed else None
        self.bias = None if spec.hash_routed else b.plain(f"{name}.gate.bias")
        names = [f"{name}.experts.{expert}" for expert in range(b.config.num_experts)]
        own = own_experts(b.config, b.mesh.rank, b.mesh.size) if b.mesh.whole_experts else range(len(names))
        parts = ("w1", "w3", "w2")
        self.own, bank = own, b.bank(f"{name}.experts")
        # A GPU adds up what its own experts gave to a token, then all ranks' sums, as it does with widths.
        self.is_traded = b.mesh.whole_experts and bank is None
        self.experts = bank or [tuple(tensors[f"{names[expert]}.{w}"] for w in parts) for expert in own]
        self.shared = b.bank(f"{name}.shared_experts") or tuple(
            tensors[f"{name}.shared_experts.{w}"] for w in parts
        )
        self.activations = _common(b, names)
        self.shared_activations = _common(b, [f"{name}.shared_experts"])
        self.forms = (
            b.ops.experts.ffn_form(self.dtype, self.shared, self.shared_activations),
            b.ops.linear.form(self.dtype, self.gate, "a16"),
            b.ops.experts.routed_form(self.dtype, self.experts, self.activations),
        )

    def __call__(self, x: Activation, ids: Tensor, step: Step) -> Tensor:
        """x [T, D], normalised in `forms`; ids [T] -> [T, D]."""
        c, ops = self.config, self.ops
        shared = ops.experts.ffn(
            x=x,
            expert=self.shared,
            limit=c.swiglu_limit,
            activations=self.shared_activations,
            parts=self.parts,
        )
        if self.table is not None:
            chosen, weights = ops.route.by_hash(x, self.gate, self.table[ids], c.route_scale)
        else:
            chosen, weights = ops.route.by_score(x, self.gate, self.bias, c.experts_per_token, c.route_scale)
        chosen = step.choices(chosen)
        step.see(self.name, "chosen", chosen)
        step.see(self.name, "weights", weights)
        is_tapped = step.tap is not None
        beside = None if is_tapped or self.is_traded else shared
        if self.is_traded:
            y = self._traded(x, chosen, weights)
        else:
            y = self._routed(x, chosen, weights, step=step, shared=beside)
        if is_tapped:
            step.see(self.name, "routed", tree_sum(y))
            step.see(self.name, "shared", tree_sum(shared))
        if beside is None:
            y = y + shared
        # In float32, the routed experts' type, and rounded once.
        y = cast(self.mesh.comm.sum_parts(y), self.dtype)
        step.see(self.name, "out", y)
        return y

    def _routed(
        self, x: Activation, chosen: Tensor, weights: Tensor, step: Step, shared: Tensor | None
    ) -> Tensor:
        """[T, parts, D] of the chosen experts, which this rank has or shares, and `shared`."""
        staging, bank = step.staging, f"{self.name}.experts"
        routed = self.ops.experts.routed(
            x=x,
            ids=chosen,
            weights=weights,
            experts=self.experts if staging is None else staging.take(bank),
            limit=self.config.swiglu_limit,
            activations=self.activations,
            parts=self.parts,
            shared=shared,
            out_dtype=torch.float32 if shared is None else self.sum_dtype,
            first=self.own.start,
            ranks=self.mesh.size if self.mesh.whole_experts else 1,
        )
        if staging is not None:
            staging.give_back(bank)
        return routed

    def _traded(self, x: Activation, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same where ranks of the reference have whole experts: each gives the others their parts of what
        its own made, choice by choice, so that choices are added up in the order of one rank."""
        size = self.mesh.size
        counts = torch.bincount(chosen.flatten() // len(self.own), minlength=size).tolist()
        made = self.ops.experts.by_choice(
            x=x,
            ids=chosen,
            weights=weights,
            experts=self.experts,
            limit=self.config.swiglu_limit,
            activations=self.activations,
            parts=self.parts * size,
            first=self.own.start,
        )
        return self.ops.experts.add_choices(self.mesh.comm.trade_parts(made, counts), chosen)


def _common(b: Bundle, names: list[str]) -> Activations:
    """How the inputs of these experts are rounded; they must be stored alike for that to have one answer."""
    found = {b.activations_of(f"{name}.{w}") for name in names for w in ("w1", "w3", "w2")}
    if len(found) > 1:
        raise CheckpointError(
            f"{names[0]} and its neighbours mix quantised and plain weights; "
            f"activations {b.numerics.activations} are undefined for them: use a16"
        )
    return found.pop()
