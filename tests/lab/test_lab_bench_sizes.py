"""`dsv4 bench` refuses what no kernel takes on the GPU at hand, before a weight is made."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cli_support import dsv4, refused

pytest.importorskip("triton", reason="the decode kernels need Triton")

from dsv4.errors import ConfigError
from dsv4.lab.bench import ceiling, subject
from dsv4.lab.bench.subject import synthetic

CPU = torch.device("cpu")
# A block of an sm_120 has 99 KiB of shared memory, of an sm_90 227: a row has at most as many entries as fit.
SAID = r"262144 compressed entries .*max_context 1048576.*, expected at most 191824 .max_context 767296"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sm_120, as far as it is asked for its sizes."""
    sizes = SimpleNamespace(multi_processor_count=188)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    monkeypatch.setattr(subject, "capability", lambda device: 120)
    monkeypatch.setattr(ceiling, "gpu", lambda: CPU)


def test_widths() -> None:
    tiny = synthetic("tiny", None, None, "modelopt")
    with pytest.raises(ConfigError, match="output rank 24, expected a multiple of 16"):
        replace(tiny, config=replace(tiny.config, o_rank=24)).bundle(CPU)


@pytest.mark.parametrize(
    "arguments",
    [
        "decode --synthetic flash --context 1048576",
        "decode --synthetic flash --max-context 1048576",
        "prefill --synthetic flash --tokens 8192 --context 1040384",
    ],
)
def test_a_context_beyond_the_selection(arguments: str) -> None:
    assert re.search(SAID, refused(dsv4("bench", *arguments.split())))
