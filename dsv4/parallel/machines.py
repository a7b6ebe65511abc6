"""Ranks that torchrun started, on one machine or several: where they meet, and rank 0's channel to each.

Rank 0 listens at the address by which it reaches the meeting point, and leaves port and password there. A
machine that is cut off shows within `LOST_SECONDS`: the kernel probes both ends.
"""

import json
import logging
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from dsv4.env import attempt, has_agent_store, launched_by
from dsv4.errors import ConfigError, DeviceError
from dsv4.parallel.channel import Channel, Closed, Kind
from dsv4.parallel.comm import Meeting

logger = logging.getLogger("dsv4.parallel")

LOST_SECONDS = 3
# Until all have come: they are started together, but not at the same moment, and each imports torch.
JOIN_SECONDS = 300.0
_HELLO_SECONDS = 5.0
_PLACE, _COUNT = "dsv4/rank 0", "dsv4/engines"


@dataclass(frozen=True)
class World:
    """What torchrun said: which rank this process is, of how many, and which of its machine."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int

    @classmethod
    def find(cls) -> "World | None":
        """None: this process is nobody's rank."""
        found = launched_by()
        if found is None or found["WORLD_SIZE"] == "1":
            return None
        numbers = {name: value for name, value in found.items() if name != "MASTER_ADDR"}
        if wrong := [f"{name}={value}" for name, value in numbers.items() if not value.isdecimal()]:
            raise ConfigError(
                f"the environment has {', '.join(wrong)}, expected numbers as torchrun sets them"
            )
        world = cls(
            rank=int(found["RANK"]),
            size=int(found["WORLD_SIZE"]),
            local_rank=int(found["LOCAL_RANK"]),
            address=found["MASTER_ADDR"],
            port=int(found["MASTER_PORT"]),
        )
        if world.rank >= world.size:
            raise ConfigError(f"the environment has RANK={world.rank} of WORLD_SIZE={world.size}")
        return world

    def store(self) -> dist.Store:
        """Where all ranks meet, in this attempt: torchrun's, or without one of rank 0."""
        try:
            store = dist.TCPStore(
                host_name=self.address,
                port=self.port,
                is_master=self.rank == 0 and not has_agent_store(),
                timeout=timedelta(seconds=JOIN_SECONDS),
                wait_for_workers=False,  # `receive_guests` waits, and can be interrupted
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            where = f"MASTER_ADDR {self.address}, MASTER_PORT {self.port}"
            raise DeviceError(f"ranks cannot meet at {where}: {str(error).splitlines()[0]}") from None
        return dist.PrefixStore(f"attempt {attempt()}", store)

    def own_address(self) -> str:
        """Of this machine, as seen from the meeting point. Nothing is sent."""
        try:
            family = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0][0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((self.address, self.port))
                return str(probe.getsockname()[0])
        except OSError as error:
            raise DeviceError(f"MASTER_ADDR {self.address}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Guest:
    """A rank that has come to rank 0."""

    rank: int
    local_rank: int
    host: str  # name and address: two GPUs of one number are the same where this is
    channel: Channel

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def host_name(address: str) -> str:
    return f"{socket.gethostname()} ({address})"


def receive_guests(world: World, seconds: float) -> tuple[list[Guest], dist.Store]:
    """On rank 0: all others, in their order. `seconds`: the longest that one may take to accept a frame."""
    store, address = world.store(), world.own_address()
    if store.add(_COUNT, 1) > 1:
        raise ConfigError(
            "torchrun's ranks serve one engine, and there was one before; start torchrun again for the next"
        )
    password = secrets.token_hex(16)
    with socket.create_server((address, 0), family=_family(address), backlog=world.size) as listener:
        place = {"address": address, "port": listener.getsockname()[1], "password": password}
        store.set(_PLACE, json.dumps(place))
        guests: dict[int, Guest] = {}
        deadline = time.monotonic() + JOIN_SECONDS
        while len(guests) < world.size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                absent = ", ".join(map(str, sorted({*range(1, world.size)} - {*guests})))
                why = f"of {world.size} ranks {absent} did not come within {JOIN_SECONDS:g} s"
                raise DeviceError(why) from None
            if (guest := _greet(sock, password, seconds)) is not None:
                guests[guest.rank] = guest
    return [guests[rank] for rank in sorted(guests)], store


def _greet(sock: socket.socket, password: str, seconds: float) -> Guest | None:
    """None: whoever called is no rank of ours."""
    channel = Channel(sock, _HELLO_SECONDS)
    try:
        kind, body = channel.receive()
        said = json.loads(body) if kind is Kind.HELLO else {}
        if not secrets.compare_digest(str(said.get("password")), password):
            raise DeviceError("another password")
    except (DeviceError, OSError, ValueError, AttributeError) as error:
        logger.warning("a connection to rank 0's port was no rank of this model and was closed: %s", error)
        channel.close()
        return None
    _notice_loss(sock)
    sock.settimeout(seconds)
    return Guest(rank=said["rank"], local_rank=said["local_rank"], host=said["host"], channel=channel)


def call_on(world: World) -> tuple[Channel, Meeting]:
    """On every other rank: the channel to rank 0, and how it meets the others in `Group`."""
    address = world.own_address()
    store = world.store()
    try:
        place = json.loads(store.get(_PLACE))
        sock = socket.create_connection((place["address"], place["port"]), timeout=JOIN_SECONDS)
    except (RuntimeError, OSError) as error:
        why = str(error).strip().split("\n")[0]
        raise Closed(f"rank 0 has not come, or is gone ({why})") from None
    _notice_loss(sock)
    channel = Channel(sock)
    hello = {"rank": world.rank, "local_rank": world.local_rank, "host": host_name(address)}
    channel.send(Kind.HELLO, json.dumps({**hello, "password": place["password"]}).encode())
    return channel, Meeting(store, address)


def _notice_loss(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECONDS - 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
