"""How much the twin can do while it trains: held-out conversations, the share of answers wholly right."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from dsv4.text.tokenizer import Tokenizer
from recipes.tiny.kinds import make_record
from recipes.tiny.mix import KIND, build_world
from recipes.tiny.records import encode
from recipes.tiny.twin import Twin

# kind of record, rows, tokens of a row
PROBES = (
    ("sum", 32, 512),
    ("tool", 32, 1024),
    ("json", 32, 1024),
    ("unknown", 32, 512),
    ("recall", 16, 4096),
)
ROWS = 8  # at once


def probe_rows(corpus: Path, tokenizer: Tokenizer) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By kind ids and is_target [count, length]: one held-out conversation a row, padded with zeros."""
    world = build_world(corpus, tokenizer, "heldout")
    found = {}
    for kind, count, length in PROBES:
        rng = Random(f"dsv4 tiny probe {kind}")
        ids, mask = np.zeros((count, length), dtype=np.int64), np.zeros((count, length), dtype=bool)
        row = 0
        while row < count:
            record_ids, is_target = encode(make_record(KIND[kind], world, rng, length), tokenizer)
            if len(record_ids) <= length and (kind != "recall" or 2 * len(record_ids) >= length):
                ids[row, : len(record_ids)], mask[row, : len(record_ids)] = record_ids, is_target
                row += 1
        found[kind] = ids, mask
    return found


@torch.no_grad()
def share_right(twin: Twin, ids: Tensor, mask: Tensor) -> float:
    """Share of answers whose every token is the most likely one."""
    twin = replace(twin, documents=None, notes=None)
    right = total = 0
    for at in range(0, ids.shape[0], ROWS):
        some, wanted = ids[at : at + ROWS], mask[at : at + ROWS]
        best = twin.logits(some).argmax(-1)
        is_wrong = wanted[:, 1:] & (best[:, :-1] != some[:, 1:])
        starts = wanted[:, 1:] & ~wanted[:, :-1]
        answer = starts.int().cumsum(1) + torch.arange(some.shape[0], device=ids.device)[:, None] * 64
        failed = torch.unique(answer[is_wrong]).numel()
        total += int(starts.sum())
        right += int(starts.sum()) - failed
    return right / max(total, 1)
