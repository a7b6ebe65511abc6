"""One machine behaves like others: variables take instruction sets from torch, MKL and oneDNN.

Each run is a process of its own, with a small selection of the tests that a machine can make fail.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLD = ("ATEN_CPU_CAPABILITY=default", "MKL_ENABLE_INSTRUCTIONS=SSE4_2", "ONEDNN_MAX_CPU_ISA=SSE41")
AVX2 = ("ATEN_CPU_CAPABILITY=avx2", "MKL_ENABLE_INSTRUCTIONS=AVX2", "ONEDNN_MAX_CPU_ISA=AVX2")
# All three as such a machine has them; each alone, among the others' best: -m slow.
MACHINES = (" ".join(OLD), " ".join(AVX2))
ALONE = [pytest.param(setting, marks=pytest.mark.slow) for setting in OLD + AVX2]
# What a thread more can change: products and functions. Engines take one unless the model is large.
OPS = (
    "tests/ops/test_op_exact.py::test_row_counts_change_no_bit",
    "tests/ops/test_op_exact.py::test_hundreds_of_rows_change_no_bit",
    "tests/ops/test_op_exact.py::test_whatever_lies_beside_a_row_changes_no_bit",
    "tests/ops/test_op_exact.py::test_a_batch_has_the_bits_of_its_products",
    "tests/ops/test_op_exact.py::test_a_value_gives_the_same_bits_wherever_it_lies",
    "tests/ops/test_op_experts.py::test_routed_sums_the_chosen",
    "tests/ops/test_op_linear.py::test_rows_and_views",
)
ENGINE = (
    "tests/engine/test_invariance.py::test_any_chunking[(10, 17, 5, 30, 7)]",
    "tests/engine/test_state.py::test_snapshot_restores_exactly[130]",
    "tests/engine/test_state.py::test_rollback_of_drafts[127]",
    "tests/engine/test_prefix.py::test_generated_pages_are_found_by_the_next_turn",
)
# One mode for each machine here; all formats and modes under all settings: test_all_golden_marks.
GOLDEN = tuple(f"tests/golden/test_golden.py::test_marks[official-{mode}]" for mode in ("noqat", "a16", "a8"))


def run(tmp_path: Path, settings: str, threads: int, tests: tuple[str, ...]) -> None:
    # A cache folder of its own: everything is measured. A thread that waits must not hold a core.
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_WAIT_POLICY": "passive"}
    env |= dict(setting.split("=") for setting in settings.split())
    env |= {"DSV4_TEST_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{settings}, {threads} threads:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"


@pytest.mark.parametrize(
    ("settings", "golden"), [(MACHINES[0], GOLDEN[:1]), (MACHINES[1], GOLDEN[1:])], ids=["old", "avx2"]
)
def test_one_thread(tmp_path: Path, settings: str, golden: tuple[str, ...]) -> None:
    run(tmp_path, settings, 1, (*OPS, *ENGINE, *golden))


@pytest.mark.slow
@pytest.mark.parametrize("setting", OLD + AVX2)
def test_one_thread_with_one_setting(tmp_path: Path, setting: str) -> None:
    run(tmp_path, setting, 1, (*OPS, *ENGINE, *GOLDEN))


@pytest.mark.parametrize("settings", [pytest.param(MACHINES[0], marks=pytest.mark.slow), MACHINES[1], *ALONE])
def test_two_threads(tmp_path: Path, settings: str) -> None:
    run(tmp_path, settings, 2, OPS)


@pytest.mark.slow  # python -m pytest -m slow tests/test_machines.py
@pytest.mark.parametrize("setting", OLD + AVX2)
def test_all_golden_marks(tmp_path: Path, setting: str) -> None:
    run(tmp_path, setting, 1, ("tests/golden/test_golden.py",))
