"""One rank of several, alone: its peers are its own memory, which answers everything with what was sent.

What a rank's step takes but for the way between GPUs: its share of the weights, every push, every wait.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.parallel.comm import tree_sum


@dataclass(frozen=True)
class Echo:
    """A Comm whose other ranks have what this one has."""

    size: int

    def sum_parts(self, parts: Tensor) -> Tensor:
        return tree_sum(parts) * self.size

    def gather_columns(self, columns: Tensor) -> Tensor:
        return columns.repeat(1, self.size)

    def sum_disjoint(self, values: Tensor) -> Tensor:
        return values

    def trade_parts(self, rows: Tensor, counts: list[int]) -> Tensor:
        raise AssertionError("ranks with whole experts have no kernels to be timed")

    def inbox(self, places: int) -> None:
        return None

    def begin(self) -> None:
        pass


def echo_peers(config: ModelConfig, size: int, rows: int, device: torch.device) -> Peers:
    """Rank 0 of `size`. What it pushes to a rank falls where that rank would push to it."""
    vocab = config.vocab_size // size
    inbox = torch.zeros(size, inbox_places(rows, config.hidden_size, vocab), dtype=torch.int64, device=device)
    return Peers(
        rank=0,
        rows=rows,
        hidden=config.hidden_size,
        vocab=vocab,
        inbox=inbox,
        addresses=tuple(part.data_ptr() for part in inbox),
        ended=torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
        seconds=20.0,
    )
