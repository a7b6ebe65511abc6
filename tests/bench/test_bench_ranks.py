"""`python -m bench.ranks`: which step each figure comes from, and what several GPUs would reach."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the decode kernels need Triton")

from bench import ranks
from dsv4.config import preset
from dsv4.errors import ConfigError
from dsv4.lab.bench.decode import Timing, Wanted
from dsv4.lab.bench.subject import Subject, synthetic, synthetic_bytes
from dsv4.ops.exchange.decode import Peers

TINY = preset("tiny")


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_timed(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A rank's step with its all-reduces, then the same bundle without; one rank has none to leave out."""
    seen: list[tuple[Any, bool]] = []

    class Timed:
        def __init__(self, bundle: Any, wanted: Wanted, device: torch.device, peers: Peers | None) -> None:
            seen.append((bundle, peers is not None or size == 1))

        def time(self) -> Timing:
            return Timing(milliseconds=(3.0 if seen[-1][1] else 2.5,), distinct=(), position=0, kernels=7)

    monkeypatch.setattr(ranks, "Session", Timed)
    monkeypatch.setattr(
        Subject, "bundle", lambda self, device, mesh: SimpleNamespace(config=self.config, mesh=mesh)
    )
    line = ranks.measure(
        synthetic("flash", None, None, "nvfp4", ranks=size), Wanted(600, 1, 8), torch.device("cpu")
    )
    assert [sums for _, sums in seen] == [True, False][:size] and len({id(of) for of, _ in seen}) == 1
    without = 3.0 if size == 1 else 2.5
    assert (line["ms_per_token"], line["ms_without_all_reduces"]) == (3.0, without)
    added = line["ms_added"]
    assert line["predicted_tokens_per_second"] == pytest.approx(1e3 / (3.0 + added), abs=0.1)
    assert line["predicted_counted_once"] == pytest.approx(1e3 / (without + added), abs=0.1)


def test_predicted_of_ranks() -> None:
    """One step of 4 ms: with two all-reduces a layer, the embedding's and the logits', of 5 us each."""
    wanted = Wanted(600, 2)
    alone, one = synthetic("tiny", None, None, "nvfp4"), synthetic("tiny", None, None, "nvfp4", ranks=2)
    assert ranks.predicted(alone, wanted, 4.0, 5.0) == 500
    assert ranks.predicted(one, wanted, 4.0, 5.0) == 2e3 / (4 + 0.005 * (2 * TINY.num_layers + 2))
    assert one.weight_bytes == synthetic_bytes(TINY, "nvfp4", ranks=2) < alone.weight_bytes


def test_what_is_in_a_prediction_is_said() -> None:
    """The step as measured and every all-reduce in full; the text has the same figures as the JSON line."""
    wanted, ms, ms_without = Wanted(600, 1, 8), 3.0, 2.8
    line = ranks.predictions(synthetic("flash", None, None, "nvfp4", ranks=2), wanted, ms, ms_without)
    assert line["all_reduces"] == 2 * preset("flash").num_layers + 2 == 88
    for rate, step, each, added in (
        ("predicted_tokens_per_second", ms, "all_reduce_us", "ms_added"),
        ("predicted_counted_once", ms_without, "all_reduce_us", "ms_added"),
        ("predicted_at_published", ms, "published_all_reduce_us", "ms_added_at_published"),
    ):
        assert line[added] == pytest.approx(88 * line[each] / 1e3, abs=1e-3)
        assert line[rate] == pytest.approx(1e3 / (step + line[added]), abs=0.1)
    assert "pushes" in line["predicted_is"] and "counted twice" in line["predicted_is"]
    assert "without" in line["predicted_counted_once_is"] and "once" in line["predicted_counted_once_is"]
    assert line["ms_without_all_reduces"] == ms_without
    (assumed, once, published, note) = ranks.predicted_rows({**line, "ranks": 2})
    assert assumed == (
        "predicted",
        "290.7 tokens/s",
        "2 GPUs: the step + 0.440 ms for 88 all-reduces of 5.0 us, assumed",
    )
    assert once[1:] == (
        "308.6 tokens/s",
        "2 GPUs: the step without them, 2.800 ms, + 0.440 ms for 88 all-reduces of 5.0 us, assumed",
    )
    assert "of 4.2 us, published" in published[2] and "counted twice" in note[2]
    alone = ranks.predictions(synthetic("flash", None, None, "nvfp4"), wanted, ms, ms)
    assert alone["all_reduces"] == alone["ms_added"] == 0 and alone["predicted_tokens_per_second"] == 333.3
    assert alone["predicted_counted_once"] == 333.3


@pytest.mark.parametrize(("what", "why"), [("flash:3", "3 ranks cannot share"), ("tiny:8", "use 1 or 2")])
def test_ranks_that_cannot_share_a_model_are_refused(
    what: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ranks", what])
    with pytest.raises(ConfigError, match=why):
        ranks.main()
