"""Decides how many routed experts stay in GPU memory, and which; the others lie in pinned host memory.

Knows numbers only: bytes that are free, and how often each expert was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.engine.frequency import known_counts
from dsv4.errors import ConfigError
from dsv4.kernels.common.places import Form, Placement, Slots, place

# Of the device's table and the factors, per expert.
ENTRY_BYTES = 8 + 3 * 4
# Host memory that is left to everything else.
HOST_RESERVE = 4 << 30


@dataclass(frozen=True)
class Split:
    """`num_resident` of the experts of all layers lie in GPU memory."""

    form: Form
    names: tuple[str, ...]  # of the layers' banks
    num_experts: int  # of a layer
    num_resident: int
    has_spare: bool = True  # one slot more in each memory, by way of which experts change places

    @property
    def num_spilled(self) -> int:
        return len(self.names) * self.num_experts - self.num_resident

    @property
    def gpu_bytes(self) -> int:
        entries = len(self.names) * self.num_experts * ENTRY_BYTES
        return (self.num_resident + self.has_spare) * self.form.num_bytes + entries

    @property
    def host_bytes(self) -> int:
        return (self.num_spilled + self.has_spare) * self.form.num_bytes

    @property
    def note(self) -> str:
        """For whoever starts an engine."""
        return (
            f"{self.num_spilled:,} of {self.num_spilled + self.num_resident:,} experts "
            f"({self.host_bytes / 1e9:.1f} GB) lie in pinned host memory and are read over PCIe"
        )

    @property
    def share(self) -> float:
        """Of the experts that are resident."""
        return self.num_resident / (len(self.names) * self.num_experts)


def find_split(
    spill: str, expert_memory: int | None, form: Form, names: Sequence[str], num_experts: int, room: int
) -> Split | None:
    """None where nothing spills. `room`: bytes of GPU memory that everything else leaves to routed experts.

    `spill`: "off", "auto" (what does not fit), or how many of every layer. `expert_memory`: at most so much.
    """
    total = len(names) * num_experts
    if spill == "off":
        return None
    if spill != "auto":
        if int(spill) > num_experts:
            raise ConfigError(f"spill is {spill}, but a layer has {num_experts} experts")
        resident = len(names) * (num_experts - int(spill))
        return Split(form, tuple(names), num_experts, resident) if int(spill) else None
    limit = room if expert_memory is None else min(room, expert_memory)
    entries = total * ENTRY_BYTES
    resident = max(0, limit - entries) // form.num_bytes
    return None if resident >= total else Split(form, tuple(names), num_experts, max(0, resident - 1))


def check_host(split: Split, free: int) -> None:
    """`free`: host memory that can be taken without swapping."""
    if split.host_bytes + HOST_RESERVE > free:
        raise ConfigError(
            f"{split.num_spilled} of {split.num_spilled + split.num_resident} experts are to lie in pinned "
            f"host memory and take {split.host_bytes / 1e9:.1f} GB; {free / 1e9:.1f} GB are free, of which "
            f"{HOST_RESERVE / 1e9:.1f} GB are left to the rest of the machine; "
            "lower max_batch, max_context or chunk, or use a machine with more memory"
        )


def choose_resident(split: Split, counts: Sequence[Sequence[float]] | None) -> list[list[bool]]:
    """[layers][experts]. The most frequent by `counts`, of all layers; without, as many of each layer."""
    layers, experts = len(split.names), split.num_experts
    if counts is None:
        share, more = divmod(split.num_resident, layers)
        return [[e < share + (layer < more) for e in range(experts)] for layer in range(layers)]
    ranked = sorted(
        ((layer, e) for layer in range(layers) for e in range(experts)),
        key=lambda at: (-counts[at[0]][at[1]], at[1], at[0]),
    )
    out = [[False] * experts for _ in range(layers)]
    for layer, e in ranked[: split.num_resident]:
        out[layer][e] = True
    return out


def make_placement(
    split: Split, counts: Sequence[Sequence[float]] | None, device: str | torch.device
) -> Placement:
    """Room for all experts, still without weights."""
    spare = int(split.has_spare)
    slot_of, num_resident, num_spilled = place(choose_resident(split, counts), num_spare=(spare, spare))
    slots = Slots(split.form, num_resident, num_spilled, device)
    return Placement(split.form, split.names, slot_of, slots)


def place_experts(
    split: Split | None, model: str | None, device: str | torch.device
) -> tuple[Placement | None, tuple[str, ...]]:
    """By what was recorded of the model of this checksum, else evenly; and what there is to say about it."""
    if split is None:
        return None, ()
    counts, why = None, None
    if model is not None:
        counts, why = known_counts(model, len(split.names), split.num_experts)
    notes = (split.note,) if why is None else (split.note, why)
    return make_placement(split, counts, device), notes
