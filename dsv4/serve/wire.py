"""What the HTTP process and the engine's process say to each other: typed messages in length-prefixed frames.

Frames are msgpack with a tag per message, read into these types and nothing else; no pickle. Requests and
deltas are the engine's own dataclasses.
"""

import struct
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from dsv4.config import EngineConfig
from dsv4.engine.request import Delta, Request
from dsv4.engine.survival import Counts
from dsv4.errors import Dsv4Error

MAX_FRAME_BYTES = 64 << 20
HEADER = struct.Struct("!I")


class WireError(Dsv4Error):
    """A frame that the other process cannot have meant: the two are of different versions, or damaged."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class name."""


class Start(Message, frozen=True):
    """The first message to the engine's process: what to load. `again`: it was loaded before, and died."""

    model: str
    config: EngineConfig
    again: bool = False


class Submit(Message, frozen=True):
    """`tells_progress`: how far its prompt is, after every step."""

    request: Request
    tells_progress: bool = False


class Cancel(Message, frozen=True):
    """Ends a request; one that has ended already is left alone, since the two may cross on the way."""

    request_id: str


@dataclass(frozen=True)
class Status:
    """Where the engine stands after a step. `free_pages` no sequence holds; some of them keep a prefix."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    num_pages: int = 0
    kept_pages: int = 0
    pauses: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    drafts: Counts = field(default_factory=Counts)


class Loading(Message, frozen=True):
    """What the engine does before it is ready, and how far weights are; `says` is a line for the log."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    says: str = ""


class Ready(Message, frozen=True):
    max_context: int
    max_batch: int
    vocab_size: int
    notes: list[str]
    status: Status


class Failed(Message, frozen=True):
    """The engine could not be built, for a reason the user can act on; its process ends."""

    error: str


class Lost(Message, frozen=True):
    """A GPU or a rank is lost, so the process ends; why, for the log and for those who wait for answers."""

    reason: str
    public: str


class Accepted(Message, frozen=True):
    request_id: str


class Refused(Message, frozen=True):
    request_id: str
    error: str


@dataclass(frozen=True)
class Progress:
    """Tokens of a prompt: found in the cache, and processed (these among them), after so many seconds."""

    request_id: str
    cached: int
    processed: int
    seconds: float


class Stepped(Message, frozen=True):
    """What one step gave to all requests; the last delta of a request has a finish reason.

    `started` are the requests that have left the queue, `notices` lines for the log.
    """

    deltas: list[Delta]
    status: Status
    started: list[str] = []
    notices: list[str] = []
    progress: list[Progress] = []


ToEngine = Start | Submit | Cancel
FromEngine = Loading | Ready | Failed | Lost | Accepted | Refused | Stepped
Kind = TypeVar("Kind")

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(_checked(len(body))) + body


def read(decoder: "msgspec.msgpack.Decoder[Kind]", body: bytes) -> Kind:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"a message between the server's processes is damaged ({error})") from None


class Frames:
    """Bytes as they arrive, in any pieces, to whole frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        self._buffer += data
        bodies, start = [], 0
        while len(self._buffer) - start >= HEADER.size:
            end = start + HEADER.size + _checked(HEADER.unpack_from(self._buffer, start)[0])
            if end > len(self._buffer):
                break
            bodies.append(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def _checked(num_bytes: int) -> int:
    if num_bytes > MAX_FRAME_BYTES:
        raise WireError(
            f"a message between the server's processes has {num_bytes} bytes, "
            f"expected at most {MAX_FRAME_BYTES}"
        )
    return num_bytes
