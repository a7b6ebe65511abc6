"""Rank 0's side of several ranks: starts them, tells them every plan, ends all when one is gone or late."""

import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from torch import Tensor

from dsv4.child import begin, child_command
from dsv4.config import EngineConfig
from dsv4.engine.plan import Plan
from dsv4.engine.runner import Executor, L, Masks, Member, Result
from dsv4.errors import DeviceError, Dsv4Error, LostError, RequestError
from dsv4.model.step import Tap
from dsv4.parallel.channel import Channel, Closed, Kind
from dsv4.parallel.comm import Group, Meeting, PeerError
from dsv4.parallel.machines import Guest, World, host_name, receive_guests
from dsv4.parallel.mesh import Mesh
from dsv4.parallel.reading import Memory, Share
from dsv4.weights.load import Progress

# How long a rank that waited in vain may take to say so: those that say nothing are the late ones.
LAST_WORDS_SECONDS = 1.5
# After rank 0 has loaded its share, how often those are named that have not.
LATE_SECONDS = 30.0
logger = logging.getLogger("dsv4.engine")


@dataclass
class _Peer:
    rank: int
    name: str  # with its machine, if that is another
    process: subprocess.Popen[bytes] | None  # None: torchrun's
    channel: Channel
    is_loaded: bool = False
    has_waited: bool = False  # it ended because of another rank
    is_gone: bool = False

    def end(self) -> None:
        if self.process is None:
            self.channel.hang_up()
        else:
            self.process.kill()


class Ranks:
    """Ranks 1, 2, ...: processes that it starts on this machine, or torchrun's. They end with this object,
    and with this process."""

    def __init__(
        self, path: Path, config: EngineConfig, devices: list[str], world: World | None = None
    ) -> None:
        """`world`: torchrun's; of its other ranks' GPUs `devices` knows only that they are."""
        self.size, self.seconds, self._devices = len(devices), config.rank_seconds, devices
        self._has_whole_experts = config.expert_parallel
        self._changed = threading.Condition()
        self._reason = self._public = ""  # why the ranks were ended, and without the names of machines
        self._is_stopping = False
        # Not held: the watching thread may be the last to hold this object, and a group that is freed by a
        # thread while the interpreter ends aborts the process.
        self._comm: Callable[[], Group | None] = lambda: None
        # Readable once a rank is lost, for who waits for something else.
        self.alarm, self._ring = socket.socketpair()
        guests: list[Guest] = []
        self._folder = file = ""
        # Ranks that torchrun started have no memory in common: each reads for itself.
        self._memory = Memory() if world is None else None
        if world is None:
            self._folder = tempfile.mkdtemp(prefix="dsv4-ranks-")
            file = str(Path(self._folder) / "store")
            self._meeting = Meeting.at(file, self.size)
        else:
            guests, store = receive_guests(world, self.seconds)
            address = world.own_address()
            hosts = (host_name(address), *(guest.host for guest in guests))
            self._meeting = Meeting(store, address, hosts=hosts)
            if devices[0] != "cpu":
                self._devices = [devices[0], *(f"cuda:{guest.local_rank}" for guest in guests)]
        self._peers = [_Peer(guest.rank, guest.name, None, guest.channel) for guest in guests]
        self._end = weakref.finalize(self, _end, self._peers, self._folder)
        # The kernel ends a rank with the thread that started it: one that lives as long as the ranks.
        # It may call this object at once, so it comes last.
        started: Future[None] = Future()
        arguments = (weakref.ref(self), self._peers, self.size, self.seconds, self._memory, started)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()
        try:
            started.result()
        except BaseException:  # Ctrl-C, while the thread goes on with starting
            started.cancel()
            self._end()
            raise
        for rank, peer in enumerate(self._peers, 1):
            start = {
                **{"path": str(path.resolve()), "config": asdict(config), "rank": rank, "file": file},
                **{"devices": self._devices, "hosts": self._meeting.hosts},
                "memory": None if self._memory is None else self._memory.fileno(),
            }
            with suppress(Closed):  # `check` says which one has died, and how
                peer.channel.send(Kind.START, json.dumps(start).encode())

    @property
    def share(self) -> Share | None:
        """In what all ranks read while they load."""
        return None if self._memory is None else Share(self._memory.fileno(), 0, self.size, self.check)

    def join(self) -> Mesh:
        """Until all have loaded their shares; then they meet."""
        began = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._reason or all(peer.is_loaded for peer in self._peers), LATE_SECONDS
            ):
                # A disk may be slow, so nobody is ended for it.
                late = " and ".join(peer.name for peer in self._peers if not peer.is_loaded)
                since = time.monotonic() - began
                logger.warning("still waiting for %s to load, %.0f s after rank 0 has loaded", late, since)
        self.check()
        if self._memory is not None:
            self._memory.empty()  # all have read
        self.tell(Kind.JOIN)
        try:
            comm = Group(self._meeting, 0, self._devices, self.seconds)
        except PeerError as error:
            raise self.lost(error) from None
        self._comm = weakref.ref(comm)
        self.check()  # one that was lost just before this has not been abandoned
        return Mesh(0, self.size, comm, self._has_whole_experts)

    def begin(self) -> None:
        """All have begun: gloo needs the meeting's file no more, and a rank 0 that is killed leaves none."""
        if self._devices[0] == "cpu":
            shutil.rmtree(self._folder, ignore_errors=True)

    def check(self) -> None:
        """Raise if the ranks were ended."""
        if self._reason:
            all_ended = f"; all {self.size} ranks were ended"
            raise LostError(self._reason + all_ended, self._public + all_ended)

    def watched(self, progress: Progress | None) -> Progress:
        """The same while rank 0 loads, which ends as soon as another rank has."""

        def check_and_tell(done: int, total: int) -> None:
            self.check()
            if progress:
                progress(done, total)

        return check_and_tell

    def tell(self, kind: Kind, body: bytes = b"") -> None:
        """Send to all; a rank that does not take it is late or gone."""
        self.check()
        for peer in self._peers:
            try:
                peer.channel.send(kind, body)
            except TimeoutError:
                self._lose(f" took nothing for {self.seconds:g} s", peer)
                self.check()
            except Closed as error:
                raise self.lost(PeerError(str(error))) from None

    def lost(self, error: Exception) -> LostError:
        """After a failed plan: what to tell the user, with the number of the rank that caused it."""
        if isinstance(error, PeerError):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._reason or all(peer.has_waited for peer in self._peers), LAST_WORDS_SECONDS
                )
            silent = [peer for peer in self._peers if not peer.has_waited]
            if silent:
                self._lose(f" did not answer for {self.seconds:g} s", *silent)
            else:
                self._lose(f"rank 0 kept the others waiting for {self.seconds:g} s")
        else:
            self._lose(f"the step failed on rank 0: {str(error).strip().splitlines()[0]}")
        try:
            self.check()
        except LostError as made:
            return made
        raise AssertionError("a reason was just set")

    def _lose(self, what: str, *who: _Peer) -> None:
        with self._changed:
            if self._reason or self._is_stopping:
                return
            self._public = " and ".join(f"rank {peer.rank}" for peer in who) + what
            self._reason = " and ".join(peer.name for peer in who) + what
            self._changed.notify_all()
        for peer in self._peers:
            peer.end()
        if (comm := self._comm()) is not None:
            comm.abandon()
        with suppress(OSError):
            self._ring.send(b"!")

    def take(self, peer: _Peer, kind: Kind, body: bytes) -> None:
        """What a rank says; called by the watching thread."""
        with self._changed:
            peer.is_loaded |= kind is Kind.LOADED
            peer.has_waited |= kind is Kind.WAITED
            self._changed.notify_all()
        if kind is Kind.FAILED:
            self._lose(f": {body.decode(errors='replace')}", peer)

    def take_end(self, peer: _Peer) -> None:
        how = "its connection has ended"
        if peer.process is not None:
            with suppress(subprocess.TimeoutExpired):
                peer.process.wait(1)
            code = peer.process.returncode
            how = "still runs" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        with self._changed:
            peer.is_gone = True
        if not peer.has_waited:
            self._lose(f" has died ({how})", peer)

    def stop(self) -> None:
        """End the other ranks, now."""
        with self._changed:
            self._is_stopping = True
            self._reason = self._reason or "the engine was closed"
        self._end()
        if (comm := self._comm()) is not None:
            comm.close()
        self.alarm.close()
        self._ring.close()


def _end(peers: list[_Peer], folder: str) -> None:
    for peer in peers:
        if peer.process is None:
            peer.channel.say_last(Kind.END)
        else:
            peer.process.kill()
    for peer in peers:
        if peer.process is not None:
            peer.process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _launch(rank: int, seconds: float, memory: Memory | None = None) -> _Peer:
    ours, theirs = socket.socketpair()
    passed = (theirs.fileno(),) if memory is None else (theirs.fileno(), memory.fileno())
    with theirs:
        process = subprocess.Popen(
            child_command("dsv4.engine.follow", theirs.fileno()),
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(begin, os.getpid()),
        )
    return _Peer(rank, f"rank {rank}", process, Channel(ours, seconds))


def _watch(
    ranks: "weakref.ref[Ranks]",
    peers: list[_Peer],
    size: int,
    seconds: float,
    memory: Memory | None,
    started: "Future[None]",
) -> None:
    """Starts the ranks that are not there, then hears what all say and when they end.

    Holds no Ranks while it waits, so that one can be dropped.
    """
    try:
        for rank in range(len(peers) + 1, size):
            peers.append(_launch(rank, seconds, memory))
    except OSError as error:
        why = f"the process of rank {len(peers) + 1} cannot be started ({error.strerror or error})"
        _end(peers, "")
        started.set_exception(DeviceError(why))
        return
    if not started.set_running_or_notify_cancel():  # nobody waits for them any more
        return _end(peers, "")
    started.set_result(None)
    poll, by_file = select.poll(), {peer.channel.fileno(): peer for peer in peers}
    for file in by_file:
        poll.register(file, select.POLLIN)
    while by_file:
        for file, _ in poll.poll():
            peer = by_file[file]
            try:
                kind, body = peer.channel.receive()
            except (DeviceError, OSError):
                poll.unregister(file)
                del by_file[file]
                if owner := ranks():
                    owner.take_end(peer)
            else:
                if owner := ranks():
                    owner.take(peer, kind, body)
            owner = None
    for peer in peers:
        peer.channel.close()


class Leader(Member[L]):
    """Rank 0's runner: every rank applies what it applies."""

    def __init__(self, executor: Executor[L], ranks: Ranks) -> None:
        super().__init__(executor)
        self.ranks = ranks
        ranks.begin()

    def apply(self, plan: Plan, masks: Masks) -> list[Result]:
        def told(sequence: int, ahead: tuple[int, ...] = ()) -> bytes | None:
            bits = masks(sequence, ahead)
            self.ranks.tell(Kind.MASK, bits or b"")
            return bits

        with _uninterrupted(), self._ending_all():
            self.ranks.tell(Kind.PLAN, plan.to_bytes())
            return super().apply(plan, told)

    def study(
        self, plan: Plan, tap: Tap | None = None, next_ids: list[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if tap is not None:
            raise RequestError(f"what is inside a layer lies on {self.ranks.size} ranks; look at it with one")
        body = json.dumps({"plan": plan.to_bytes().decode(), "next_ids": next_ids}).encode()
        with _uninterrupted(), self._ending_all():
            self.ranks.tell(Kind.STUDY, body)
            return super().study(plan, tap, next_ids)

    def verify(self, plan: Plan, proposed: tuple[int, ...], accepted: int) -> Tensor:
        raise RequestError(f"{self.ranks.size} ranks share the model; look at its drafts with one")

    def forget(self) -> None:
        super().forget()
        # After a loss there is nobody left to tell; the next plan says why.
        with suppress(DeviceError):
            self.ranks.tell(Kind.FORGET)

    @contextmanager
    def _ending_all(self) -> Iterator[None]:
        """Ranks that do not all come to the end of a plan can never meet again."""
        try:
            yield
        except (RuntimeError, MemoryError, Dsv4Error) as error:
            raise self.ranks.lost(error) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect when all ranks have finished the plan."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked and callable(before):
        before(*asked[0])
