"""Ranks that meet: patient until all are ready, strict from then on."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dsv4.parallel.comm import Group, PeerError

LATE, SECONDS = 1.5, 0.5


def test_patient_until_all_are_ready(tmp_path: Path) -> None:
    def rank(number: int) -> list[float]:
        group = Group(str(tmp_path / "store"), number, ["cpu", "cpu"], SECONDS)
        if number:
            time.sleep(LATE)
        group.begin()
        found = group.gather_columns(torch.tensor([[float(number)]]))[0].tolist()
        if number:
            time.sleep(2 * LATE)
        else:
            began = time.monotonic()
            with pytest.raises(PeerError):
                group.gather_columns(torch.zeros(1, 1))
            assert SECONDS / 2 < time.monotonic() - began < 2 * LATE
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [[0.0, 1.0]] * 2
