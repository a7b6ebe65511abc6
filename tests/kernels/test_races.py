"""The emulator finds races, and only those: small kernels with and without."""

import ctypes

import pytest

from tests.support.twin import needs_compiler, twin_of

pytestmark = needs_compiler
twin = twin_of("races", **dict.fromkeys(("race", "race_in_what_was_expected"), ctypes.c_char_p))
CLEAN = (
    "barrier",
    "one writes for all",
    "syncwarp",
    "groups by themselves",
    "known by way of another",
    "a barrier that others use next",
    "bytes side by side",
    "atomics",
    "cp.async",
    "release",
    "what a relaxed barrier follows in a block's own memory has happened",
    "what is heard between arriving and waiting stays known",
    "sent",
    "copied",
    "blocks beside each other",
    "blocks that add",
)
UNORDERED = (
    "no barrier",
    "no barrier before the next write",
    "a shuffle is no barrier",
    "syncwarp of other warps",
    "groups that mix",
    "a barrier that others use next says nothing of them",
    "a forgotten reader",
    "a byte of a word",
    "a byte written again covers no word",
    "an atomic and a read",
    "cp.async awaited after the barrier",
    "a relaxed barrier releases no store to another block",
    "nor one to global memory",
    "without a barrier it has not",
    "sent, and not awaited by all",
    "sent to where others read",
    "copied, and overwritten meanwhile",
    "blocks over each other",
    "a block reads what another writes",
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CLEAN)
def test_no_race(twin: ctypes.CDLL, name: str, seed: int) -> None:
    assert twin.race(name.encode(), seed) == b""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", UNORDERED)
def test_race(twin: ctypes.CDLL, name: str, seed: int) -> None:
    assert b"are not ordered" in twin.race(name.encode(), seed)


def test_a_copy_of_what_was_not_fenced(twin: ctypes.CDLL) -> None:
    assert b"are not fenced" in twin.race(b"copied without a fence", 0)


def test_nothing_is_watched_when_a_launch_has_found_it(twin: ctypes.CDLL) -> None:
    """A tensor's memory may be the emulator's own when it is gone: by chance, that was seen as a race."""
    assert twin.race_in_what_was_expected(0) == b""
