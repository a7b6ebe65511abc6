"""Tokens with the log-probabilities the model gives them: those that came out, and those of the prompt."""

from types import ModuleType

from torch import Tensor

from dsv4.engine.request import Token
from dsv4.engine.scheduler import Span
from dsv4.model.model import Model

# Rows of logits made at a time: a long prompt's would take a gigabyte.
_ROWS = 64


def token_of(sample: ModuleType, logits: Tensor, id: int, num_top: int | None) -> Token:
    """[V] -> the token with its log-probability and so many alternatives; None: without."""
    if num_top is None:
        return Token(id)
    logprobs = sample.log_probs(logits)
    # By logits: two that differ can round to one logprob, and the first must be the greedy choice.
    top = logits.sort(descending=True, stable=True).indices[:num_top]
    pairs = zip(top.tolist(), logprobs[top].tolist(), strict=True)
    return Token(id, float(logprobs[id]), tuple(pairs))


def score_prompt(model: Model, streams: Tensor, span: Span) -> None:
    """Append the prompt's tokens that follow those of the span, whose rows `streams` [T, N, D] holds."""
    sequence = span.sequence
    num_top, ids, scored = sequence.request.params.prompt_logprobs, sequence.request.ids, sequence.prompt
    if num_top is None:
        return
    # What a pause has undone is processed again, and not scored again.
    first = max(0, len(scored) - span.start)
    last = min(len(span.ids), len(ids) - 1 - span.start)
    for start in range(first, last, _ROWS):
        rows = model.logits(streams[start : min(last, start + _ROWS)])
        for offset, logits in enumerate(rows):
            following = ids[span.start + start + offset + 1]
            scored.append(token_of(model.ops.sample, logits, following, num_top))
