"""A rank other than 0: loads its share, then applies what rank 0 applies, until rank 0 is gone."""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from dsv4.config import EngineConfig
from dsv4.engine.build import Prepared, make_executor
from dsv4.engine.plan import Plan
from dsv4.engine.runner import Executor, Member, Result
from dsv4.errors import DeviceError, Dsv4Error
from dsv4.parallel.channel import Channel, Closed, Kind
from dsv4.parallel.comm import Group, PeerError
from dsv4.parallel.mesh import Mesh

_PR_SET_PDEATHSIG = 1


class Follower(Member):
    """The runner of such a rank. It chooses the tokens that rank 0 chooses; the next plan shows whether."""

    def __init__(self, executor: Executor, channel: Channel, name: str) -> None:
        super().__init__(executor)
        self.channel, self.name = channel, name
        self._chosen: dict[int, tuple[int, int]] = {}  # sequence -> position and id of its last token

    def run(self) -> None:
        while True:
            kind, body = self.channel.receive()
            if kind is Kind.PLAN:
                plan = Plan.from_bytes(body)
                self._compare(plan)
                self._note(plan, self.apply(plan, self._mask))
            elif kind is Kind.STUDY:
                given = json.loads(body)
                self.study(Plan.from_bytes(given["plan"].encode()), None, given["next_ids"])
            elif kind is Kind.FORGET:
                self.forget()
            else:
                raise DeviceError(f"{self.name} was sent {kind.name}, expected a plan")

    def _mask(self, sequence: int) -> bytes | None:
        kind, body = self.channel.receive()
        if kind is not Kind.MASK:
            raise DeviceError(f"{self.name} was sent {kind.name}, expected the mask of sequence {sequence}")
        return body or None

    def _note(self, plan: Plan, results: list[Result]) -> None:
        # Whoever wants logits may go on with another token than the one that was chosen.
        ends = {span.sequence: span.end for span in plan.spans if not span.wants_logits}
        for result in results:
            if result.token is not None and result.sequence in ends:
                self._chosen[result.sequence] = (ends[result.sequence], result.token.id)

    def _compare(self, plan: Plan) -> None:
        for span in plan.decode:
            position, id = self._chosen.pop(span.sequence, (-1, -1))
            if position == span.start and id != span.ids[0]:
                raise DeviceError(
                    f"chose token {id} at position {position}, rank 0 chose {span.ids[0]}: "
                    "the ranks have computed different logits"
                )


def follow(channel: Channel) -> None:
    kind, body = channel.receive()
    assert kind is Kind.START, kind
    start = json.loads(body)
    settings = {**start["config"], "ops": tuple(map(tuple, start["config"]["ops"]))}
    config, rank, devices = EngineConfig(**settings), start["rank"], start["devices"]
    prepared = Prepared.make(Path(start["path"]), config, rank, devices)
    weights, _ = prepared.load()
    channel.send(Kind.LOADED)
    kind, _ = channel.receive()
    assert kind is Kind.JOIN, kind
    comm = Group(start["file"], rank, devices, config.rank_seconds)
    mesh = Mesh(rank, len(devices), comm, config.expert_parallel)
    _, executor = make_executor(prepared.bundle(weights, mesh), prepared.settings, config)
    Follower(executor, channel, mesh.name).run()


def _end_with(descriptor: int) -> None:
    """Rank 0 is gone as soon as its end of the channel is: do not wait for a collective to find out."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def main(descriptor: int) -> None:
    # Signals of the terminal are for rank 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # even a stopped process ends with its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=descriptor))
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    try:
        follow(channel)
    except Closed:
        pass
    except PeerError:
        channel.send(Kind.WAITED)
    except (RuntimeError, MemoryError, Dsv4Error) as error:
        channel.send(Kind.FAILED, str(error).strip().split("\n")[0].encode())
    # Not `sys.exit`: what holds a broken group waits for it.
    sys.stderr.flush()
    os._exit(1)
