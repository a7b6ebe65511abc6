"""Runs plans through the model: spans become a Step, and the rows that need them become logits."""

from typing import Protocol

from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.engine.logprobs import score_prompt
from dsv4.engine.scheduler import Plan, Span
from dsv4.model.model import Model
from dsv4.model.step import Step

Results = list[tuple[Span, Tensor]]


class Decode(Protocol):
    """Kernels of their own for generated tokens (graphs.py)."""

    def run(self, group: tuple[Span, ...]) -> Results: ...
    def token(self, slot: int, position: int, id: int) -> Tensor: ...
    def join(self) -> None: ...


class Runner:
    """`decode` runs generated tokens where a machine has kernels for them; else they run as prompts do."""

    def __init__(self, model: Model, cache: Cache, device: str, decode: Decode | None = None) -> None:
        self.model, self.cache, self.device, self.decode = model, cache, device, decode

    def run(self, plan: Plan) -> Results:
        """-> (span, float32 logits [V]) of every span that yields a token."""
        results: Results = []
        for group in plan.groups:
            if group is plan.decode and self.decode is not None:
                results += self.decode.run(group)
                continue
            if self.decode is not None:
                self.decode.join()
            streams = self.model.forward(self.step(group), self.cache)
            last, rows = -1, []
            for span in group:
                score_prompt(self.model, streams[last + 1 : last + 1 + len(span.ids)], span)
                last += len(span.ids)
                if span.yields_token:
                    rows.append((span, last))
            if rows:
                logits = self.model.logits(streams[[row for _, row in rows]])
                results += [(span, logits[i]) for i, (span, _) in enumerate(rows)]
        return results

    def token(self, slot: int, position: int, id: int) -> Tensor:
        """float32 logits [1, V] after one generated token of an idle engine."""
        if self.decode is not None:
            return self.decode.token(slot, position, id)
        step = Step.build([(slot, position, [id])], self.device)
        return self.model.logits(self.model.forward(step, self.cache))

    def step(self, group: tuple[Span, ...]) -> Step:
        spans = []
        for span in group:
            assert span.sequence.slot is not None
            spans.append((span.sequence.slot, span.start, list(span.ids)))
        return Step.build(spans, self.device)
