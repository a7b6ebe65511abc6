"""Muon for the matrices inside the network, Adam for the rest; matrices of one shape move together."""

import torch
from torch import Tensor

from recipes.tiny.twin import Twin

MATRIX_RATE, OTHER_RATE = 0.02, 0.003
MOMENTUM, BETAS, DECAY = 0.95, (0.9, 0.95), 0.01
_OTHERS = ("embed", "head", "gate", "weights_proj", "_fn", "ape")


def orthogonal(g: Tensor) -> Tensor:
    """[M, N, K] -> nearly orthogonal matrices with the same row and column spaces (Newton-Schulz)."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


class Optimiser:
    def __init__(self, twin: Twin) -> None:
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        others = []
        for name, p in twin.tensors.items():
            if not p.requires_grad or name.endswith("gate.bias"):
                continue
            if p.dim() >= 2 and not name.endswith(_OTHERS):
                self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
            else:
                others.append(p)
        self.adam = torch.optim.AdamW(others, OTHER_RATE, BETAS, weight_decay=0.0, fused=others[0].is_cuda)
        self.momenta = {
            shape: torch.zeros(sum(_count(p) for p in group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for setting in self.adam.param_groups:
            setting["lr"] = OTHER_RATE * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for shape, group in self.groups.items():
            grads = torch.cat([_grad(p).reshape(-1, *shape) for p in group])
            momentum = self.momenta[shape]
            momentum.lerp_(grads, 1 - MOMENTUM)
            update = orthogonal(grads.lerp(momentum, MOMENTUM))
            update = update * (MATRIX_RATE * rate * max(1.0, shape[0] / shape[1]) ** 0.5)
            parts = update.split([_count(p) for p in group])
            torch._foreach_mul_(group, 1 - MATRIX_RATE * rate * DECAY)
            torch._foreach_sub_(group, [part.view(p.shape) for p, part in zip(group, parts, strict=True)])
            for p in group:
                p.grad = None


def _count(p: Tensor) -> int:
    return p.shape[0] if p.dim() == 3 else 1


def _grad(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad
