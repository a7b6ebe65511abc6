"""Decides how many routed experts stay in GPU memory, and which; the others lie in pinned host memory.

Knows numbers only: bytes that are free, and how often each expert was chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4.errors import ConfigError
from dsv4.gpu.shapes import Form

# `dsv4 plan` asks for a split without importing torch.
if TYPE_CHECKING:
    import torch

    from dsv4.ops.experts.placement import Placement

# Of the device's table and the factors, per expert.
ENTRY_BYTES = 8 + 3 * 4
# Host memory that is left to everything else.
HOST_RESERVE = 4 << 30
# GPU memory, at most, for experts that prompts copy ahead.
MAX_STAGED_BYTES = 2 << 30


@dataclass(frozen=True)
class Drafts:
    """The draft blocks' experts: no step reads them, so they are the first to lie in host memory."""

    form: Form
    names: tuple[str, ...]
    num_experts: int

    @property
    def num_bytes(self) -> int:
        return len(self.names) * self.num_experts * self.form.num_bytes


@dataclass(frozen=True)
class Split:
    """`num_resident` of the experts of all layers lie in GPU memory."""

    form: Form
    names: tuple[str, ...]  # of the layers' banks
    num_experts: int  # of a layer
    num_resident: int
    has_spare: bool = True  # one slot more in each memory, by way of which experts change places
    drafts: Drafts | None = None

    @property
    def num_spilled(self) -> int:
        return len(self.names) * self.num_experts - self.num_resident

    @property
    def num_staged(self) -> int:
        """Slots of the ring that prompts copy spilled experts to: those of two layers, as far as that leaves
        memory to others."""
        two_layers = 2 * math.ceil(self.num_spilled / len(self.names))
        most = min(self.num_resident // 4, MAX_STAGED_BYTES // self.form.num_bytes)
        return min(two_layers, most) if self.has_spare else 0

    @property
    def gpu_bytes(self) -> int:
        entries = 2 * len(self.names) * self.num_experts * ENTRY_BYTES  # prompts have their own table
        return (self.num_resident + self.has_spare + self.num_staged) * self.form.num_bytes + entries

    @property
    def draft_bytes(self) -> int:
        return 0 if self.drafts is None else self.drafts.num_bytes

    @property
    def host_bytes(self) -> int:
        return (self.num_spilled + self.has_spare) * self.form.num_bytes + self.draft_bytes

    @property
    def note(self) -> str:
        """For whoever starts an engine."""
        more = f"; so do {self.draft_bytes / 1e9:.1f} GB of draft blocks, which no step reads"
        return (
            f"{self.num_spilled:,} of {self.num_spilled + self.num_resident:,} experts "
            f"({(self.host_bytes - self.draft_bytes) / 1e9:.1f} GB) lie in pinned host memory and are read "
            f"over PCIe{more if self.drafts else ''}"
        )

    @property
    def share(self) -> float:
        """Of the experts that are resident."""
        return self.num_resident / (len(self.names) * self.num_experts)


def find_split(
    spill: str,
    expert_memory: int | None,
    form: Form,
    names: Sequence[str],
    num_experts: int,
    room: int,
    drafts: Drafts | None = None,
) -> Split | None:
    """None where nothing spills. `room`: bytes of GPU memory that everything else leaves to routed experts,
    those of `drafts` being there as well.

    `spill`: "off", "auto" (what does not fit), or how many of every layer. `expert_memory`: at most so much.
    """
    total = len(names) * num_experts
    if spill == "off":
        return None
    if spill != "auto":
        if int(spill) > num_experts:
            raise ConfigError(f"spill is {spill}, but a layer has {num_experts} experts")
        resident = len(names) * (num_experts - int(spill))
        return Split(form, tuple(names), num_experts, resident, drafts=drafts) if int(spill) else None
    most = math.inf if expert_memory is None else expert_memory
    if total * (form.num_bytes + ENTRY_BYTES) <= min(room, most):
        return None
    limit = min(room + (0 if drafts is None else drafts.num_bytes), most)
    resident = max(0, min(total, int(limit // form.num_bytes)))
    while True:
        split = Split(form, tuple(names), num_experts, resident, drafts=drafts)
        if not resident or split.gpu_bytes <= limit:
            return split
        resident -= 1


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
    split: Split, counts: Sequence[Sequence[float]] | None, device: "str | torch.device"
) -> "Placement":
    """Room for all experts, still without weights."""
    from dsv4.ops.experts.placement import Placement, Slots, place

    spare = int(split.has_spare)
    slot_of, num_resident, num_spilled = place(
        choose_resident(split, counts), num_spare=(spare + split.num_staged, spare)
    )
    slots = Slots(split.form, num_resident, num_spilled, device)
    return Placement(split.form, split.names, slot_of, slots)


def place_experts(
    split: Split | None, model: str | None, device: "str | torch.device"
) -> "tuple[list[Placement], tuple[str, ...]]":
    """The layers' experts by what was recorded of the model of this checksum, else evenly; those of drafts;
    and what there is to say about it. Empty where all lie with the other weights."""
    if split is None:
        return [], ()
    from dsv4.engine.frequency import known_counts
    from dsv4.ops.experts.placement import Placement, Slots, place

    counts, why = None, None
    if model is not None:
        counts, why = known_counts(model, len(split.names), split.num_experts)
    notes = (split.note,) if why is None else (split.note, why)
    placed = [make_placement(split, counts, device)]
    if (drafts := split.drafts) is not None:
        slot_of, _, count = place([[False] * drafts.num_experts] * len(drafts.names), num_spare=(0, 0))
        placed.append(Placement(drafts.form, drafts.names, slot_of, Slots(drafts.form, 0, count, device)))
    return placed, notes
