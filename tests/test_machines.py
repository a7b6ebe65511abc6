"""One machine behaves like others: variables take instruction sets from torch, MKL and oneDNN.

Each run is a process of its own, with a small selection of the tests that a machine can make fail.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2",
)
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
# One mode for each setting here; all formats and modes under all of them: test_all_golden_marks.
GOLDEN = tuple(f"tests/golden/test_golden.py::test_marks[official-{mode}]" for mode in ("noqat", "a16", "a8"))


def run(tmp_path: Path, setting: str, threads: int, tests: tuple[str, ...]) -> None:
    name, value = setting.split("=")
    # A cache folder of its own: everything is measured. A thread that waits must not hold a core.
    env = os.environ | {name: value, "XDG_CACHE_HOME": str(tmp_path), "OMP_WAIT_POLICY": "passive"}
    env |= {"DSV4_TEST_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{setting}, {threads} threads:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_thread(tmp_path: Path, setting: str) -> None:
    run(tmp_path, setting, 1, (*OPS, *ENGINE, GOLDEN[SETTINGS.index(setting) % len(GOLDEN)]))


@pytest.mark.parametrize(
    "setting",
    [
        setting if "AVX2" in setting.upper() else pytest.param(setting, marks=pytest.mark.slow)
        for setting in SETTINGS
    ],
)
def test_two_threads(tmp_path: Path, setting: str) -> None:
    run(tmp_path, setting, 2, OPS)


@pytest.mark.slow  # python -m pytest -m slow tests/test_machines.py
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_golden_marks(tmp_path: Path, setting: str) -> None:
    run(tmp_path, setting, 1, ("tests/golden/test_golden.py",))
