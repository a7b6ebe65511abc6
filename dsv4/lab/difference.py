"""How far two tensors are apart, added up over steps. Knows nothing of models."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class Difference:
    """Sums over all values seen so far of a and b; a is the one that is taken for right."""

    dot: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0
    square_error: float = 0.0
    count: int = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        a, b = a.double().flatten(), b.double().flatten()
        self.dot += float(a @ b)
        self.square_a += float(a @ a)
        self.square_b += float(b @ b)
        error = a - b
        self.square_error += float(error @ error)
        self.count += a.numel()

    def merge(self, other: "Difference") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def cosine(self) -> float:
        product = (self.square_a * self.square_b) ** 0.5
        return self.dot / product if product else float(self.square_a == self.square_b)

    @property
    def relative(self) -> float:
        """|a - b| / |a|; infinite where a is zero and b is not."""
        if not self.square_error:
            return 0.0
        return (self.square_error / self.square_a) ** 0.5 if self.square_a else float("inf")

    @property
    def rms(self) -> tuple[float, float]:
        """Root mean squares of a and of b."""
        count = max(1, self.count)
        return (self.square_a / count) ** 0.5, (self.square_b / count) ** 0.5

    def as_dict(self) -> dict[str, Any]:
        rms_a, rms_b = self.rms
        return {"cosine": self.cosine, "relative": self.relative, "rms_a": rms_a, "rms_b": rms_b}


@dataclass
class Agreement:
    """Of the choices of a, how many b made too."""

    shared: int = 0
    chosen: int = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """[T, K] ids each, a row's in any order; negative ones are none."""
        for row_a, row_b in zip(a.tolist(), b.tolist(), strict=True):
            wanted = {id for id in row_a if id >= 0}
            self.chosen += len(wanted)
            self.shared += len(wanted.intersection(row_b))

    def merge(self, other: "Agreement") -> None:
        self.shared, self.chosen = self.shared + other.shared, self.chosen + other.chosen

    @property
    def share(self) -> float:
        return self.shared / self.chosen if self.chosen else 1.0


@dataclass
class Predictions:
    """Logits of a and of b: how far the distributions are apart."""

    divergences: list[float]
    same: int = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """[T, V] each."""
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        self.divergences += (p.exp() * (p - q)).sum(-1).tolist()
        self.same += int((a.argmax(-1) == b.argmax(-1)).sum())

    def as_dict(self) -> dict[str, Any]:
        count = len(self.divergences)
        return {
            "kl_mean": sum(self.divergences) / max(1, count),
            "kl_max": max(self.divergences, default=0.0),
            "top1_agreement": self.same / max(1, count),
            "positions": count,
        }


def routing_matrix(chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """[T, K] ids and weights -> [T, E]: choices and weights as one thing that can be subtracted."""
    out = torch.zeros(chosen.shape[0], num_experts)
    return out.scatter(1, chosen.long(), weights.float())


def first_not_finite(value: Tensor) -> list[int] | None:
    """Where the first NaN or infinity is."""
    if not value.is_floating_point():
        return None
    bad = ~torch.isfinite(value)
    return bad.nonzero()[0].tolist() if bool(bad.any()) else None
