"""Sampling as the reference does it: torch runs on the device of the logits."""

from dsv4.ops.sample.ref import log_probs, sample, uniform

__all__ = ["log_probs", "sample", "uniform"]
