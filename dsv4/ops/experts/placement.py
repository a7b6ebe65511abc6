"""Start: where experts lie. Slots of one size, in GPU memory or in pinned host memory, and a table of places.

A kernel finds an expert by the table alone (`Tiled.places`) and reads host memory as it reads its own, over
PCIe. Nothing it computes depends on the place. Knows no policy: who lies where is said from outside.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.errors import DeviceError
from dsv4.gpu.shapes import Form
from dsv4.gpu.tiles import Bank, Tiled, is_plain_on

# Host memory is pinned in pieces of this size: torch takes a power of two for each.
PIECE_BYTES = 1 << 30


def views(form: Form, held: Tensor) -> list[Tensor]:
    """held [count, num_bytes] -> tiles, scales of gate and up, tiles, scales of down; not copied."""
    count = held.shape[0]
    out = []
    for start, (units, slices, halves, size) in form.parts()[:-1]:
        strides = (held.stride(0), slices * halves * size, halves * size, size, 1)
        shape = (count, units, slices, halves, size)
        out.append(held.as_strided(shape, strides, held.storage_offset() + start))
    return out


def bank(
    form: Form, held: Tensor, up_factor: Tensor, down_factor: Tensor, places: Tensor | None = None
) -> Bank:
    """Experts of that form. The factors lie on the GPU that reads them, which may themselves lie in host
    memory."""
    up_data, up_scale, down_data, down_scale = views(form, held)
    is_plain = is_plain_on(up_factor.device)

    def tiled(shape: tuple[int, int], data: Tensor, scale: Tensor, factor: Tensor) -> Tiled:
        return Tiled(form.format, shape, data, scale, factor, places=places, is_plain=is_plain)

    return Bank(
        tiled((form.width, form.hidden), up_data, up_scale, up_factor),
        tiled((form.hidden, form.width), down_data, down_scale, down_factor),
    )


class Slots:
    """Room for experts: the first `num_resident` slots in GPU memory, the others in pinned host memory."""

    def __init__(self, form: Form, num_resident: int, num_spilled: int, device: str | torch.device) -> None:
        self.num_resident, self.num_spilled = num_resident, num_spilled
        self.device = device = torch.device(device)
        size = form.num_bytes
        self._resident = torch.empty(num_resident, size, dtype=torch.uint8, device=device)
        per_piece = max(1, PIECE_BYTES // size)
        counts = [min(per_piece, num_spilled - start) for start in range(0, num_spilled, per_piece)]
        try:
            self._pieces = [
                torch.empty(n, size, dtype=torch.uint8, pin_memory=device.type == "cuda") for n in counts
            ]
        except RuntimeError as error:
            raise DeviceError(
                f"{num_spilled * size / 1e9:.1f} GB of host memory could not be pinned for {num_spilled} "
                f"experts ({error}); free host memory, or raise the limit of locked memory (ulimit -l)"
            ) from None
        self._per_piece = per_piece

    def __len__(self) -> int:
        return self.num_resident + self.num_spilled

    def is_resident(self, slot: int) -> bool:
        return slot < self.num_resident

    def __getitem__(self, slot: int) -> Tensor:
        """[1, num_bytes], not copied."""
        if slot < self.num_resident:
            return self._resident[slot : slot + 1]
        piece, at = divmod(slot - self.num_resident, self._per_piece)
        return self._pieces[piece][at : at + 1]

    @property
    def first(self) -> Tensor:
        """What places are counted from."""
        return self[0]


class Placement:
    """The experts of all layers in slots: `slot_of[layer][expert]`. `publish` tells the device."""

    def __init__(
        self, form: Form, names: Sequence[str], slot_of: Sequence[Sequence[int]], slots: Slots
    ) -> None:
        """`names`: of the layers' banks. Slots that no expert has are spare."""
        self.form, self.names, self.slots = form, tuple(names), slots
        self.slot_of = [list(layer) for layer in slot_of]
        taken = [slot for layer in self.slot_of for slot in layer]
        assert len(set(taken)) == len(taken) and len(self.slot_of) == len(self.names), (
            "a slot holds one expert"
        )
        self.spare = sorted(set(range(len(slots))) - set(taken))
        self.version = 0  # rises with every change of the table
        shape = (len(self.names), len(self.slot_of[0]))
        self.up_factor = torch.ones(*shape, 2, device=slots.device)
        self.down_factor = torch.ones(*shape, 1, device=slots.device)
        self.table = torch.zeros(*shape, dtype=torch.int64, device=slots.device)
        self.publish()

    @property
    def num_experts(self) -> int:
        return self.table.shape[1]

    def offsets(self) -> list[list[int]]:
        """Bytes from the first slot on to each expert's."""
        first = self.slots.first.data_ptr()
        return [[self.slots[slot].data_ptr() - first for slot in layer] for layer in self.slot_of]

    def publish(self) -> None:
        """The table as `slot_of` has it, in the order of the current stream: between two steps."""
        self.version += 1
        host = torch.tensor(self.offsets(), dtype=torch.int64)
        assert bool((host % 16 == 0).all()), "bulk copies want places on multiples of 16 bytes"
        is_cuda = self.table.is_cuda
        self.table.copy_(host.pin_memory() if is_cuda else host, non_blocking=is_cuda)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """(layer, expert, slot): they lie there already, and steps from here on look for them there."""
        first, is_cuda = self.slots.first.data_ptr(), self.table.is_cuda
        self.version += 1
        for layer, expert, slot in moves:
            self.slot_of[layer][expert] = slot
            place_of = torch.tensor(self.slots[slot].data_ptr() - first)
            self.table[layer, expert].copy_(
                place_of.pin_memory() if is_cuda else place_of, non_blocking=is_cuda
            )

    def bank(self, name: str, places: Tensor | None = None) -> Bank:
        """All experts of a layer, for the kernels. `places` [experts]: where they lie, if not as the table
        has it."""
        layer = self.names.index(name)
        return bank(
            self.form,
            held=self.slots.first,
            up_factor=self.up_factor[layer],
            down_factor=self.down_factor[layer],
            places=self.table[layer] if places is None else places,
        )

    @property
    def staging(self) -> list[int]:
        """Spare slots in GPU memory beyond the one by way of which experts change places (staging.py)."""
        return [slot for slot in self.spare if self.slots.is_resident(slot)][1:]

    def expert(self, name: str, expert: int) -> Bank:
        """One expert where it lies, to be written."""
        layer = self.names.index(name)
        one = slice(expert, expert + 1)
        held = self.slots[self.slot_of[layer][expert]]
        return bank(self.form, held, self.up_factor[layer, one], self.down_factor[layer, one])

    def is_resident(self) -> Tensor:
        """bool [layers, experts]: whether an expert lies in GPU memory."""
        return torch.tensor([[self.slots.is_resident(slot) for slot in layer] for layer in self.slot_of])

    def num_resident(self, layer: int) -> int:
        return sum(self.slots.is_resident(slot) for slot in self.slot_of[layer])


def place(resident: Sequence[Sequence[bool]], num_spare: tuple[int, int]) -> tuple[list[list[int]], int, int]:
    """The slot of each expert, and how many there are in GPU and in host memory, spare ones included."""
    num_resident = sum(map(sum, resident)) + num_spare[0]
    num_spilled = sum(len(layer) for layer in resident) - sum(map(sum, resident)) + num_spare[1]
    here, there = iter(range(num_resident)), iter(range(num_resident, num_resident + num_spilled))
    slot_of = [[next(here) if is_here else next(there) for is_here in layer] for layer in resident]
    return slot_of, num_resident, num_spilled
