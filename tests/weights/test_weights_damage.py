"""Damaged files: cut, overwritten, with headers that lie. Refused by name, never by another exception."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import header_of, load_both, read_file, refused, write_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4.errors import CheckpointError
from dsv4.lab.styles import STYLES


def test_originals_load(originals: dict[str, Path]) -> None:
    for folder in originals.values():
        load_both(folder)


# Bytes: anything may be missing, added or wrong.

PROPERTY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@PROPERTY
@given(data=st.data())
def test_truncated_anywhere(data: st.DataObject, originals: dict[str, Path], place: Callable) -> None:
    raw = (originals["official"] / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    length = data.draw(st.integers(0, header + 10) | st.integers(0, len(raw) - 1))
    folder = place("official")
    (folder / "model.safetensors").write_bytes(raw[:length])
    refused(folder, "model.safetensors", "copy or download it again")


@PROPERTY
@given(extra=st.binary(min_size=1, max_size=40))
def test_bytes_after_the_end(extra: bytes, originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    raw = (originals["official"] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw + extra)
    refused(folder, f"{len(extra)} bytes follow the last tensor", "copy or download it again")


@PROPERTY
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 200_000))
def test_wrong_header_length(length: int, originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    raw = (originals["official"] / "model.safetensors").read_bytes()
    if length != int.from_bytes(raw[:8], "little"):
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + raw[8:])
        refused(folder, "model.safetensors", "copy or download it again")


@settings(PROPERTY, max_examples=80)
@given(data=st.data(), style=st.sampled_from(["official", "modelopt", "hf-bf16"]))
def test_random_bytes_in_the_header(
    data: st.DataObject, style: str, originals: dict[str, Path], place: Callable
) -> None:
    """A change of a blank may pass; anything else must be a CheckpointError."""
    raw = bytearray((originals[style] / "model.safetensors").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(8, 7 + length))
        new = data.draw(
            st.sampled_from([b"0", b"9", b'"', b"]", b"{", b",", b"-", b"\xff"]) | st.binary(max_size=4)
        )
        raw[start : start + len(new)] = new
    folder = place(style)
    (folder / "model.safetensors").write_bytes(raw)
    try:
        load_both(folder)
    except CheckpointError as error:
        assert len(str(error)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(PROPERTY, max_examples=80)
@given(data=st.data())
def test_arbitrary_json_in_a_header_entry(
    data: st.DataObject, originals: dict[str, Path], place: Callable
) -> None:
    tensors = read_file(originals["official"] / "model.safetensors")
    header: Any = header_of(tensors)
    name = data.draw(st.sampled_from(sorted(header)))
    where = data.draw(
        st.sampled_from(["entry", "dtype", "shape", "data_offsets", "shape item", "offset item"])
    )
    value = data.draw(JSON)
    if where == "entry":
        header[name] = value
    elif where.endswith("item"):
        key = "shape" if where == "shape item" else "data_offsets"
        if header[name][key]:
            header[name][key][0] = value
    else:
        header[name][where] = value
    folder = place("official")
    write_file(folder / "model.safetensors", tensors, header)
    try:
        load_both(folder)
    except CheckpointError as error:
        assert name in str(error) or "model.safetensors" in str(error)


@settings(PROPERTY, max_examples=40)
@given(data=st.data(), style=st.sampled_from(sorted(STYLES)))
def test_random_bytes_in_the_data(
    data: st.DataObject, style: str, originals: dict[str, Path], place: Callable
) -> None:
    """Other weights are other weights; only what is no number is refused, and it is named."""
    tensors = read_file(originals[style] / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    stored = tensors[name]
    start = data.draw(st.integers(0, len(stored.data) - 1))
    new = data.draw(
        st.sampled_from([b"\xff" * 8, b"\x7f" * 8, b"\x80\x7f"]) | st.binary(min_size=1, max_size=8)
    )
    new = new[: len(stored.data) - start]
    stored.data[start : start + len(new)] = new
    folder = place(style)
    write_file(folder / "model.safetensors", tensors)
    try:
        load_both(folder)
    except CheckpointError as error:
        base = name.rsplit(".", 1)[0]
        assert base in str(error)


@PROPERTY
@given(raw=st.binary(max_size=200))
def test_arbitrary_file(raw: bytes, originals: dict[str, Path], place: Callable) -> None:
    folder = place("official")
    (folder / "model.safetensors").write_bytes(raw)
    refused(folder)


# Headers: one thing is wrong. Each case changes the header of a good file.

FIRST, SECOND = "embed.weight", "head.weight"


def set_offsets(name: str, start: int, stop: int) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        old = header[name]["data_offsets"]
        header[name]["data_offsets"] = [old[0] + start, old[1] + stop]

    return change


def set_key(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update({key: value})


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "overlap": (set_offsets(SECOND, -4, -4), (SECOND, "overlaps", FIRST)),
    "gap": (set_offsets(SECOND, 4, 4), (SECOND, "leaves a gap after", FIRST)),
    "same place twice": (set_offsets(SECOND, -15360, -15360), (SECOND, "overlaps")),
    "beyond the end": (set_offsets(SECOND, 10**9, 10**9), (SECOND, "ends at byte", "truncated")),
    "far beyond the end": (set_offsets(SECOND, 10**30, 10**30), (SECOND, "malformed")),
    "too short": (set_offsets(SECOND, 0, -2), (SECOND, "expected 15,360")),
    "reversed": (lambda h: h[SECOND]["data_offsets"].reverse(), (SECOND, "expected 15,360")),
    "negative": (set_offsets(FIRST, -2, -2), (FIRST, "malformed")),
    "three offsets": (set_key(FIRST, "data_offsets", [0, 1, 2]), (FIRST, "malformed")),
    "float offset": (set_key(FIRST, "data_offsets", [0.0, 15360.0]), (FIRST, "malformed")),
    "bool offset": (set_key(FIRST, "data_offsets", [False, 15360]), (FIRST, "malformed")),
    "no offsets": (lambda h: h[FIRST].pop("data_offsets"), (FIRST, "malformed", "data_offsets")),
    "no dtype": (lambda h: h[FIRST].pop("dtype"), (FIRST, "malformed", "dtype")),
    "no shape": (lambda h: h[FIRST].pop("shape"), (FIRST, "malformed", "shape")),
    "dtype a list": (set_key(FIRST, "dtype", ["BF16"]), (FIRST, "malformed")),
    "dtype unknown": (set_key(FIRST, "dtype", "F4"), (FIRST, "dtype 'F4', expected one of")),
    "shape a string": (set_key(FIRST, "shape", ""), (FIRST, "malformed")),
    "shape an object": (set_key(FIRST, "shape", {}), (FIRST, "malformed")),
    "negative size": (set_key(FIRST, "shape", [-60, -128]), (FIRST, "malformed")),
    "bool size": (set_key(FIRST, "shape", [True, 7680]), (FIRST, "malformed")),
    "1000 dimensions": (set_key(FIRST, "shape", [1] * 1000 + [7680]), (FIRST, "malformed")),
    "an entry that is a list": (lambda h: h.update({FIRST: [1, 2]}), (FIRST, "malformed")),
    "an entry that is null": (lambda h: h.update({FIRST: None}), (FIRST, "malformed")),
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_header(case: str, originals: dict[str, Path], place: Callable) -> None:
    change, words = HEADERS[case]
    folder = place("bf16")
    tensors = read_file(originals["bf16"] / "model.safetensors")
    assert list(tensors)[:2] == [FIRST, SECOND] and len(tensors[FIRST].data) == 15360
    header = header_of(tensors)
    change(header)
    write_file(folder / "model.safetensors", tensors, header)
    refused(folder, "model.safetensors", *words)


RAW_HEADERS = {
    "empty": (b"", "is not JSON"),
    "a list": (b"[1, 2]", "is a list, expected an object"),
    "a number": (b"17", "is a int, expected an object"),
    "cut": (b'{"a": {"dtype"', "is not JSON"),
    "not UTF-8": (b'{"\xff\xfe": 1}', "is not JSON"),
    "deeply nested": (b'{"a":' * 50_000, "is not JSON"),
    "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    "a tensor twice": (b'{"a": {}, "b": {}, "a": {}}', "names 'a' twice"),
    "a key twice": (b'{"a": {"dtype": "F32", "dtype": "BF16"}}', "names 'dtype' twice"),
}


@pytest.mark.parametrize("case", RAW_HEADERS)
def test_header_that_is_no_header(case: str, place: Callable) -> None:
    text, words = RAW_HEADERS[case]
    folder = place("bf16")
    write_file(folder / "model.safetensors", {}, text)
    refused(folder, "model.safetensors", words, "again")


def test_many_tensors_named_twice_are_refused_quickly(place: Callable) -> None:
    folder = place("bf16")
    pairs = ", ".join(f'"{i % 100_000}": 0' for i in range(200_000))
    write_file(folder / "model.safetensors", {}, ("{" + pairs + "}").encode())
    refused(folder, "names '0' twice")
