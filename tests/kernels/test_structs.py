"""What ctypes has of kernels' structures is what a compiler makes of their sources."""

import ctypes
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.gpu import build, structs
from dsv4.gpu.structs import Struct, mirror

pytest.importorskip("triton", reason="Triton is not installed")

# What CUDA has of its own, and calls in methods.
PRELUDE = """
#include <cstddef>
#include <cstdint>
#define __device__
#define __forceinline__ inline
struct __nv_bfloat16 { uint16_t bits; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
template <typename T> T __ldcg(const T* p) { return *p; }
"""


def mirrored() -> list[type[Struct]]:
    """Those of all launchers, and those inside them."""
    for room in build.FOLDERS:
        for path in sorted(room.glob("*.py")):
            import_module(f"dsv4.{'.'.join(path.relative_to(build.PACKAGE).with_suffix('').parts)}")
    ours = [of for of in Struct.__subclasses__() if build.PACKAGE in of.source.parents]
    return sorted(ours, key=lambda of: (of.source, of.__name__))


def declaration(of: type[Struct]) -> str:
    """As its source has it, of a template that of BF16; the structures inside it before."""
    text = of.source.read_text()
    begin = re.search(rf"^(template <typename \w+> )?struct {of.__name__} {{", text, re.MULTILINE)
    assert begin is not None
    inside = [kind for _, kind, *_ in of._fields_ if not issubclass(kind, ctypes._SimpleCData)]
    inside = [getattr(kind, "_type_", kind) for kind in inside]
    before = [declaration(kind) for kind in inside if issubclass(kind, Struct)]
    return "".join(before) + text[begin.start() : text.index("\n};", begin.start())] + "\n};\n"


def constants(of: type[Struct]) -> str:
    """Plain ones of all its headers: arrays' lengths are among them."""
    lines = [
        line
        for path in structs._with_headers(of.source)
        for line in re.findall(r"^constexpr int (?:\w+ = \d+(?:, )?)+;", path.read_text(), re.MULTILINE)
    ]
    return "\n".join(dict.fromkeys(lines))


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")
def test_the_layout_is_the_compilers(tmp_path: Path) -> None:
    """Every field at its place, with its size; as many fields as there are."""
    found = mirrored()
    assert len(found) >= 22
    source = PRELUDE
    for i, of in enumerate(found):
        is_template = f"> struct {of.__name__} {{" in of.source.read_text()
        name = f"{of.__name__}<__nv_bfloat16>" if is_template else of.__name__
        source += f"namespace n{i} {{\n{constants(of)}\n{declaration(of)}using S = {name};\n"
        source += f'static_assert(sizeof(S) == {ctypes.sizeof(of)}, "{of.declared}");\n'
        for field, *_ in of._fields_:
            at = getattr(of, field)
            source += (
                f"static_assert(offsetof(S, {field}) == {at.offset} && sizeof(S::{field}) == {at.size});\n"
            )
        fields = ", ".join(f"f{j}" for j in range(len(of._fields_)))
        source += f"inline void count(S& s) {{ auto& [{fields}] = s; }}\n}}\n"
    (tmp_path / "structs.cpp").write_text(source)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", str(tmp_path / "structs.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[:2000]


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, header: str = "") -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "a.cu").write_text(text)
    (room / "b.cuh").write_text(header)
    monkeypatch.setattr(structs, "FOLDERS", (room,))
    monkeypatch.setattr(structs, "HEADERS", (room / "b.cuh",))


def test_a_source_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, constants and structures of headers, lists of names, arrays, methods."""
    text = """#include "b.cuh"
struct All {
    const float *a, *b;   // two; of them
    Part parts[COUNT], one;
    int64_t* inbox[2];
    int n, m;
    int sum() const { if (n) { return n; } return m; }
    float x;
};
"""
    written(
        tmp_path, monkeypatch, text, "constexpr int OTHER = 9, COUNT = 3;\nstruct Part {\n    int i;\n};\n"
    )
    of = mirror("room/a.cu", "All")
    assert [name for name, _ in of._fields_] == ["a", "b", "parts", "one", "inbox", "n", "m", "x"]
    assert ctypes.sizeof(of) == 64 and mirror("room/a.cu", "All") is of
    part = mirror("room/a.cu", "Part")
    tensor = torch.zeros(3)
    made = of(a=tensor, b=None, parts=[part(i=5)], one=part(i=6), inbox=(7,), n=1, m=2, x=0.5)
    assert (made.a, made.b, made.inbox[0], made.inbox[1]) == (tensor.data_ptr(), None, 7, None)
    assert [p.i for p in made.parts] == [5, 0, 0] and made.one.i == 6 and made.x == 0.5
    assert of.blank(m=4).m == 4 and of.blank(m=4).n == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("struct B {\n    int i;\n};\n", "room/a.cu: struct A is neither there nor in a header"),
        ("struct A {\n    Lost it;\n};\n", r"room/a.cu: struct A.it: struct Lost is neither"),
        ("struct A {\n    int i[MANY];\n};\n", "room/a.cu: struct A.i: the constant MANY is not known"),
        ("struct A {\n    int i : 3;\n};\n", "room/a.cu: struct A: cannot read the field 'i : 3'"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    written(tmp_path, monkeypatch, text)
    with pytest.raises(LookupError, match=re.escape(problem)):
        mirror("room/a.cu", "A")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"repeats": 1, "turns": 1, "units": 1}, r"struct Share: missing \['cost'\], unknown none"),
        ({"repeats": 1, "turns": 1, "units": 1, "cost": 1, "costs": 1}, r"missing none, unknown \['costs'\]"),
        (
            {"repeats": 1, "turns": 1, "units": 1, "cost": 1.5},
            r"linear/share.cuh: struct Share.cost: .*float",
        ),
    ],
)
def test_every_field_is_given(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        mirror("linear/matvec.cu", "Share")(**given)
    with pytest.raises(AttributeError, match="costs"):
        mirror("linear/matvec.cu", "Share").blank().costs = 1
    with pytest.raises(TypeError, match=r"Share\.costs"):
        mirror("linear/matvec.cu", "Share").blank(costs=1)
