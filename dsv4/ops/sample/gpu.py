"""Sampling as the reference does it: torch runs on the device of the logits."""

from dsv4.ops.sample.ref import choose, log_probs, pack, sample, uniform, unpack

__all__ = ["choose", "log_probs", "pack", "sample", "uniform", "unpack"]
