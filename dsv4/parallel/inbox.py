"""Memory of this rank that the other ranks' kernels write to, and theirs: torch's symmetric memory."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GONE = -1  # in Inbox.ended: the host knows that a rank is gone


@dataclass(frozen=True)
class Inbox:
    """`ended` is pinned: a step writes there whom it waited for in vain, and the host that it need not."""

    own: Tensor  # int64 [ranks, places], by sender
    addresses: tuple[int, ...]  # of each rank's inbox, where this rank's part begins
    ended: Tensor  # int32 [1]
    handle: Any  # keeps the other ranks' memory mapped


def open_inbox(
    store: dist.Store, name: str, rank: int, size: int, places: int, device: torch.device
) -> Inbox:
    """Of zeros. All ranks call this; nobody may push before all have returned. Raises RuntimeError where a
    GPU cannot reach another's memory."""
    c10d: Any = torch._C._distributed_c10d
    memory, shape = c10d._SymmetricMemory, (size, places)
    # Where ranks meet is looked up by the name of a group.
    group: Any = dist.ProcessGroup(dist.PrefixStore("inbox", store), rank, size)
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
        handle=handle,
    )
