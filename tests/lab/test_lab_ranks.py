"""`dsv4 bench ranks`: which step each figure comes from."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the decode kernels need Triton")

from dsv4.lab.bench import ranks
from dsv4.lab.bench.decode import Timing, Wanted
from dsv4.lab.bench.subject import Subject, synthetic


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_timed(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A rank's step with its all-reduces, then the same bundle without; one rank has none to leave out."""
    seen: list[tuple[Any, bool]] = []

    class Timed:
        def __init__(self, bundle: Any, wanted: Wanted, device: torch.device, sums: bool = True) -> None:
            seen.append((bundle, sums))

        def time(self) -> Timing:
            return Timing(milliseconds=(3.0 if seen[-1][1] else 2.5,), distinct=(), position=0, kernels=7)

    monkeypatch.setattr(ranks, "Session", Timed)
    monkeypatch.setattr(Subject, "bundle", lambda self, device: object())
    line = ranks.measure(
        synthetic("flash", None, None, "nvfp4", ranks=size), Wanted(600, 1, 8), torch.device("cpu")
    )
    assert [sums for _, sums in seen] == [True, False][:size] and len({id(of) for of, _ in seen}) == 1
    without = 3.0 if size == 1 else 2.5
    assert (line["ms_per_token"], line["ms_without_all_reduces"]) == (3.0, without)
    added = line["ms_added"]
    assert line["predicted_tokens_per_second"] == pytest.approx(1e3 / (3.0 + added), abs=0.1)
    assert line["predicted_counted_once"] == pytest.approx(1e3 / (without + added), abs=0.1)
