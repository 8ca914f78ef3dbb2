"""Metrics: they count what happened, under our names and vLLM's; and the dashboard asks only for what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from http_server import Running, running
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
VLLM = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)
OURS = ("compression", "accepted_tokens_by_source_total", "step_time_seconds_bucket")


def samples(server: Running) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name -> labels -> value."""
    answer = server.client.get("/metrics")
    assert answer.status_code == 200
    found: dict[str, dict[Any, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


@pytest.fixture(scope="module")
def used(loaded: Any) -> Any:
    with running(loaded, vllm_metrics=True) as server:
        yield server


def test_what_was_asked_is_counted(used: Running) -> None:
    usage = []
    for lookahead in (True, True, False):
        body = {"prompt": "the quick brown fox", "max_tokens": 30, "temperature": 0, "lookahead": lookahead}
        usage.append(used.complete(**body)["usage"])
    used.post("/v1/completions", prompt="x", max_tokens=-1)
    found = samples(used)
    tokens = sum(one["completion_tokens"] for one in usage)
    for prefix in ("lookahead", "vllm"):
        value = {name: found[f"{prefix}:{name}"] for name in VLLM}
        assert value["generation_tokens_total"][()] == tokens
        assert value["prompt_tokens_total"][()] == sum(one["prompt_tokens"] for one in usage)
        tried = sum(one["lookahead"]["tried"] for one in usage)
        accepted = sum(one["lookahead"]["accepted"] for one in usage)
        assert value["spec_decode_num_draft_tokens_total"][()] == tried
        assert value["spec_decode_num_accepted_tokens_total"][()] == accepted
        assert sum(value["spec_decode_num_accepted_tokens_per_pos_total"].values()) == accepted
        assert value["num_requests_running"][()] == value["num_requests_waiting"][()] == 0
        assert found[f"{prefix}:time_to_first_token_seconds_count"][()] == 3
        assert found[f"{prefix}:e2e_request_latency_seconds_count"][()] == 3
        assert sum(value["request_success_total"].values()) == 3
        # Of every answer the first block is no wait between tokens.
        waits = found[f"{prefix}:inter_token_latency_seconds_count"][()]
        assert tokens - 40 < waits <= tokens - 3
    steps = sum(one["lookahead"]["steps"] for one in usage)
    assert found["lookahead:compression"][()] == pytest.approx(tokens / steps)
    assert sum(found["lookahead:accepted_tokens_by_source_total"].values()) == accepted
    assert sum(found["lookahead:step_time_seconds_count"].values()) >= steps
    assert "vllm:compression" not in found
    assert found["lookahead:requests_refused_total"] == {(("status", "400"),): 1}


def test_vllm_names_only_on_request(server: Running) -> None:
    assert not any(name.startswith("vllm") for name in samples(server))


def test_the_dashboard_asks_only_for_metrics_that_exist(used: Running) -> None:
    used.complete(prompt="the", max_tokens=10)
    known = set(samples(used))
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    names = {name for expression in asked for name in re.findall(r"\b(?:lookahead|vllm):\w+", expression)}
    assert len(names) >= 12
    assert names <= known, names - known
    missing = {f"lookahead:{name}" for name in (*VLLM, *OURS)} - names
    assert missing <= {"lookahead:request_prefill_time_seconds_bucket", "lookahead:spec_decode_num_drafts_total"}
