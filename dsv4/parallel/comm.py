"""What ranks tell each other during a step, in the same order on each: the only caller of torch.distributed.

Sums are made of float32 parts in a balanced tree: first of a rank's own parts, then of the ranks'. A rank's
parts are a subtree, so the sum has the same bits for every number of ranks, and on all of them.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4.errors import DeviceError
from dsv4.parallel.inbox import GONE, MOMENT, Inbox, open_inbox

LOCAL = "127.0.0.1"
START_SECONDS = 600.0  # until all ranks have compiled and recorded what they run, each at its pace
MEET_SECONDS = 20.0  # at least, until all have connected: one that dies meanwhile is noticed only then
logger = logging.getLogger("dsv4.parallel")


class PeerError(DeviceError):
    """Another rank is gone, or kept this one waiting for too long."""


class Comm(Protocol):
    """Collectives: each rank calls the same ones in the same order."""

    def sum_parts(self, parts: Tensor) -> Tensor:
        """[T, P, D], P a power of two -> [T, D]: the parts of all ranks, added up."""
        ...

    def gather_columns(self, columns: Tensor) -> Tensor:
        """[T, n] of each rank -> [T, size * n], rank by rank."""
        ...

    def sum_disjoint(self, values: Tensor) -> Tensor:
        """Rows that one rank has and the others have as zeros -> the rows, bit for bit."""
        ...

    def trade_parts(self, rows: Tensor, counts: list[int]) -> Tensor:
        """float32 [counts[rank], P, D] -> [sum of counts, P / size, D]: this rank's run of the parts of all
        ranks' rows, rank by rank."""
        ...

    def inbox(self, places: int) -> Inbox | None:
        """Of so many packets from each rank; None, on all ranks, where one cannot reach another's memory."""
        ...

    def begin(self) -> None:
        """When this rank is ready: waits for the others, for the last time patiently."""
        ...


def tree_sum(parts: Tensor) -> Tensor:
    """[T, P, D] -> [T, D]: neighbours first."""
    while (count := parts.shape[1]) > 1:
        assert count % 2 == 0, parts.shape
        parts = parts[:, 0::2] + parts[:, 1::2]
    return parts[:, 0]


class Alone:
    """A world of one: what it sends comes back."""

    def inbox(self, places: int) -> Inbox | None:
        return None

    def begin(self) -> None:
        pass

    def sum_parts(self, parts: Tensor) -> Tensor:
        return tree_sum(parts)

    def gather_columns(self, columns: Tensor) -> Tensor:
        return columns

    def sum_disjoint(self, values: Tensor) -> Tensor:
        return values

    def trade_parts(self, rows: Tensor, counts: list[int]) -> Tensor:
        return rows


@dataclass(frozen=True)
class Meeting:
    """How ranks find each other; `address`: of this one, where the others reach it. `hosts`: of all."""

    store: dist.Store
    address: str = LOCAL
    name: str = "dsv4"
    hosts: tuple[str, ...] = ()

    @classmethod
    def at(cls, file: str, size: int) -> "Meeting":
        """Of ranks on one machine."""
        return cls(dist.FileStore(file, size), name=file)


class Group:
    """Ranks that have met; NCCL on GPUs of their own, else gloo.

    A collective that a peer keeps waiting raises PeerError after `seconds`, from `begin` on; one whose peer
    died, at once.
    """

    def __init__(self, meeting: Meeting, rank: int, devices: list[str], seconds: float) -> None:
        """`devices`: of each rank."""
        self.rank, self.size, self._name = rank, len(devices), meeting.name
        self._device, self._seconds = torch.device(devices[rank]), seconds
        self._inbox: Inbox | None = None
        hosts = meeting.hosts or (LOCAL,) * self.size
        self.is_local = len({*hosts}) == 1
        self._store = store = dist.PrefixStore("dsv4", meeting.store)
        store.set_timeout(timedelta(seconds=seconds))
        # NCCL refuses two ranks on one GPU.
        is_own = len({*zip(hosts, devices, strict=True)}) == self.size
        self._is_nccl = self._device.type == "cuda" and is_own
        self._is_abandoned = False
        kind: Any = dist.ProcessGroupNCCL if self._is_nccl else dist.ProcessGroupGloo
        options = kind.Options() if self._is_nccl else kind._Options()
        options._timeout = timedelta(seconds=max(seconds, START_SECONDS))
        patience = options._timeout
        if not self._is_nccl:
            options._devices = [kind.create_device(hostname=meeting.address)]
            # gloo connects the ranks here, and waits five times as long for a connection as it is told to.
            options._timeout = timedelta(seconds=max(seconds, MEET_SECONDS) / 5)
        try:
            self._group = kind(store, rank, self.size, options)
        except RuntimeError as error:
            raise PeerError(f"ranks do not find each other: {_first_line(error)}") from None
        if not self._is_nccl:
            self._group._set_default_timeout(patience)
        store.set_timeout(patience)

    def sum_parts(self, parts: Tensor) -> Tensor:
        return tree_sum(self._gather(tree_sum(parts)).transpose(0, 1))

    def gather_columns(self, columns: Tensor) -> Tensor:
        return self._gather(columns).transpose(0, 1).flatten(1)

    def sum_disjoint(self, values: Tensor) -> Tensor:
        # As integers: 0 + x is x for every bit pattern, which it is not for -0.0.
        flat = values.contiguous().view(torch.int32)
        self._wait(self._group.allreduce, [flat], dist.AllreduceOptions())
        return flat.view(values.dtype)

    def trade_parts(self, rows: Tensor, counts: list[int]) -> Tensor:
        sent = rows.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        out = sent.new_empty(sum(counts), *sent.shape[1:])
        equal = [len(rows)] * self.size
        self._wait(self._group.alltoall_base, out, sent, counts, equal, dist.AllToAllOptions())
        return out

    def inbox(self, places: int) -> Inbox | None:
        if not self.is_local:
            logger.warning("ranks on several machines add up their sums by NCCL, launch by launch")
            return None
        found, why = None, ""
        try:
            found = open_inbox(
                store=self._store,
                name=self._name,
                rank=self.rank,
                size=self.size,
                places=places,
                device=self._device,
                is_abandoned=lambda: self._is_abandoned,
            )
        except RuntimeError as error:
            if self._is_abandoned:
                raise PeerError("another rank is gone") from None
            why = _first_line(error)
        # Also: all inboxes are empty before anybody pushes.
        has_one = torch.full((1, 1), float(found is not None), device=self._device)
        if not bool(self.gather_columns(has_one).all()):
            logger.warning("ranks add up their sums by NCCL: a GPU cannot reach another's memory %s", why)
            return None
        self._inbox = found
        if self._is_abandoned:  # by an `abandon` that found no inbox yet
            self.abandon()
        return found

    def begin(self) -> None:
        self._gather(torch.zeros(1, device=self._device))
        if self._is_nccl:  # whose waits are the stream's
            torch.cuda.synchronize(self._device)
        self._group._set_default_timeout(timedelta(seconds=self._seconds))
        self._store.set_timeout(timedelta(seconds=self._seconds))

    def abandon(self) -> None:
        """A rank is gone: steps that wait for it need not. From any thread."""
        self._is_abandoned = True
        if self._inbox is not None:
            self._inbox.ended.fill_(GONE)

    def _gather(self, own: Tensor) -> Tensor:
        """[...] of each rank -> [size, ...]."""
        own = own.contiguous()
        out = own.new_empty(self.size, *own.shape)
        self._wait(self._group.allgather, [list(out.unbind(0))], [own])
        return out

    def _wait(self, collective: Callable[..., dist.Work], *arguments: object) -> None:
        try:
            work = collective(*arguments)
            while not self._is_nccl and not self._has_come(work):
                pass
            work.wait()
        except RuntimeError as error:
            raise PeerError(_first_line(error)) from None

    def _has_come(self, work: dist.Work) -> bool:
        """Within a moment. gloo does not hear of a machine that was cut off; whoever does calls `abandon`."""
        try:
            work.wait(MOMENT)
        except RuntimeError:
            if not work.is_completed() and self._is_abandoned:
                # Never freed: its destructor would wait for what nobody answers, until its time is up.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                raise RuntimeError("another rank is gone") from None
        return work.is_completed()

    def close(self) -> None:
        self._group.shutdown()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
