"""Digests of the CPU's logits of the golden models: `python -m tests.golden.bits OUT.json`, before and after.

They differ between machines; on one machine, a change that moves or shares code must not change them.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import Engine
from dsv4.lab.score import score_ids
from tests.golden.test_golden import CASES, config_of, folder

# How the ids are cut: the prompt's length and chunk, and the number of ranks.
CUTS = {
    "whole": (300, 300, 1),
    "chunks of 1": (300, 1, 1),
    "chunks of 7": (300, 7, 1),
    "chunks of 64": (300, 64, 1),
    "token by token": (1, 300, 1),
    "two ranks": (300, 300, 2),
}
MODES = [*CASES, ("official", "a4")]
# FP8 shares a scale among 128 rows of a weight, or 128 values of an input, which two ranks would split.
SPLITS = [(format, mode) for format, mode in CASES if format in ("bf16", "hfnvfp4") and mode != "a8"]


def cuts(format: str, mode: str) -> list[str]:
    return [cut for cut, (_, _, ranks) in CUTS.items() if ranks == 1 or (format, mode) in SPLITS]


def logits(format: str, mode: str, cut: str) -> dict[str, Tensor]:
    """All rows [T, V], and those of the draft block, which follow a prompt."""
    prompt, chunk, ranks = CUTS[cut]
    ids = load_file(folder(format) / "expected_noqat.safetensors")["ids"].tolist()
    engine = Engine.load(folder(format), config_of(mode, chunk, ranks))
    try:
        got = score_ids(engine, ids, prompt, mtp=bool(engine.model.mtp))
    finally:
        engine.close()
    rows = {"logits": torch.cat((got["prefill_logits"], got["decode_logits"]))}
    return rows | ({"drafts": got["mtp_logits"]} if "mtp_logits" in got and prompt == 300 else {})


def digest(rows: Tensor) -> str:
    return sha256(rows.contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for format, mode in MODES:
        for cut in cuts(format, mode):
            for name, rows in logits(format, mode, cut).items():
                found[f"{format} {mode} {name}, {cut}"] = digest(rows)
        print(format, mode, flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
