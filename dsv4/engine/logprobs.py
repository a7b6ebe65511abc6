"""Tokens with the log-probabilities the model gives them, from what the op `sample` returns."""

from types import ModuleType

from torch import Tensor

from dsv4.engine.request import Token
from dsv4.ops.sample.cpu import unpack


def read_token(row: list[int], num_top: int) -> Token | None:
    """A result row -> the token; None: the logits held no distribution."""
    choice = unpack(row)
    if choice.id < 0:
        return None
    return Token(choice.id) if num_top < 0 else Token(choice.id, choice.logprob, choice.top)


def sorted_token(sample: ModuleType, logits: Tensor, id: int, num_top: int) -> Token:
    """[V] -> the token with more alternatives than the op reports: by a sort of the vocabulary."""
    logprobs = sample.log_probs(logits)
    # By logits: two that differ can round to one logprob, and the first must be the greedy choice.
    top = logits.sort(descending=True, stable=True).indices[:num_top]
    pairs = zip(top.tolist(), logprobs[top].tolist(), strict=True)
    return Token(id, float(logprobs[id]), tuple(pairs))
