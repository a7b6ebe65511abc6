"""Faults that are planted in a copy of the sources, and the launch that each must be found in."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` at its only place in the sources of a room; white space does not matter."""

    what: str
    room: str
    old: str
    new: str
    launch: str
    rows: int = 2
    activations: str = "a16"
    on_cpu: bool = True  # whether the emulated step of a test runs this code; a GPU's does in any case


FAULTS = (
    Fault("another token", "mhc", "(id < 0 ? 0 : id)", "(id < 0 ? 0 : id ^ 1)", "mhc open"),
    Fault(
        "comb turned round",
        "mhc",
        "comb[j][n] * as_float(old[j])",
        "comb[n][j] * as_float(old[j])",
        "mhc open",
    ),
    Fault("a wrong scale", "mhc", "gate[n] * out + mixed", "1.02f * gate[n] * out + mixed", "mhc open"),
    Fault(
        what="base subtracted",
        room="mhc",
        old="const float share = sigmoid(total * inv * its_scale + its_base)",
        new="const float share = sigmoid(total * inv * its_scale - its_base)",
        launch="mhc close",
    ),
    Fault("gate not doubled", "mhc", "= 2.f * sigmoid(logit)", "= 1.9f * sigmoid(logit)", "mhc close"),
    Fault(
        what="a column left out of Sinkhorn's rounds",
        room="mhc",
        old="even(m[0].w, m[1].w, m[2].w, m[3].w, p.eps);",
        new="",
        launch="queries up",
    ),
    Fault(
        what="off by one in the ring",
        room="attention",
        old="slot * RING + pos % RING, cos, sin",
        new="slot * RING + (pos + 1) % RING, cos, sin",
        launch="prepare",
    ),
    Fault(
        what="position bias of the next token",
        room="attention",
        old="bias = ape_ptr + (pos % RATIO) * width",
        new="bias = ape_ptr + ((pos + 1) % RATIO) * width",
        launch="prepare",
    ),
    Fault(
        what="an entry at the wrong position",
        room="attention",
        old="# An entry has the position of its block's first row.\nstart = tl.maximum(pos + 1 - RATIO, 0)",
        new="start = tl.maximum(pos - RATIO, 0)",
        launch="prepare",
    ),
    Fault(
        what="an index query at the next position",
        room="index",
        old="max((int)__ldcg(p.positions + head / HEADS), 0)",
        new="max((int)__ldcg(p.positions + head / HEADS) + 1, 0)",
        launch="queries",
    ),
    Fault(
        what="a wrong factor of the index, one row",
        room="index",
        old="__uint_as_float((uint32_t)bits << 16), p.factor)",
        new="__uint_as_float((uint32_t)bits << 16), 1.01f * p.factor)",
        launch="index scores",
        rows=1,
    ),
    Fault(
        what="scores of a batch without relu",
        room="index",
        old="dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        new="dots = tl.maximum(dots, -1.0, propagate_nan=tl.PropagateNan.ALL)",
        launch="index scores",
    ),
    Fault(
        what="the next entry",
        room="index",
        old="(__ldcg(table + page) - (int)page) * page_entries + entry;",
        new="(__ldcg(table + page) - (int)page) * page_entries + (entry ^ 1);",
        launch="index select",
    ),
    Fault("no sink", "attention", "whole += power_of_two(sink[h] - top);", "", "attend sliding"),
    Fault(
        what="a swapped head",
        room="attention",
        old="__ldg(p.sinks + first_head + h * HEADS + block)",
        new="__ldg(p.sinks + first_head + h * HEADS + (block ^ 1))",
        launch="attend sliding",
    ),
    Fault(
        what="a window that begins one too late",
        room="attention",
        old="oldest = (position + 1 - raw) % p.ring_rows;",
        new="oldest = (position + 2 - raw) % p.ring_rows;",
        launch="attend sliding",
    ),
    Fault(
        what="no factor",
        room="linear",
        old="* (F <= MXFP4 ? E2M1_UNIT : 1.f);",
        new="* (F <= MXFP4 ? 1.01f * E2M1_UNIT : 1.01f);",
        launch="projections",
    ),
    Fault(
        what="one wrong expert",
        room="linear",
        old="if (lane < COLUMNS) place = __ldcg(p.task_pairs + work.w * COLUMNS + lane);",
        new="if (expert) --expert; if (lane < 8) place = __ldcg(p.task_pairs + work.w * COLUMNS + lane);",
        launch="experts up",
    ),
    Fault("unweighted experts", "linear", "if (s.routed) hidden *= weight;", "", "experts up"),
    Fault(
        what="a place that is another choice's",
        room="linear",
        old="(p.choices + 1) + at % p.choices",
        new="(p.choices + 1) + (at + 1) % p.choices",
        launch="experts down",
    ),
    Fault("no route scale", "route", "mine_score / total * p.route_scale", "mine_score / total", "route"),
    Fault(
        what="bias left out of the choice",
        room="route",
        old="order(scores[lane + 32 * i] + with[i])",
        new="order(scores[lane + 32 * i])",
        launch="route",
    ),
    Fault("two positions on", "sample", "= position + 1;", "= position + 2;", "sample"),
    Fault(
        what="a row that is not rounded",
        room="rows",
        old="if (p.how == A8) round_a8(x[i]);",
        new="if (p.how != A8) round_a8(x[i]);",
        launch="round",
        activations="a8",
    ),
)


def tokens(text: str) -> str:
    """A pattern that white space does not matter to."""
    parts = re.findall(r"\w+|[^\w\s]", text)
    return r"\s*".join(re.escape(part) for part in parts)


def plant(fault: Fault, tree: Path) -> Path:
    """Change the copy of the sources at `tree`; the file that was changed."""
    found = [
        path
        for path in sorted((tree / "dsv4" / "ops" / fault.room).glob("*.*"))
        if path.suffix in (".cu", ".cuh", ".py") and re.search(tokens(fault.old), path.read_text())
    ]
    assert len(found) == 1, f"{fault.what}: its place is in {[path.name for path in found]}"
    text, count = re.subn(tokens(fault.old), lambda _: fault.new, found[0].read_text())
    assert count == 1, f"{fault.what}: {count} places"
    found[0].write_text(text)
    return found[0]


def copy_of_sources(to: Path) -> Path:
    for part in ("dsv4", "tests", "bench"):
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png")
        shutil.copytree(ROOT / part, to / part, ignore=ignored, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


def said_by(tree: Path, *command: object, **environment: str) -> str:
    """Run Python in the copy."""
    import os

    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    return done.stdout
