"""Memory of this rank that the other ranks' kernels write to, and theirs: torch's symmetric memory."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GONE = -1  # in Inbox.ended: the host knows that a rank is gone
MOMENT = timedelta(seconds=0.5)  # between two looks whether a rank was lost


@dataclass(frozen=True)
class Inbox:
    """`ended` is pinned: a step writes there whom it waited for in vain, and the host that it need not."""

    own: Tensor  # int64 [ranks, places], by sender
    addresses: tuple[int, ...]  # of each rank's inbox, where this rank's part begins
    ended: Tensor  # int32 [1]
    handle: Any  # keeps the other ranks' memory mapped


class CountedFromZero(dist.Store):
    """torch numbers the meetings of symmetric memory by process, in its keys. A rank that was started anew
    would wait for the first while one that has met others before offers its second; here both say 0.
    And a wait ends when `is_abandoned` says that a rank is gone."""

    def __init__(self, store: dist.Store, is_abandoned: Callable[[], bool]) -> None:
        super().__init__()
        self._store: Any = store
        self._is_abandoned = is_abandoned
        self._first: int | None = None

    def _key(self, key: str) -> str:
        """Of prefix/number/..., where no part of the prefix is a number."""
        found = re.search(r"/(\d+)(?=/|$)", key)
        if found is None:
            return key
        number = int(found[1])
        self._first = number if self._first is None else self._first
        return f"{key[: found.start()]}/{number - self._first}{key[found.end() :]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(self._key(key))
        return value

    def add(self, key: str, amount: int) -> int:
        total: int = self._store.add(self._key(key), amount)
        return total

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        until = time.monotonic() + (timeout[0] if timeout else self._store.timeout).total_seconds()
        while True:
            try:
                self._store.wait([self._key(key) for key in keys], MOMENT)
                return
            except RuntimeError:
                if self._is_abandoned():
                    raise RuntimeError("another rank is gone") from None
                if time.monotonic() > until:
                    raise


def open_inbox(
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    places: int,
    device: torch.device,
    is_abandoned: Callable[[], bool],
) -> Inbox:
    """Of zeros. All ranks call this; nobody may push before all have returned. Raises RuntimeError where a
    GPU cannot reach another's memory, or a rank is lost meanwhile."""
    c10d: Any = torch._C._distributed_c10d
    memory, shape = c10d._SymmetricMemory, (size, places)
    # Where ranks meet is looked up by the name of a group.
    name = "dsv4-" + name.replace("/", "-")
    counted = CountedFromZero(dist.PrefixStore("inbox", store), is_abandoned)
    group: Any = dist.ProcessGroup(counted, rank, size)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    own = memory.empty_strided_p2p(shape, (places, 1), torch.int64, device)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(own, name)
    parts = [handle.get_buffer(to, shape, torch.int64)[rank] for to in range(size)]
    return Inbox(
        own=own,
        addresses=tuple(part.data_ptr() for part in parts),
        ended=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        handle=(handle, counted),  # torch calls the store's methods, but does not keep what is Python of it
    )
