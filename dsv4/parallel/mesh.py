"""Ranks: which one this process is, of how many. Knows no model; a world of one is a Mesh like any other."""

from dataclasses import dataclass, field

from dsv4.parallel.comm import Alone, Comm


@dataclass(frozen=True)
class Mesh:
    """Ranks that share each layer of one model, 0 .. size-1. Rank 0 plans, and answers for all of them.

    `whole_experts`: each has some of the routed experts, not a part of each.
    """

    rank: int = 0
    size: int = 1
    comm: Comm = field(default_factory=Alone)
    whole_experts: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and (self.size == 1) == isinstance(self.comm, Alone), self

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.size}"
