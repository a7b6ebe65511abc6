"""Run by tests: an emulated decode step, each launch against its meaning; prints what differs as JSON."""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.config import ModelConfig, preset
from dsv4.lab.doctor.step import mismatches, place, raise_sinks
from dsv4.lab.init import make
from tests.support.emulated import Decoders, Launches, emulated

TINY = preset("tiny")
# Every kind of layer and routing; no two numbers alike that could be taken for each other.
SMALL = replace(TINY, layers=TINY.layers[:3], num_mtp_layers=0, hc_eps=1e-3, sinkhorn_iters=3)
# V4's sizes of heads and of the index, for which it has kernels of its own.
HEADS = replace(SMALL, num_heads=16, head_dim=512, index_heads=64, index_dim=128, q_rank=64)
CONTEXT = 384  # a block of 4 and one of 128 end with the last token of row 0


def check(
    config: ModelConfig, format: str, activations: str, rows: int, dtype: torch.dtype, twins: Path
) -> list[str]:
    """What differs, the first launch first."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in make(Path(folder) / "model", config, format, seed=3):
            pass
        launches = Launches(twins)
        decoders = Decoders(Path(folder) / "model", launches, rows, CONTEXT, dtype, activations)  # type: ignore[arg-type]
    (decoder,) = decoders.ranks
    raise_sinks(decoder.bundle)
    place(decoder, CONTEXT, config.vocab_size)
    with emulated(launches):
        return [f"{each.launch.name}: {each}" for each in mismatches(decoder)]


if __name__ == "__main__":
    twins, rows, activations = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    format = "official" if activations == "a8" else "modelopt"
    print(json.dumps(check(HEADS, format, activations, rows, torch.bfloat16, twins)))
