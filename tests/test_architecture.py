"""The rules of docs/architecture.md, checked on the syntax trees: imports go down only, files stay small."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from dsv4.ops import FILE_OF, IMPLEMENTATIONS, PREFERENCE, Ops, backend_module

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsv4"
CPP = {".cu", ".cuh", ".h", ".cpp"}
FILES = sorted(PACKAGE.rglob("*.py"))
CUDA = sorted(p for folder in (PACKAGE, ROOT / "tests") for p in folder.rglob("*.*") if p.suffix in CPP)

# Lower layers first; a package may import packages of lower layers, and itself, nothing else.
LAYERS: list[set[str]] = [
    {"errors", "env", "child"},
    {"config", "config_json", "device", "disk", "models"},
    {"identity"},
    {"quant", "text"},
    {"gpu", "spec"},
    {"ops", "cache", "parallel"},
    {"model"},
    {"step"},
    {"weights"},
    {"engine", "hub"},
    {"lab", "serve"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# One package of a layer may not import another of the same layer, except these two halves of one module.
SAME_LAYER = {("config", "config_json"), ("config_json", "config")}
# package (or file stem) -> third-party and standard modules it may not import
FORBIDDEN = {
    **{"text": {"torch", "numpy"}, "serve": {"torch", "numpy", "pickle"}},
    **{"config": {"torch"}, "hub": {"torch", "numpy"}, "errors": {"torch"}, "env": {"torch"}},
}


def unit(path: Path) -> str:
    """`dsv4/ops/rows/cpu.py` -> `ops`; `dsv4/config.py` -> `config`."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 and path.stem != "__main__" else path.stem


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"dsv4.{a.name}" for a in node.names if node.module == "dsv4" and a.name in LEVEL}
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file(path: Path) -> None:
    text = path.read_text()
    assert text.startswith('"""'), "the first line says what the file is for"
    assert len(text.splitlines()) <= 500, "split by responsibility"
    here = unit(path)
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in FORBIDDEN.get(here, set()), f"{here} may not import {top}"
        if top == "triton":
            is_kernel = here == "gpu" or (here == "ops" and path.name != "cpu.py")
            assert is_kernel, "triton lives in gpu and ops, never in a cpu.py"
        if name.startswith("torch.distributed"):
            assert here == "parallel", "only dsv4.parallel talks to other ranks"
        if top == "os" and here not in ("env", "device"):
            assert "environ" not in text and "getenv" not in text, "only env.py reads the environment"
        if top != "dsv4" or here in ("__init__", "__main__") or name == "dsv4":
            continue
        there = name.split(".")[1]
        lower = LEVEL[there] < LEVEL[here]
        assert there == here or lower or (here, there) in SAME_LAYER, (
            f"{here} imports {there}: imports go down only"
        )


def test_kernel_table_matches_the_disk() -> None:
    """A room with a contract is an op; one without has no field of Ops."""
    rooms = [path.parent for path in (PACKAGE / "ops").glob("*/__init__.py")]
    assert {room.name for room in rooms if (room / "cpu.py").is_file()} == set(IMPLEMENTATIONS)
    assert set(IMPLEMENTATIONS) == set(Ops.__dataclass_fields__)
    for op, backends in IMPLEMENTATIONS.items():
        room = PACKAGE / "ops" / op
        found = {backend for backend, file in FILE_OF.items() if (room / f"{file}.py").is_file()}
        assert found == set(backends), op
    assert all(set(order) <= set(FILE_OF) for order in PREFERENCE.values())


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_backends_have_the_signatures_of_the_reference(op: str) -> None:
    def functions(backend: str) -> dict[str, inspect.Signature]:
        module = backend_module(op, backend)
        return {
            name: inspect.signature(value)
            for name, value in vars(module).items()
            if inspect.isfunction(value) and not name.startswith("_")
        }

    reference = {n: s for n, s in functions("cpu").items()}
    for backend in IMPLEMENTATIONS[op]:
        for name, signature in functions(backend).items():
            if name in reference:
                assert signature == reference[name], f"{op}.{backend}.{name}"


def test_kernels_say_when_they_run() -> None:
    """A file is named for it, or says it; and it says it first."""
    phases = {"prefill": ("Prompts: ",), "decode": ("Decode step: ",)}
    any_phase = ("Decode step and prompts: ", "Decode step: ", "Prompts: ", "Start: ", "Bench: ")
    files = [path for folder in ("gpu", "ops/*") for path in PACKAGE.glob(f"{folder}/*.*")]
    kernels = [p for p in files if p.suffix in (".py", ".cu", ".cuh") and p.stem not in ("__init__", "cpu")]
    assert len(kernels) > 70
    for path in kernels:
        begins = phases.get(path.stem.split("_")[0], any_phase) if path.parent.name != "gpu" else any_phase
        first = path.read_text().splitlines()[0].removeprefix('"""').removeprefix("// ")
        assert first.startswith(begins), f"{path}: {first!r} does not begin with one of {begins}"


def blocks(text: str) -> list[tuple[str, int]]:
    """Blocks of C++ that are no structure or namespace: how each begins, and its lines, head included."""
    text = re.sub(
        r"(?m)^ *#.*|//[^\n]*|\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])'", lambda found: " " * len(found[0]), text
    )
    found, open_at, begin = [], [], 0
    for at in (match.start() for match in re.finditer(r"[;{}]", text)):
        if text[at] == "{":
            open_at.append(begin)
        elif text[at] == "}":
            whole = text[open_at.pop() : at + 1].strip()
            if not re.match(r"(template <[^{]*> )?(struct|union|namespace|enum)\b", whole):
                found.append((whole.split("\n")[0], whole.count("\n") + 1))
        begin = at + 1
    assert not open_at, "braces"
    return found


def test_blocks_of_a_source() -> None:
    text = """struct A {
    int f() { return '{'; }
};
// {
template <int N>
__global__ void g(const char* s = "{") {
    for (;;) {
        if (s) { f(); }
    }
}
"""
    assert [(head.split("(")[0], lines) for head, lines in blocks(text)] == [
        ("int f", 1),
        ("if ", 1),
        (") {", 3),
        ("template <int N>", 6),
    ]


@pytest.mark.parametrize("path", CUDA, ids=lambda p: str(p.relative_to(ROOT)))
def test_cuda_source(path: Path) -> None:
    """Lines of 110 columns, files of 500 lines, functions of 120."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 500, "split by responsibility"
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 110]
    assert not wide, f"lines of more than 110 columns: {wide}"
    if PACKAGE in path.parents:
        long = [f"{head} ({count} lines)" for head, count in blocks(path.read_text()) if count > 120]
        assert not long, f"name the stages of {long}"


@pytest.mark.parametrize("package", ["model", "engine"])
def test_types_on_the_spine_are_true(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert "Any" not in names, f"{path}: name the type"


def test_spine_stays_small() -> None:
    assert len((PACKAGE / "model" / "model.py").read_text().splitlines()) <= 200
    assert len((PACKAGE / "engine" / "engine.py").read_text().splitlines()) <= 300
