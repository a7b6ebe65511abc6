"""kernels.md says which kernel runs when: its table is the list of a step's launches, its files are there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.config import LayerKind, preset
from tests.support.dry import planned

ROOT = Path(__file__).parents[2]
ONLY_CSA = " (CSA)"


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "kernels.md").read_text()
    table = text[text.index("| launch | source |") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def of_a_layer(kind: LayerKind) -> list[str]:
    names: list[str] = []
    for name, *_ in rows():
        if name == "mhc open, close":
            names += ["mhc open", "mhc close"]
        elif kind == "csa" or not name.endswith(ONLY_CSA):
            names.append(name.removesuffix(ONLY_CSA))
    after = next(i for i, name in enumerate(names) if name.startswith("*after all layers:*"))
    return names[:after]


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_the_table_is_what_a_step_launches(name: str) -> None:
    c = preset(name)
    c = replace(c, layers=c.layers[:4], num_experts=16, vocab_size=512)
    expected = [step for layer in c.layers for step in of_a_layer(layer.kind)]
    launched = [launch.name for launch in planned(c, 1, context=4096).launches]
    launched = [re.sub("^attend .*", "attend", step) for step in launched]
    assert launched == [*expected, "mhc open", "mhc close", "head", "sample"]


def test_its_sources_exist() -> None:
    found = {source for row in rows() for source in re.findall(r"`([a-z_/0-9]+\.(?:cu|py))`", row[1])}
    folder = ROOT / "dsv4" / "ops"
    assert {"linear/matvec.cu", "attention/decode.cu", "sample/decode.cu"} <= found
    assert not {source for source in found if not (folder / source).is_file()}
