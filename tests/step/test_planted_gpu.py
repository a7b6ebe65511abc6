"""The same faults on a GPU: `dsv4 doctor --step` names the launch, at V4-Flash's sizes."""

import json
from pathlib import Path

import pytest

from tests.step.planted import FAULTS, Fault, copy_of_sources, plant, said_by

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.what) for fault in FAULTS])
def test_the_launch_is_named(fault: Fault, tmp_path: Path) -> None:
    tree = copy_of_sources(tmp_path)
    plant(fault, tree)
    options = ("--rows", fault.rows, "--context", 5120, "--activations", fault.activations, "--json")
    said = json.loads(said_by(tree, "-m", "dsv4", "doctor", "--step", *options))
    assert not said["pass"], f"{fault.what}: nothing differs"
    finding, *_ = said["findings"]  # the step's, then its drafts'
    assert f"'{fault.launch}'" in finding["text"].partition(":")[0], f"{fault.what}: {finding['text']}"


def test_without_a_fault(tmp_path: Path) -> None:
    tree = copy_of_sources(tmp_path)
    for activations in ("a16", "a8", "a4"):
        options = ("--rows", "1,2,4,8,16,32", "--context", "100,5000,140000", "--activations", activations)
        said = json.loads(said_by(tree, "-m", "dsv4", "doctor", "--step", *options, "--json"))
        assert said["pass"], [finding["text"] for finding in said["findings"]]
