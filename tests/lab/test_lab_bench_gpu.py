"""`dsv4 bench` on a GPU: a run of each kind on the smallest model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import ok

from dsv4.lab.bench.engine import KINDS
from dsv4.lab.records import best

pytestmark = pytest.mark.gpu


def last(text: str) -> dict[str, Any]:
    return json.loads(text.strip().splitlines()[-1])


MACHINE = {
    "device_name",
    "gpu_memory_bytes",
    "torch",
    "triton",
    "cuda",
    "driver",
    "commit",
    "date",
    "command",
}


def test_the_read_kernel_adds_up_every_word() -> None:
    from dsv4.gpu import ceiling

    for count in (0, 4, 1028, 132 * 4 * 512 * 4 * 9 + 12):
        data = torch.randint(-(2**31), 2**31, (count,), device="cuda", dtype=torch.int64).int()
        for flight in ceiling.FLIGHTS:
            total = torch.zeros(1, dtype=torch.int32, device="cuda")
            ceiling.read(data, total, flight)
            assert int(total) % 2**32 == int(data.long().sum()) % 2**32, (count, flight)


@pytest.mark.parametrize("batch", [1, 3])
def test_decode_on_a_gpu(batch: int, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    given = ("--synthetic", "tiny", "--steps", 8, "--context", 600, "--batch", batch)
    text = ok("bench", "decode", *given, "--profile", "--save", target)
    found = last(text)
    assert found.keys() >= MACHINE | {"ms_per_token_p99", "tokens_per_second", "kernels_per_step", "profile"}
    assert 0 < found["share"] <= 1 and 2 <= found["distinct_experts"] <= min(8, 2 * batch)
    assert found["read_bytes"] < found["gpu_memory_bytes"]
    assert math.isclose(found["tokens_per_second"], batch * 1e3 / found["ms_per_token"], rel_tol=0.01)
    through = found["engine"]
    assert through["context"] == 600
    for kind in KINDS:
        assert through[kind] > 0 and through[f"{kind}_share"] < 1.05, through
        assert f"{through[kind]:,.1f} tokens/s" in text
    gpu = found["device_name"].removeprefix("NVIDIA ")
    record = best(tmp_path, gpu, "tiny", "modelopt")
    # One sequence is what a plan predicts.
    assert (record is not None and record.share == found["share"]) == (batch == 1)
    assert "--save" not in found["command"] and str(tmp_path) not in found["command"]


def test_prefill_on_a_gpu() -> None:
    given = ("--synthetic", "tiny", "--tokens", 700, "--chunk", 512, "--context", 300)
    assert last(ok("bench", "prefill", *given)).keys() >= MACHINE | {"tflops", "matmul_share"}
