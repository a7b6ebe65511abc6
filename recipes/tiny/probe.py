"""How well the twin recalls while it trains: held-out contexts, the share of answers right in every token."""

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


def recall_rows(corpus: Path, tokenizer: Tokenizer, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and is_target [count, length]: one held-out conversation a row, padded with zeros."""
    world = build_world(corpus, tokenizer, "heldout")
    rng = Random("dsv4 tiny probe")
    ids, mask = np.zeros((count, length), dtype=np.int64), np.zeros((count, length), dtype=bool)
    row = 0
    while row < count:
        record_ids, is_target = encode(make_record(KIND["recall"], world, rng, length), tokenizer)
        if length // 2 <= len(record_ids) <= length:
            ids[row, : len(record_ids)], mask[row, : len(record_ids)] = record_ids, is_target
            row += 1
    return ids, mask


@torch.no_grad()
def recall_rate(twin: Twin, ids: Tensor, mask: Tensor, rows: int = 8) -> float:
    """Share of answers whose every token is the most likely one."""
    twin = replace(twin, documents=None, notes=None)
    right = total = 0
    for at in range(0, ids.shape[0], rows):
        some, wanted = ids[at : at + rows], mask[at : at + rows]
        best = twin.logits(some).argmax(-1)
        is_wrong = wanted[:, 1:] & (best[:, :-1] != some[:, 1:])
        starts = wanted[:, 1:] & ~wanted[:, :-1]
        answer = starts.int().cumsum(1) + torch.arange(some.shape[0], device=ids.device)[:, None] * 64
        failed = torch.unique(answer[is_wrong]).numel()
        total += int(starts.sum())
        right += int(starts.sum()) - failed
    return right / max(total, 1)
