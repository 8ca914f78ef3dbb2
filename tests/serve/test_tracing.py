"""Spans: one for every POST where OpenTelemetry is configured, and not even an import where it is not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Running, running, soon

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from lookahead.serve import tracing
from lookahead.serve.tracing import Tracing, exporter_name, find_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Kept(SpanExporter):
    """Keeps the spans in a list."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.closed = False

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


@pytest.fixture(scope="module")
def traced(loaded: Any, kept: Kept) -> Iterator[Running]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookahead.serve.service.find_tracing", lambda name: Tracing(provider, name, own=True))
        with running(loaded, model_name="tiny") as server:
            yield server
    assert kept.closed


def the_span(kept: Kept) -> Any:
    assert soon(lambda: bool(kept.spans), 5)
    (span,) = kept.spans
    kept.spans.clear()
    return span


def test_a_span_has_the_parent_and_the_attributes(traced: Running, kept: Kept) -> None:
    body = {"prompt": "the quick", "max_tokens": 12, "temperature": 0.5, "stop": ["zz"], "n": 2, "ignore_eos": True}
    answer = traced.client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    usage = answer.json()["usage"]
    span = the_span(kept)
    assert f"{span.context.trace_id:032x}" == PARENT[3:35]
    assert f"{span.parent.span_id:016x}" == PARENT[36:52]
    assert span.parent.is_remote
    assert (span.name, span.kind) == ("text_completion tiny", SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    found = dict(span.attributes)
    seconds = (span.end_time - span.start_time) / 1e9
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") <= seconds < 60
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "lookahead.request_id": answer.headers["x-request-id"],
        "lookahead.key": "everybody",
        "lookahead.steps": usage["lookahead"]["steps"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "lookahead",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 24,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stop_sequences": ("zz",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }


def test_a_stream_has_one_span(traced: Running, kept: Kept) -> None:
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 8, "stream": True, "ignore_eos": True}
    with traced.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for _ in answer.iter_lines():
            pass
    span = the_span(kept)
    assert (span.name, span.parent) == ("chat tiny", None)
    assert span.attributes["gen_ai.usage.output_tokens"] == 8


def test_errors_and_paths_without_text(traced: Running, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    traced.post("/v1/chat/completions", messages=[])
    span = the_span(kept)
    assert (span.attributes["error.type"], span.status.status_code) == ("400", StatusCode.UNSET)
    traced.post("/tokenize", prompt="x")
    span = the_span(kept)
    assert span.name == "POST /tokenize"
    assert not any(name.startswith("gen_ai") for name in span.attributes)
    monkeypatch.setattr(traced.service, "check_model", lambda name: 1 / 0)
    traced.post("/v1/completions", prompt="the", max_tokens=1)
    assert the_span(kept).status.status_code is StatusCode.ERROR
    for path in ("/health", "/metrics", "/v1/models"):
        traced.client.get(path)
    assert not kept.spans


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "x"}, None),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, None),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp_proto_grpc"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
    ],
)
def test_what_counts_as_configured(env: dict[str, str], name: str | None) -> None:
    assert exporter_name(env) == name
    if name is None:
        assert find_tracing("tiny", env) is None


def test_a_provider_of_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Entry:
        def load(self) -> Any:
            return Kept

    asked: list[dict[str, str]] = []

    def points(**given: str) -> list[Entry]:
        asked.append(given)
        return [Entry()]

    monkeypatch.setattr(tracing, "entry_points", points)
    found = find_tracing("tiny", {"OTEL_TRACES_EXPORTER": "mine"})
    assert found is not None
    assert found.own
    assert found.provider.resource.attributes["service.name"] == "lookahead"
    assert asked == [{"group": "opentelemetry_traces_exporter", "name": "mine"}]
    found.close()
    assert not caplog.records
    monkeypatch.setattr(tracing, "entry_points", lambda **given: [])
    assert find_tracing("tiny", {"OTEL_TRACES_EXPORTER": "mine"}) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "there is no exporter mine; pip install opentelemetry-sdk opentelemetry-exporter-otlp" in record.message


def test_nothing_is_imported_without_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    assert find_tracing("tiny", {}) is None
    assert not any(name.startswith("opentelemetry") for name in sys.modules)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    assert find_tracing("tiny", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) is None
    (record,) = caplog.records
    assert record.message == ("traces are not exported: pip install opentelemetry-sdk opentelemetry-exporter-otlp")
