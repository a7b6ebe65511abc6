"""How fast weights come from files: raw reads, reads with copies to the GPU, and the loader, in one run."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4.config import EngineConfig
from dsv4.engine.spill import Split, make_placement
from dsv4.errors import ConfigError
from dsv4.ops.experts.placement import Placement
from dsv4.weights.batches import plan
from dsv4.weights.feed import SLOTS, THREADS, Feed, stream
from dsv4.weights.lanes import buffers
from dsv4.weights.load import CPU_BATCH_BYTES, Checkpoint
from dsv4.weights.tiled import BATCH_BYTES, expert_form, load_tiled


@dataclass(frozen=True)
class Result:
    """`what`: reads, copies or load. `is_cold`: the page cache held nothing of the files before."""

    what: str
    is_cold: bool
    num_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds


def measure(
    checkpoint: Checkpoint, device: torch.device, spilled: int, rounds: int, say: Callable[[Result], object]
) -> list[Result]:
    """Each way once cold, then `rounds` times warm, of which the fastest counts."""
    ways: dict[str, Callable[[], object]] = {"reads": lambda: _read(checkpoint, device)}
    if device.type == "cuda":
        ways["copies"] = lambda: _copy(checkpoint, device)
        ways["load"] = lambda: load_tiled(checkpoint, device, None, _placement(checkpoint, device, spilled))
    elif spilled:
        raise ConfigError("--spill is about a GPU's experts, and this runs on the CPU; leave it out")
    else:
        ways["load"] = lambda: checkpoint.load(dense=False)
    found = []
    for is_cold in (True, False):
        for what, run in ways.items():
            runs = [_timed(checkpoint, what, is_cold, run) for _ in range(1 if is_cold else rounds)]
            one = min(runs, key=lambda result: result.seconds)
            say(one)
            found.append(one)
    return found


def _timed(checkpoint: Checkpoint, what: str, is_cold: bool, run: Callable[[], object]) -> Result:
    if is_cold:
        _forget(checkpoint)
    before, start = checkpoint.reader.num_read, time.perf_counter()
    held = run()
    seconds = time.perf_counter() - start
    del held
    return Result(what, is_cold, checkpoint.reader.num_read - before, seconds)


def _forget(checkpoint: Checkpoint) -> None:
    """Drop the files from the page cache."""
    for path in {entry.file for entry in checkpoint.reader.entries.values()}:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on disk yet stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _batches(checkpoint: Checkpoint, device: torch.device) -> list:
    is_cuda = device.type == "cuda"
    limit = BATCH_BYTES if is_cuda else CPU_BATCH_BYTES
    return plan(checkpoint.inventory.sources, limit, together=is_cuda)


def _read(checkpoint: Checkpoint, device: torch.device) -> None:
    batches = _batches(checkpoint, device)
    size = max(batch.num_bytes for batch in batches)
    with checkpoint.reader as reader:
        slots = buffers(min(SLOTS, len(batches)), size, device)
        with Feed(reader, batches, slots) as feed:
            for batch in batches:
                feed.wait(batch.index)
                feed.release(batch.index)


def _copy(checkpoint: Checkpoint, device: torch.device) -> None:
    with checkpoint.reader as reader:
        for _ in stream(reader, _batches(checkpoint, device), device):
            pass
    torch.cuda.synchronize(device)


def _placement(checkpoint: Checkpoint, device: torch.device, spilled: int) -> Placement | None:
    """The layers' experts, `spilled` of each layer in pinned host memory."""
    if not spilled:
        return None
    c = checkpoint.config
    if not 0 < spilled <= c.num_experts:
        raise ConfigError(f"--spill {spilled}: expected 1 to {c.num_experts}, the experts of a layer")
    form, names = expert_form(checkpoint)
    layers = [name for name in names if name.startswith("layers.")]
    split = Split(form, tuple(layers), c.num_experts, len(layers) * (c.num_experts - spilled))
    return make_placement(split, None, device)


@dataclass
class Phases:
    """Seconds since the process was started at which each phase of a start had ended."""

    clock: Callable[[], float]
    imported: float = 0.0
    first_bytes: float = 0.0
    loaded: float = 0.0
    first_kernel: float = 0.0
    compiled: float = 0.0
    ready: float = 0.0

    def run(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self.imported = self.clock()
        from dsv4.engine.engine import Engine

        engine = Engine.load(checkpoint.reader.folder, config, self._read, self._compiled)
        self.ready = self.clock()
        engine.close()

    def _read(self, done: int, total: int) -> None:
        self.first_bytes = self.first_bytes or self.clock()
        self.loaded = self.clock()

    def _compiled(self, done: int, total: int, name: str) -> None:
        self.first_kernel = self.first_kernel or self.clock()
        self.compiled = self.clock()

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in vars(self).items() if name != "clock" and value}


def settings() -> dict[str, int]:
    """What the loader reads with."""
    return {"threads": THREADS, "slots": SLOTS}
