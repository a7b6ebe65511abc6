"""Counters and times of the server, in a registry of its own. Knows no text and no ids."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dsv4 import __version__
from dsv4.device import available_memory, gpu_memory, total_memory
from dsv4.engine.survival import Counts
from dsv4.serve.client import EngineProcess
from dsv4.serve.openai import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
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


class Live(Collector):
    """What is read when asked for: counters and gauges of the engine."""

    def __init__(self, rows: Iterable[tuple[type[Metric], str, str, Callable[[], float]]]) -> None:
        self._rows = tuple(rows)

    def collect(self) -> Iterator[Metric]:
        for kind, name, help, value in self._rows:
            yield kind(name, help, value=value())  # type: ignore[call-arg]


class GpuMemory(Collector):
    """Of the machine's GPUs, each by its number; nothing where there is none."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        used = GaugeMetricFamily("dsv4_gpu_memory_used_bytes", "by all processes", labels=["gpu"])
        total = GaugeMetricFamily("dsv4_gpu_memory_total_bytes", "there is", labels=["gpu"])
        for number, memory in enumerate(gpu_memory()):
            used.add_metric([str(number)], memory.used)
            total.add_metric([str(number)], memory.total)
        yield from (used, total) if used.samples else ()


class ByPosition(Collector):
    """Drafts whose predecessors were accepted, by their place in a step, and those of them that were too."""

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for name, of in (("draft", "drafted"), ("accepted", "accepted")):
            full = f"dsv4_spec_decode_num_{name}_tokens_per_pos"
            family = CounterMetricFamily(full, f"{of}, by position", labels=["position"])
            for place, count in enumerate(getattr(self._counts(), of)):
                family.add_metric([str(place)], count)
            yield family


class Metrics:
    """Names and types are vLLM's where it has them, with `dsv4_` in front."""

    def __init__(self, engine: EngineProcess, name: str = "") -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("dsv4_build", "what runs here", registry=registry).info({"version": __version__, "model": name})

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"dsv4_{name}", help, labels, registry=registry)

        def times(name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"dsv4_{name}", help, buckets=bounds, registry=registry)

        self.requests = counter("requests", "answered", ("route", "status"))
        self._finished = counter("request_success", "sequences that have ended", ("finished_reason",))
        self._prompt_tokens = counter("prompt_tokens", "in prompts")
        self._generation_tokens = counter("generation_tokens", "generated")
        self._cache_queries = counter("prefix_cache_queries", "tokens of prompts, looked up")
        self._cache_hits = counter("prefix_cache_hits", "of these, found and not processed")
        self.dropped_lines = counter("log_lines_dropped", "that nobody read in time")
        self.first_token = times("time_to_first_token_seconds", "from the request", _SECONDS)
        self._whole = times("e2e_request_latency_seconds", "from the request to the last token", _SECONDS)
        self._queued = times("request_queue_time_seconds", "until the engine began", _SECONDS)
        self._per_token = times(
            "request_time_per_output_token_seconds", "after the first, mean of an answer", _TOKEN_SECONDS
        )
        self._prompt_sizes = times("request_prompt_tokens", "of a request", _TOKENS)
        self._answer_sizes = times("request_generation_tokens", "of a request", _TOKENS)
        between = Times("dsv4_inter_token_latency_seconds", "every one", _GAP_SECONDS)
        registry.register(between)
        engine.on_gap = between.observe

        def used() -> float:
            pages = engine.status.num_pages
            return 1 - engine.status.free_pages / pages if pages else 0.0

        gauge, count = GaugeMetricFamily, CounterMetricFamily
        rows: tuple[tuple[type[Metric], str, str, Callable[[], float]], ...] = (
            (gauge, "num_requests_running", "sequences that hold pages", lambda: engine.status.running),
            (gauge, "num_requests_waiting", "in the engine's queue", lambda: engine.status.waiting),
            (gauge, "kv_cache_usage_perc", "of the pages, from 0 to 1", used),
            (gauge, "cache_pages", "in all", lambda: engine.status.num_pages),
            (gauge, "cache_pages_free", "that no sequence holds", lambda: engine.status.free_pages),
            (gauge, "cache_pages_kept", "of these, for prefixes", lambda: engine.status.kept_pages),
            (count, "num_preemptions", "pauses, for want of pages", lambda: engine.status.pauses),
            (
                count,
                "expert_hits",
                "choices whose expert lay in GPU memory",
                lambda: engine.status.expert_hits,
            ),
            (count, "expert_misses", "of decode steps, the others", lambda: engine.status.expert_misses),
            (gauge, "host_memory_used_bytes", "of the machine", lambda: total_memory() - available_memory()),
            (gauge, "host_memory_total_bytes", "of the machine", total_memory),
            (count, "spec_decode_num_draft_tokens", "proposed", lambda: engine.status.drafts.num_drafted),
            (count, "spec_decode_num_accepted_tokens", "of these", lambda: engine.status.drafts.num_accepted),
            (count, "spec_decode_num_steps", "of generating sequences", lambda: engine.status.drafts.steps),
            (count, "spec_decode_num_tokens", "that these gave", lambda: engine.status.drafts.tokens),
            (count, "spec_decode_draft_seconds", "drafting", lambda: engine.status.drafts.draft_seconds),
            (count, "spec_decode_step_seconds", "in steps", lambda: engine.status.drafts.step_seconds),
            (count, "engine_restarts", "since the start", lambda: engine.num_restarts),
            (gauge, "engine_ready", "1 when a model is loaded", lambda: int(engine.ready is not None)),
        )
        registry.register(GpuMemory())
        registry.register(Live((kind, f"dsv4_{name}", help, value) for kind, name, help, value in rows))
        registry.register(ByPosition(lambda: engine.status.drafts))

    def count(
        self,
        usage: Usage,
        reasons: list[str],
        *,
        seconds: float,
        queued: float | None,
        answered: float | None,
    ) -> None:
        """A request that has ended; `queued` and `answered`, after its first token, where it came so far."""
        each = usage.completion / len(reasons)
        for metric, amount in (
            (self._prompt_tokens, usage.prompt),
            (self._generation_tokens, usage.completion),
            (self._cache_queries, usage.prompt),
            (self._cache_hits, usage.cached),
        ):
            metric.inc(amount)
        for reason in reasons:
            self._finished.labels(reason).inc()
        self._whole.observe(seconds)
        self._prompt_sizes.observe(usage.prompt)
        self._answer_sizes.observe(usage.completion)
        if queued is not None:
            self._queued.observe(queued)
        if answered is not None and each > 1:
            self._per_token.observe(answered / (each - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)
