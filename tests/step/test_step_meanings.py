"""Every launch of a decode step computes what it means: by emulated kernels, on a CPU."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.gpu.meaning import Claim, difference
from dsv4.lab.init import make
from tests.step.checked_step import CONTEXT, HEADS, SMALL, check
from tests.step.planted import FAULTS, Fault, copy_of_sources, plant, said_by
from tests.support.emulated import Decoders, Launches
from tests.support.twin import LEVELS, TWINS, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="run by kernels/test_step_interpreted.py"
    ),
]
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("DSV4_TWINS") or tmp_path_factory.mktemp("twins"))


FEW = [(SMALL, "official", "a8", 2, F32), (HEADS, "modelopt", "a4", 1, BF16)]
MORE = [
    (SMALL, "ct", "a4", 1, F32),
    (SMALL, "hfnvfp4", "a16", 3, F32),
    (HEADS, "modelopt", "a16", 2, BF16),
    (HEADS, "hfnvfp4", "a4", 4, BF16),
    (HEADS, "official", "a8", 1, BF16),
]


@pytest.mark.parametrize(
    ("config", "format", "activations", "rows", "dtype"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_every_launch(
    config: Any, format: str, activations: str, rows: int, dtype: torch.dtype, twins: Path
) -> None:
    assert check(config, format, activations, rows, dtype, twins) == []


@pytest.mark.parametrize(("activations", "rows"), [("a16", 3), ("a4", 1)])
def test_a_step_in_torch(activations: Any, rows: int, tmp_path: Path) -> None:
    """No kernel runs: the launches' meanings alone give the reference's logits."""
    for _ in make(tmp_path / "model", SMALL, "modelopt", seed=3):
        pass
    decoders = Decoders(tmp_path / "model", Launches(tmp_path), rows, CONTEXT, F32, activations)
    decoders.load([(rows - 1 - row, CONTEXT - 1 - row, 7 + row) for row in range(rows)])
    want, (decoder,) = decoders.reference(), decoders.ranks
    decoder.run_reference()
    got = decoder.buffers.logits
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
    assert decoder.buffers.positions.tolist() == [CONTEXT - row for row in range(rows)]


def claim(got: Tensor, want: Tensor, **how: Any) -> str:
    return str(difference(Claim("x", got, lambda: (want, 0.0), **how), (want, 0.0)))


def test_what_differs() -> None:
    """The worst element, its bound, and numbers that are none."""
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert claim(want.clone(), want, ulps=0) == "None"
    got = want.clone()
    got[1, 0] += 0.5
    got[0, 1] += 1e-3
    text = claim(got, want)
    assert text == "x[1, 0] is 3.5, expected 3 ± 3.6e-07; 2 of 4 values are beyond their bound"
    assert claim(want + torch.tensor([[2.0**-23, 0.0], [0.0, 2.0**-22]]), want) == "None"
    bad = want.clone()
    bad[0, 0] = float("nan")
    assert claim(bad, want).startswith("x[0, 0] is nan") and claim(want, bad).startswith("x[0, 0] is 1")
    assert claim(bad, bad.clone(), ulps=0) == "None"
    codes = torch.tensor([6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0])
    one_further = codes.clone()
    one_further[1] = 3.0
    assert claim(one_further, codes, coded="fp4") == "None" != claim(one_further, codes)
    assert claim(codes.flip(0).clone(), codes, coded="fp4") != "None", "too many"
    heads = torch.stack([codes] * 16)
    scaled = heads.clone()
    scaled[3] *= 1.5
    assert claim(scaled, heads, coded="fp4") != "None", "a whole row, though few values of all"


def found_by(fault: Fault, twins: Path, folder: Path) -> list[str]:
    """What is said of a step with this fault; twins of other sources are those that are there."""
    tree = copy_of_sources(folder / "tree")
    changed = plant(fault, tree)
    its_twins = folder / "twins"
    its_twins.mkdir()
    of_room = {TWINS[name] for name in TWINS if name.startswith(fault.room)}
    for name in set(TWINS.values()) - (of_room if changed.suffix != ".py" else set()):
        for made in twins.glob(f"{name}{LEVELS.get(name, '-O2')}.so"):
            shutil.copy(made, its_twins)
    command = ("-m", "tests.step.checked_step", its_twins, fault.rows, fault.activations)
    return json.loads(said_by(tree, *command).splitlines()[-1])


def names(fault: Fault, said: list[str]) -> None:
    assert said, f"{fault.what}: nothing differs"
    name = said[0].partition(":")[0]
    assert name == fault.launch, f"{fault.what}: expected {fault.launch}, first is {said[0]}"


FIRST = next(fault for fault in FAULTS if fault.launch == "route")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.what, marks=() if fault is FIRST else pytest.mark.slow)
        for fault in FAULTS
        if fault.on_cpu
    ],
)
def test_a_planted_fault(fault: Fault, twins: Path, tmp_path: Path) -> None:
    names(fault, found_by(fault, twins, tmp_path))


def test_faults_in_every_kind_of_launch() -> None:
    kinds = {"mhc open", "mhc close", "projections", "prepare", "queries up", "queries", "index scores"}
    kinds |= {"index select", "attend sliding", "experts up", "experts down", "route", "sample", "round"}
    assert {fault.launch for fault in FAULTS} == kinds and len(FAULTS) >= 20
