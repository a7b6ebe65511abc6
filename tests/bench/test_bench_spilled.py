"""`python -m bench.spilled`: how it explains the time of experts in host memory."""

import pytest
import torch

pytest.importorskip("triton", reason="the decode kernels need Triton")

from bench.spilled import all_resident, explain_prompt, explain_step
from dsv4.lab.bench.decode import Timing
from dsv4.lab.bench.subject import Reads, synthetic


def test_every_expert_borrows_a_resident_place() -> None:
    subject = synthetic("tiny", None, None, "official", "zipf:1")
    split = subject.split("auto", 10, subject.weight_bytes * 3 // 4)
    assert split is not None
    placement = subject.load(torch.device("cpu"), split=split).placement
    assert placement is not None
    before = [list(layer) for layer in placement.slot_of]
    assert not all(placement.slots.is_resident(slot) for layer in before for slot in layer)
    with all_resident(placement) as is_so:
        assert is_so and all(
            placement.slots.is_resident(slot) for layer in placement.slot_of for slot in layer
        )
    assert placement.slot_of == before


def test_a_step_that_reads_host_memory_is_explained() -> None:
    reads = Reads(always=10**9, per_expert=(10**7, 10**7))
    counts = {"distinct": (6.0, 6.0), "spilled": (1.0, 3.0), "beside": (5.0, 1.0)}
    timing = Timing(milliseconds=(7.0, 7.0, 7.0), position=100, kernels=30, **counts)
    found = explain_step(timing, 6.2, reads, gpu_bytes=1.12e9, rates=(4e12, 5e10))
    assert found["explained_ms"] == round(7.0 - 0.01 - 0.015, 4) and found["pcie_gb_per_second"] == 50.0
    assert found["explained_share"] == round(found["explained_ms"] / 7.0, 4)


def test_a_prompt_that_copies_experts_is_explained() -> None:
    found = explain_prompt(10**9, seconds=0.1, resident=0.08)
    assert found["explained_ms"] == 80.0 and found["share_of_all_resident"] == 0.8
    assert explain_prompt(4 * 10**9, seconds=0.1, resident=0.02)["explained_ms"] == round(4 / 55 * 1e3, 2)
