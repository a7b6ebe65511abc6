"""A rank other than 0: loads its share, then applies what rank 0 applies, until rank 0 is gone."""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from dsv4.config import EngineConfig
from dsv4.engine.build import Prepared, make_executor
from dsv4.engine.plan import Plan
from dsv4.engine.runner import Executor, L, Member, Result
from dsv4.errors import DeviceError, Dsv4Error
from dsv4.parallel.channel import Channel, Closed, Kind
from dsv4.parallel.comm import Group, Meeting, PeerError
from dsv4.parallel.machines import World, call_on
from dsv4.parallel.mesh import Mesh
from dsv4.parallel.reading import Share

# From the end of the channel on, for a rank to read what rank 0 said last.
LAST_WORDS_SECONDS = 1.0


class Follower(Member[L]):
    """The runner of such a rank. It chooses the tokens that rank 0 chooses; the next plan shows whether."""

    def __init__(self, executor: Executor[L], channel: Channel, name: str) -> None:
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
            elif kind is Kind.END:
                return
            else:
                raise DeviceError(f"{self.name} was sent {kind.name}, expected a plan")

    def _mask(self, sequence: int, ahead: tuple[int, ...] = ()) -> bytes | None:
        kind, body = self.channel.receive()
        if kind is not Kind.MASK:
            raise DeviceError(f"{self.name} was sent {kind.name}, expected the mask of sequence {sequence}")
        return body or None

    def _note(self, plan: Plan, results: list[Result]) -> None:
        # Whoever wants logits may go on with another token than the one that was chosen.
        ends = {span.sequence: span.end for span in plan.spans if not span.wants_logits}
        for result in results:
            token = result.more[-1] if result.more else result.token
            if token is not None and result.sequence in ends:
                self._chosen[result.sequence] = (ends[result.sequence] + len(result.more), token.id)

    def _compare(self, plan: Plan) -> None:
        for span in plan.decode:
            position, id = self._chosen.pop(span.sequence, (-1, -1))
            if position == span.start and id != span.ids[0]:
                raise DeviceError(
                    f"chose token {id} at position {position}, rank 0 chose {span.ids[0]}: "
                    "the ranks have computed different logits"
                )


def follow(channel: Channel, meeting: Meeting | None = None) -> None:
    """`meeting`: None with a rank that rank 0 started, which names a file."""
    start = json.loads(_expected(channel, Kind.START))
    settings = {**start["config"], "ops": tuple(map(tuple, start["config"]["ops"]))}
    config, rank, devices = EngineConfig(**settings), start["rank"], start["devices"]
    prepared = Prepared.make(Path(start["path"]), config, rank, devices)
    memory = start["memory"]
    weights, _ = prepared.load(share=None if memory is None else Share(memory, rank, len(devices)))
    channel.send(Kind.LOADED)
    _expected(channel, Kind.JOIN)
    meeting = meeting or Meeting.at(start["file"], len(devices))
    meeting = replace(meeting, hosts=tuple(start["hosts"]))
    comm = Group(meeting, rank, devices, config.rank_seconds)
    mesh = Mesh(rank, len(devices), comm, config.expert_parallel)
    _, executor = make_executor(prepared.bundle(weights, mesh), prepared.settings, config)
    Follower(executor, channel, mesh.name).run()


def _expected(channel: Channel, kind: Kind) -> bytes:
    found, body = channel.receive()
    if found is Kind.END:
        raise Closed("rank 0 has ended before all ranks had begun")
    assert found is kind, found
    return body


def _end_with(channel: Channel, seconds: float, name: str) -> None:
    """Rank 0 is gone as soon as its end of the channel is: do not wait for a collective to find out.

    `seconds`: for what it has said last. `name`: of a rank that nobody else speaks for."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLRDHUP)
    poll.poll()
    time.sleep(seconds)
    _exit(f"{name}: rank 0 is gone or has ended all ranks, and says why if it can" if name else "")


def main(descriptor: int) -> None:
    """A rank that rank 0 has started (`dsv4.child`)."""
    _run(Channel(socket.socket(fileno=descriptor)), None, "", 0.0)


def main_launched(world: World) -> None:
    """A rank that torchrun has started, whose words nobody else repeats."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    name = f"rank {world.rank} of {world.size}"
    try:
        channel, meeting = call_on(world)
    except DeviceError as error:
        _exit(f"{name}: {error}")
    _run(channel, meeting, name, LAST_WORDS_SECONDS)


def _run(channel: Channel, meeting: Meeting | None, name: str, seconds: float) -> NoReturn:
    threading.Thread(target=_end_with, args=(channel, seconds, name), daemon=True).start()
    why = ""
    try:
        follow(channel, meeting)
        _exit("", 0)
    except Closed as error:
        why = str(error)
    except PeerError:
        channel.say_last(Kind.WAITED)
        why = "another rank is gone or late; rank 0 says which"
    except (RuntimeError, MemoryError, Dsv4Error) as error:
        why = str(error).strip().split("\n")[0]
        channel.say_last(Kind.FAILED, why.encode())
    _exit(f"{name}: {why}" if name else "")


def _exit(why: str, code: int = 1) -> NoReturn:
    """Not `sys.exit`: what holds a broken group waits for it."""
    if why:
        sys.stderr.write(f"error: {why}\n")
    sys.stderr.flush()
    os._exit(code)
