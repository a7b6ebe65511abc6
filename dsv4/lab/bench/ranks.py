"""A GPU timed as one rank of several, its own memory in its peers' place; and what several would reach."""

from typing import Any

import torch

from dsv4.lab.bench.decode import Session, Wanted
from dsv4.lab.bench.subject import Subject
from dsv4.lab.links import LINKS

EACH_US = 5.0  # of an all-reduce, where nothing is published for the number of GPUs and bytes at hand
PER_LAYER, PER_STEP = 2, 2  # all-reduces after attention and experts; the embedding and the logits
# The step was timed with every push and every wait, answered by the rank's own memory; a whole all-reduce is
# added to it for each. What a push and a wait cost on one GPU is counted twice; late ranks, never.
ADDED = (
    "the measured step, which has this rank's pushes and its waits answered by its own memory, and beside it "
    "the whole latency of every all-reduce: what both have is counted twice; ranks that come late are not "
    "counted"
)


def num_all_reduces(subject: Subject) -> int:
    """Of one step."""
    return PER_LAYER * subject.config.num_layers + PER_STEP if subject.ranks > 1 else 0


def predicted(subject: Subject, wanted: Wanted, ms: float, each_us: float) -> float:
    """Tokens/s of all GPUs together, if an all-reduce takes so long beside what a rank's step took alone."""
    return 1e3 * wanted.batch / (ms + num_all_reduces(subject) * each_us / 1e3)


def measure(subject: Subject, wanted: Wanted, device: torch.device) -> dict[str, Any]:
    with torch.inference_mode():
        timing = Session(subject.bundle(device), wanted, device).time()
    return {
        **{"bench": "ranks", **subject.facts(), "ranks": subject.ranks, "weight_bytes": subject.weight_bytes},
        "whole_experts": subject.whole_experts,
        **{"context": wanted.context, "batch": wanted.batch, "steps": wanted.steps},
        **{"ms_per_token": round(timing.median, 4), "ms_per_token_p99": round(timing.p99, 4)},
        "kernels_per_step": timing.kernels,
        **predictions(subject, wanted, timing.median),
    }


def predictions(subject: Subject, wanted: Wanted, ms: float) -> dict[str, Any]:
    """What several GPUs would reach, by an all-reduce as assumed and as published; and what is in it."""
    vector = 4 * subject.config.hidden_size * wanted.batch
    published = LINKS["H200"].all_reduce_us(subject.ranks, vector)
    count = num_all_reduces(subject)
    return {
        **{"all_reduces": count, "all_reduce_us": EACH_US, "ms_added": round(count * EACH_US / 1e3, 4)},
        "predicted_tokens_per_second": round(predicted(subject, wanted, ms, EACH_US), 1),
        **{"published_all_reduce_us": round(published, 2), "published_source": LINKS["H200"].source},
        "ms_added_at_published": round(count * published / 1e3, 4),
        "predicted_at_published": round(predicted(subject, wanted, ms, published), 1),
        "predicted_is": ADDED,
    }
