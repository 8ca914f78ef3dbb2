"""Prometheus metrics. The names are vLLM's under the prefix `lookahead:`, and optionally under `vllm:`, too.

Counting happens for every stream in every step, so it must be cheap: plain numbers, formatted only when `/metrics` is
scraped. `observe_step` is called in the engine's thread, everything else in the event loop's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from lookahead.generate import LookaheadModel
from lookahead.serve.requests import RequestState

OURS, VLLM = "lookahead", "vllm"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

ONLY_OURS = {
    "captures",
    "compression",
    "accepted_tokens_by_source",
    "step_time_seconds",
    "steps",
    "requests_refused",
    "server_info",
}
"""Metrics that vLLM does not have."""


class Histogram:
    """Counts by upper bound, and a sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative buckets, as Prometheus expects."""
        found, total = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Metrics:
    """The counters of one server."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.totals: Counter[str] = Counter()
        self.success: Counter[str] = Counter()
        self.by_depth: Counter[int] = Counter()
        self.by_source: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.times = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(SHORT),
            "e2e_request_latency_seconds": Histogram(SECONDS),
            "request_queue_time_seconds": Histogram(SECONDS),
            "request_prefill_time_seconds": Histogram(SECONDS),
            "request_decode_time_seconds": Histogram(SECONDS),
        }
        self.step_times = {rows: Histogram(SHORT) for rows in ROWS}

    # Counting.

    def observe_step(self, rows: int, seconds: float) -> None:
        """Count a forward pass by its number of rows."""
        self.step_times[ROWS[min(bisect_left(ROWS, rows), len(ROWS) - 1)]].observe(seconds)

    def observe_tokens(self, state: RequestState, now: float) -> None:
        """Count the tokens that a request got since the last call."""
        stats = state.sequence.stats
        new = stats.generated_tokens - state.counted
        if new < 1:
            return
        state.counted += new
        self.totals["generation_tokens"] += new
        if state.last_token_time:
            self.times["inter_token_latency_seconds"].observe((now - state.last_token_time) / new, new)
        else:
            state.first_token_time = now
            self.times["time_to_first_token_seconds"].observe(now - state.begin)
            self.totals["prompt_tokens"] += stats.prompt_tokens
        state.last_token_time = now

    def observe_end(self, state: RequestState, now: float) -> None:
        """Count a request that has ended or was cancelled."""
        self.observe_tokens(state, now)  # tokens that arrived after the reply was read
        stats, totals = state.sequence.stats, self.totals
        self.success[state.sequence.finish_reason or "abort"] += 1
        guessed = stats.steps - 1
        if guessed > 0 and state.sequence.config.sources:
            totals["spec_decode_num_drafts"] += guessed
        totals["spec_decode_num_draft_tokens"] += state.tried
        totals["spec_decode_num_accepted_tokens"] += sum(stats.accepted_by_depth)
        totals["steps"] += stats.steps
        for depth, count in enumerate(stats.accepted_by_depth):
            self.by_depth[depth] += count
        self.by_source.update(stats.accepted_by_source)
        if state.last_token_time:
            first = stats.first_token_seconds
            self.times["e2e_request_latency_seconds"].observe(now - state.begin)
            self.times["request_queue_time_seconds"].observe(stats.queue_seconds)
            self.times["request_prefill_time_seconds"].observe(max(0.0, first - stats.queue_seconds))
            self.times["request_decode_time_seconds"].observe(max(0.0, stats.seconds - first))

    # Formatting.

    def text(self, model: LookaheadModel, vllm: bool = False) -> bytes:
        """All metrics in Prometheus' text format, with `vllm` also under vLLM's names."""
        found = list(self._families(OURS, model))
        if vllm:
            found += [one for one in self._families(VLLM, model) if one.name.removeprefix("vllm:") not in ONLY_OURS]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector(found))
        return generate_latest(registry)

    def _families(self, prefix: str, model: LookaheadModel) -> Iterator[Metric]:
        engine, totals = model.engine, self.totals
        cache = model.backend.cache_use()
        waiting = engine.waiting
        gauges = {
            "num_requests_running": ("Running sequences.", max(0, len(engine.running) - waiting)),
            "num_requests_waiting": ("Waiting sequences.", waiting),
            "kv_cache_usage_perc": ("Fraction of the K/V pages in use, 0 to 1.", cache.used),
            "compression": ("S: generated tokens per step.", _ratio(totals["generation_tokens"], totals["steps"])),
        }
        for name, (what, value) in gauges.items():
            yield self._one(GaugeMetricFamily, prefix, name, what, value)
        yield self._info(prefix, model)
        counters = {
            "num_preemptions": ("Preempted sequences.", engine.preemptions),
            "prompt_tokens": ("Prompt tokens of requests that ran.", totals["prompt_tokens"]),
            "generation_tokens": ("Generated tokens.", totals["generation_tokens"]),
            "steps": ("Decoding steps of finished requests.", totals["steps"]),
            "captures": ("Step segments that were compiled and captured.", model.backend.captures),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", cache.query_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", cache.hit_tokens),
            "spec_decode_num_drafts": ("Steps with draft tokens.", totals["spec_decode_num_drafts"]),
            "spec_decode_num_draft_tokens": ("Draft tokens verified.", totals["spec_decode_num_draft_tokens"]),
            "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", totals["spec_decode_num_accepted_tokens"]),
        }
        for name, (what, value) in counters.items():
            yield self._one(CounterMetricFamily, prefix, name, what, value)
        yield self._many(prefix, "request_success", "Requests by finish reason.", "finished_reason", self.success)
        per_pos = "spec_decode_num_accepted_tokens_per_pos"
        yield self._many(prefix, per_pos, "Accepted draft tokens by depth.", "position", self.by_depth)
        by_source = "accepted_tokens_by_source"
        yield self._many(prefix, by_source, "Accepted draft tokens by source.", "source", self.by_source)
        yield self._many(prefix, "requests_refused", "Refused requests by status.", "status", self.refused)
        for name, histogram in self.times.items():
            yield self._histogram(prefix, name, "Seconds.", [((), histogram)])
        by_rows = [((str(rows),), one) for rows, one in self.step_times.items() if any(one.counts)]
        yield self._histogram(
            prefix, "step_time_seconds", "Seconds of a forward pass, by its number of rows.", by_rows, ("rows",)
        )

    def _one(self, kind: type[Any], prefix: str, name: str, what: str, value: float) -> Metric:
        family = kind(f"{prefix}:{name}", what, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _info(self, prefix: str, model: LookaheadModel) -> Metric:
        """Model and device as labels of a metric that is always 1."""
        facts = {"device": str(model.device), "dtype": model.weights}
        family = GaugeMetricFamily(f"{prefix}:server_info", "Model, device and dtype.", labels=["model_name", *facts])
        family.add_metric([self.model, *facts.values()], 1)
        return family

    def _many(self, prefix: str, name: str, what: str, label: str, counts: Counter[Any]) -> Metric:
        family = CounterMetricFamily(f"{prefix}:{name}", what, labels=["model_name", label])
        for key, count in sorted(counts.items()):
            family.add_metric([self.model, str(key)], count)
        return family

    def _histogram(
        self,
        prefix: str,
        name: str,
        what: str,
        series: Sequence[tuple[tuple[str, ...], Histogram]],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = HistogramMetricFamily(f"{prefix}:{name}", what, labels=["model_name", *labels])
        for values, histogram in series:
            family.add_metric([self.model, *values], histogram.buckets(), histogram.sum)
        return family


class Collector:
    """Wraps finished metric families for a registry."""

    def __init__(self, found: list[Metric]) -> None:
        self.found = found

    def collect(self) -> Iterable[Metric]:
        return self.found


def _ratio(count: float, total: float) -> float:
    return count / total if total else 0.0
