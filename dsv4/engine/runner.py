"""Runs plans through the model: spans become a Step, and the rows that need them become logits."""

from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.engine.logprobs import score_prompt
from dsv4.engine.scheduler import Plan, Span
from dsv4.model.model import Model
from dsv4.model.step import Step


class Runner:
    def __init__(self, model: Model, cache: Cache, device: str) -> None:
        self.model, self.cache, self.device = model, cache, device

    def run(self, plan: Plan) -> list[tuple[Span, Tensor]]:
        """-> (span, float32 logits [V]) of every span that yields a token."""
        results: list[tuple[Span, Tensor]] = []
        for group in plan.groups:
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

    def step(self, group: tuple[Span, ...]) -> Step:
        spans = []
        for span in group:
            assert span.sequence.slot is not None
            spans.append((span.sequence.slot, span.start, list(span.ids)))
        return Step.build(spans, self.device)
