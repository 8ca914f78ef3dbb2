"""Merges the metrics of all replicas, each sample with a label for its replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from lookahead.serve.metrics import OURS, Collector
from lookahead.serve.ray.reports import Report


def merge_metrics(reports: Iterable[Report]) -> bytes:
    """One text of all reports. Families of the same name are merged, as Prometheus requires."""
    families: dict[str, Metric] = {}
    for report in sorted(reports):
        for family in text_string_to_metric_families(report.text.decode()):
            samples = [sample._replace(labels={**sample.labels, "replica": report.name}) for sample in family.samples]
            known = families.setdefault(family.name, family)
            known.samples = samples if known is family else known.samples + samples
    return written(families.values())


def ingress_text(model: str, waiting: int, refused: Counter[str], counts: Counter[str]) -> bytes:
    """The metrics of an ingress. Those of a request's generation are counted by its replica."""
    queue = GaugeMetricFamily(f"{OURS}:num_requests_waiting", "Sequences in the queue.", labels=["model_name"])
    queue.add_metric([model], waiting)
    refusals = CounterMetricFamily(
        f"{OURS}:requests_refused", "Refused requests by status.", labels=["model_name", "status"]
    )
    for status, count in sorted(refused.items()):
        refusals.add_metric([model, status], count)
    lost = CounterMetricFamily(
        f"{OURS}:replicas_lost", "Replicas that were lost while they generated a sequence.", labels=["model_name"]
    )
    lost.add_metric([model], counts["lost"])
    dropped = CounterMetricFamily(
        f"{OURS}:sequences_given_up", "Sequences that ended because too many replicas were lost.", labels=["model_name"]
    )
    dropped.add_metric([model], counts["dropped"])
    return written([queue, refusals, lost, dropped])


def written(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(list(families)))
    return generate_latest(registry)
