"""Prefixes that survive: which folder and identity they have, and prompts that wait for what files hold."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import ModuleType

import torch

from dsv4 import identity
from dsv4.cache.folder import PrefixFolder
from dsv4.cache.prefix import PrefixCache
from dsv4.cache.shelf import Found, Shelf
from dsv4.cache.store import Cache
from dsv4.config import EngineConfig
from dsv4.engine.request import Sequence
from dsv4.engine.scheduler import Scheduler
from dsv4.engine.settings import Settings
from dsv4.model.bundle import Bundle
from dsv4.ops import IMPLEMENTATIONS
from dsv4.weights.checksum import checksum

# An engine with nothing else to do looks for messages again after so long.
WAIT_SECONDS = 0.02


def make_shelf(
    config: EngineConfig, settings: Settings, bundle: Bundle, cache: Cache, say: Callable[[str], object]
) -> Shelf | None:
    if config.prefix_dir is None:
        return None
    folder = PrefixFolder(
        folder=Path(config.prefix_dir).expanduser(),
        identity=folder_name(settings, bundle, cache),
        max_bytes=config.prefix_dir_bytes,
        say=say,
    )
    return Shelf(
        folder=folder,
        page_tokens=cache.layout.page_tokens,
        page_bytes=cache.page_bytes,
        snapshot_bytes=cache.snapshot_bytes,
        pin_memory=settings.device.kind == "cuda",
    )


def folder_name(settings: Settings, bundle: Bundle, cache: Cache) -> str:
    """A hash of everything that changes a bit of what is kept, or its place."""
    layout, device = cache.layout, torch.device(settings.device.torch_name)
    facts = {
        "weights": checksum(bundle.weights),
        "config": bundle.config.to_dict(),
        "numerics": repr(bundle.numerics),
        "held": [settings.dense, settings.tiled],
        "ops": {op: _source(getattr(settings.ops, op)) for op in IMPLEMENTATIONS},
        "formats": [layout.kv_format, layout.key_format, layout.rope_itemsize],
        "layers": [layout.num_mtp_layers, layout.page_tokens, cache.page_bytes],
        "machine": identity.machine(device),
        "threads": settings.threads,
        "drafts": settings.drafts != 0,  # without them a snapshot's window of the draft block is nothing
        "versions": identity.versions(),
        "source": identity.code(),
    }
    return identity.digest(facts)


def _source(module: ModuleType) -> str:
    """An op's backend, which may come from outside dsv4."""
    path = Path(module.__file__ or "")
    return f"{module.__name__} {identity.files([path], path.parent)}"


class Arrivals:
    """Sequences on their way to the scheduler: those that may find their beginning in files wait for that."""

    def __init__(self, scheduler: Scheduler, prefix: PrefixCache) -> None:
        self.scheduler, self.prefix = scheduler, prefix
        self._reading: dict[Sequence, Future[Found | None]] = {}

    @property
    def waiting(self) -> list[Sequence]:
        """Those that no step has begun with."""
        return [*self._reading, *self.scheduler.waiting]

    def add(self, sequence: Sequence) -> None:
        request, shelf = sequence.request, self.prefix.shelf
        is_short = len(request.ids) <= self.prefix.slots.layout.page_tokens
        if shelf is None or is_short or request.params.prompt_logprobs is not None:
            return self.scheduler.add(sequence)
        known, saved = self.prefix.known(request.owner, request.ids)
        self._reading[sequence] = shelf.find(request.owner, request.ids, known, saved)

    def take(self) -> None:
        """Hand on what has been looked up; when there is nothing else to do, wait for it a little."""
        if self._reading and not self.scheduler.running and not self.scheduler.waiting:
            wait(self._reading.values(), WAIT_SECONDS, "FIRST_COMPLETED")
        for sequence, found in list(self._reading.items()):
            if found.done():
                sequence.found = found.result()
                del self._reading[sequence]
                self.scheduler.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take the sequence out, wherever it is."""
        if reading := self._reading.pop(sequence, None):
            reading.cancel()
        else:
            self.scheduler.finish(sequence)
