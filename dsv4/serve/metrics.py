"""Counters and times of the server, in a registry of its own. Knows no text and no ids."""

import math
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dsv4.serve.client import EngineProcess

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.02, 0.04, 0.1, 0.25, 1, 5)
# Around the default of --max-stall-ms too.
_GAP_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.08, 0.1, 0.12, 0.15, 0.25, 0.5, 1, 2.5, 10)


class Times(Collector):
    """A Histogram for what is seen at every token, by one thread: without its lock and its search."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help, self._bounds = name, help, (*bounds, math.inf)
        self._counts, self._sum, self._created = [0] * len(self._bounds), 0.0, time.time()

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help)
        counts = map(float, accumulate(self._counts))
        family.add_metric([], list(zip(map(floatToGoString, self._bounds), counts, strict=True)), self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        yield family


class Metrics:
    def __init__(self, engine: EngineProcess) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("dsv4_requests", "answered", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter("dsv4_prompt_tokens", "in prompts", registry=registry)
        self.cached_tokens = Counter("dsv4_cached_tokens", "of prompts, not processed", registry=registry)
        self.completion_tokens = Counter("dsv4_completion_tokens", "generated", registry=registry)
        self.first_token = Histogram(
            "dsv4_time_to_first_token_seconds", "from the request", buckets=_SECONDS, registry=registry
        )
        self.per_token = Histogram(
            "dsv4_time_per_token_seconds",
            "after the first, mean of an answer",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        between = Times("dsv4_time_between_tokens_seconds", "every one", _GAP_SECONDS)
        registry.register(between)
        engine.on_gap = between.observe
        for name, help, value in (
            ("dsv4_sequences_running", "that hold pages", lambda: engine.status.running),
            ("dsv4_sequences_waiting", "in the engine's queue", lambda: engine.status.waiting),
            ("dsv4_cache_pages_free", "that no sequence holds", lambda: engine.status.free_pages),
            ("dsv4_cache_pages_kept", "of these, for prefixes", lambda: engine.status.kept_pages),
            ("dsv4_cache_pages", "in all", lambda: engine.status.num_pages),
            ("dsv4_pauses", "of sequences, for want of pages", lambda: engine.status.pauses),
            ("dsv4_drafts", "proposed by the draft block, and verified", lambda: engine.status.drafted),
            ("dsv4_drafts_accepted", "of these, as the model chose", lambda: engine.status.accepted),
            ("dsv4_engine_restarts", "since the start", lambda: engine.num_restarts),
            ("dsv4_engine_ready", "1 when a model is loaded", lambda: int(engine.ready is not None)),
        ):
            Gauge(name, help, registry=registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
