"""A GPU timed as one rank of several, its own memory in its peers' place; and what several would reach."""

from typing import Any

import torch

from dsv4.lab.bench.decode import Session, Timing, Wanted, release
from dsv4.lab.bench.subject import Subject
from dsv4.lab.links import LINKS, num_all_reduces
from dsv4.model.bundle import Bundle

EACH_US = 5.0  # of an all-reduce, where nothing is published for the number of GPUs and bytes at hand
# Every all-reduce is added whole: to the step with this rank's part in them, and to the step without.
ADDED = (
    "the measured step, which has this rank's pushes and its waits answered by its own memory, and beside it "
    "the whole latency of every all-reduce: what both have is counted twice; ranks that come late are not "
    "counted"
)
ADDED_ONCE = (
    "the step measured without this rank's all-reduces, its share in each sum's place and no gather of the "
    "logits, and beside it the whole latency of every all-reduce: each is counted once; ranks that come late "
    "are not counted"
)


def predicted(subject: Subject, wanted: Wanted, ms: float, each_us: float) -> float:
    """Tokens/s of all GPUs together, if each all-reduce takes so long beside a step of `ms`."""
    return 1e3 * wanted.batch / (ms + num_all_reduces(subject.config, subject.ranks) * each_us / 1e3)


def measure(subject: Subject, wanted: Wanted, device: torch.device) -> dict[str, Any]:
    with torch.inference_mode():
        bundle = subject.bundle(device)
        timing = _time(bundle, wanted, device)
        rest = _time(bundle, wanted, device, sums=False) if subject.ranks > 1 else timing
    return {
        **{"bench": "ranks", **subject.facts(), "ranks": subject.ranks, "weight_bytes": subject.weight_bytes},
        "whole_experts": subject.whole_experts,
        **{"context": wanted.context, "batch": wanted.batch, "steps": wanted.steps},
        **{"ms_per_token": round(timing.median, 4), "ms_per_token_p99": round(timing.p99, 4)},
        "kernels_per_step": timing.kernels,
        **predictions(subject, wanted, timing.median, rest.median),
    }


def _time(bundle: Bundle, wanted: Wanted, device: torch.device, sums: bool = True) -> Timing:
    timing = Session(bundle, wanted, device, sums).time()
    release()
    return timing


def predictions(subject: Subject, wanted: Wanted, ms: float, ms_without: float) -> dict[str, Any]:
    """What several GPUs would reach, by an all-reduce as assumed and as published; and what is in it.
    `ms_without`: of the step without its all-reduces."""
    vector = 4 * subject.config.hidden_size * wanted.batch
    published = LINKS["H200"].all_reduce_us(subject.ranks, vector)
    count = num_all_reduces(subject.config, subject.ranks)
    return {
        **{"all_reduces": count, "all_reduce_us": EACH_US, "ms_added": round(count * EACH_US / 1e3, 4)},
        "predicted_tokens_per_second": round(predicted(subject, wanted, ms, EACH_US), 1),
        "ms_without_all_reduces": round(ms_without, 4),
        "predicted_counted_once": round(predicted(subject, wanted, ms_without, EACH_US), 1),
        **{"published_all_reduce_us": round(published, 2), "published_source": LINKS["H200"].source},
        "ms_added_at_published": round(count * published / 1e3, 4),
        "predicted_at_published": round(predicted(subject, wanted, ms, published), 1),
        **{"predicted_is": ADDED, "predicted_counted_once_is": ADDED_ONCE},
    }
