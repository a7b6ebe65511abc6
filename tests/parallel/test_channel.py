"""Frames between ranks: bounded, of known kinds, and an end that is gone is noticed."""

import socket

import pytest
import torch

from dsv4.config import EngineConfig
from dsv4.engine.build import rank_devices
from dsv4.errors import ConfigError, DeviceError
from dsv4.parallel.channel import HEADER, MAX_BYTES, Channel, Closed, Kind


def pair(seconds: float | None = 1.0) -> tuple[socket.socket, Channel]:
    ours, theirs = socket.socketpair()
    return ours, Channel(theirs, seconds)


def test_frames() -> None:
    raw, channel = pair()
    sender = Channel(raw)
    for kind, body in ((Kind.PLAN, b"x" * 100_000), (Kind.FORGET, b"")):
        sender.send(kind, body)
        assert channel.receive() == (kind, body)
    sender.close()
    with pytest.raises(Closed):
        channel.receive()
    with pytest.raises(Closed):
        channel.send(Kind.WAITED)


def test_half_a_frame() -> None:
    raw, channel = pair()
    raw.sendall(HEADER.pack(Kind.PLAN, 10) + b"12345")
    raw.close()
    with pytest.raises(Closed):
        channel.receive()


@pytest.mark.parametrize("header", [(200, 1), (int(Kind.PLAN), MAX_BYTES + 1)])
def test_damaged_header(header: tuple[int, int]) -> None:
    raw, channel = pair()
    raw.sendall(HEADER.pack(*header))
    with pytest.raises(DeviceError, match="damaged message between ranks"):
        channel.receive()
    with pytest.raises(DeviceError, match="expected at most"):
        channel.send(Kind.PLAN, bytes(MAX_BYTES + 1))


def test_nobody_takes_it() -> None:
    raw, channel = pair(0.1)
    with raw, pytest.raises(TimeoutError):
        channel.send(Kind.PLAN, bytes(8 << 20))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_devices(EngineConfig(device="cpu", ranks=2)) == ["cpu", "cpu"]
    for wrong in ("x", "0,0", "1,", "-1", "99999999"):
        with pytest.raises(ConfigError, match="expected how many, or which ones: 2 or 0,1"):
            rank_devices(EngineConfig(gpus=wrong))
    with pytest.raises(ConfigError, match="gpus 0: expected at least one"):
        rank_devices(EngineConfig(gpus="0"))
    # Not `use --device cpu`: beside gpus that is refused.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"gpus '1,0': .* leave it out .* or use --ranks 2 there"):
        rank_devices(EngineConfig(gpus="1,0"))
    with pytest.raises(ConfigError, match="leave device and ranks out"):
        EngineConfig(gpus="2", ranks=2)
    with pytest.raises(ConfigError, match="rank_seconds is 0"):
        EngineConfig(rank_seconds=0)
