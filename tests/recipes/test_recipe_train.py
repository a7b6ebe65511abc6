"""The training loop on a CPU: its phases follow the clock, its state is small and is gone on from."""

import json
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.tiny import state, train
from recipes.tiny.train import Phase, initialise
from recipes.tiny.twin import Twin, large_names
from tests.recipes.test_recipe_twin import config


class Rows:
    """Random rows instead of the data processes."""

    waiting = 0

    def __init__(self) -> None:
        self.probe: queue.Queue[dict[str, Any]] = queue.Queue()
        ids = np.random.default_rng(0).integers(0, 96, (8, 48))
        answers = np.zeros_like(ids, dtype=bool)
        answers[:, 10:14] = answers[:, 30:36] = True
        self.probe.put({"sum": (ids, answers)})

    def batches(self, phase: Phase, device: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            ids = torch.randint(0, 96, (phase.rows, phase.length))
            yield ids, ids < 60, torch.zeros_like(ids)


def make() -> Twin:
    twin = Twin.make(replace(config(), num_experts=4, experts_per_token=2))
    initialise(twin, 0)
    return twin


def test_a_run_leaves_a_state_to_go_on_from(tmp_path: Path) -> None:
    twin = make()
    phases = [Phase("main", 0.5, 1, 48, False, False), Phase("final", 0.5, 1, 96, True, True)]
    train.train(twin, Rows(), phases, tmp_path, "cpu", 1.0)  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] >= 2 and 0 <= rows[-1]["sum"] <= 1 and rows[-1]["saved"]
    again = make()
    state.load_state(again, tmp_path)
    large = large_names(twin)
    for name, p in twin.tensors.items():
        got, blocks = again.tensors[name], p.detach().float().reshape(-1)
        if not p.is_floating_point() or p.dim() == 1:
            assert torch.equal(got, p), name
            continue
        if name in large:
            most = blocks.reshape(-1, state.BLOCK).abs().amax(1, keepdim=True) / 127
            most = most.expand(-1, state.BLOCK).reshape(p.shape) * 0.51
        else:
            most = p.detach().abs() / 256
        assert ((got - p).abs() <= most + 1e-7).all(), name


def test_state_comes_in_files_of_a_limited_size(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(state, "FILE_BYTES", 20_000)
    sizes = state.save_state(make(), tmp_path)
    assert len(sizes) > 2 and len(sizes) == len(list(tmp_path.glob("state-*.pt")))
    state.load_state(make(), tmp_path)
