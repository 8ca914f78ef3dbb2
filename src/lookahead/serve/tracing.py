"""OpenTelemetry: one span for every POST if it is installed and configured. Otherwise nothing of it is imported.

It is configured if the program has set a tracer provider, as `opentelemetry-instrument` does, or if the environment
names an exporter or its endpoint, with OpenTelemetry's own variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from lookahead.serve.errors import log
from lookahead.serve.records import RequestRecord
from lookahead.serve.requests import REASONS, RequestState

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTER = "OTEL_TRACES_EXPORTER"
GROUP = "opentelemetry_traces_exporter"
"""The entry points of exporters."""
NAMES = "see OpenTelemetry's variables OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_TRACES_EXPORTER"
OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}


class Tracing:
    """Makes spans of finished requests. A span begins in the past, so a running request costs nothing.

    `close` exports what is left, if the provider was created here.
    """

    def __init__(self, provider: Any, model: str, own: bool = False) -> None:
        self.provider, self.model, self.own = provider, model, own
        self.tracer = provider.get_tracer("lookahead.serve")

    def export(self, record: RequestRecord) -> None:
        if record.method != "POST":
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        operation = OPERATIONS.get(record.path, "chat" if record.path.startswith("/v1/") else "")
        span = self.tracer.start_span(
            f"{operation} {self.model}" if operation else f"{record.method} {record.path}"[:200],
            context=extract(record.parent),
            kind=SpanKind.SERVER,
            attributes=attributes_of(record, operation, self.model),
            start_time=record.begin_ns,
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.begin_ns + round(1e9 * record.seconds))

    def close(self) -> None:
        if self.own:
            self.provider.shutdown()


def attributes_of(record: RequestRecord, operation: str, model: str) -> dict[str, Any]:
    """The attributes of a request's span, by OpenTelemetry's conventions for HTTP and for generative models."""
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "error.type": str(record.status) if record.status >= 400 else None,
        "lookahead.request_id": record.id,
        "lookahead.key": record.owner,
        "lookahead.steps": record.steps,
    }
    states = record.states
    if operation:
        found |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "lookahead",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model if states else None,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.response.time_to_first_chunk": record.first_token_seconds,
        }
    if states:
        found |= sampling_attributes(states[0])
        found["gen_ai.request.choice.count"] = len(states) if len(states) > 1 else None
        reasons = [state.sequence.finish_reason for state in states]
        found["gen_ai.response.finish_reasons"] = [REASONS.get(reason or "", "error") for reason in reasons]
    return {name: value for name, value in found.items() if value is not None}


def sampling_attributes(state: RequestState) -> dict[str, Any]:
    sampling = state.spec.sampling
    return {
        "gen_ai.request.max_tokens": state.spec.rules.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.stop_sequences": list(state.spec.stops.stops) or None,
    }


def find_tracing(model: str, env: Mapping[str, str] = os.environ) -> Tracing | None:
    """Tracing as it is configured, or None."""
    configured = exporter_name(env) is not None
    if not configured and "opentelemetry.trace" not in sys.modules:
        return None  # no program has set a provider
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.trace") is None:
        log.warning("traces are not exported: pip install opentelemetry-sdk opentelemetry-exporter-otlp")
        return None
    from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider

    provider = get_tracer_provider()
    if not isinstance(provider, ProxyTracerProvider):
        return Tracing(provider, model)
    return own_tracing(model, env) if configured else None


def exporter_name(env: Mapping[str, str]) -> str | None:
    """The exporter that the environment names; None for no traces."""
    name = env.get(EXPORTER, "otlp" if any(env.get(one) for one in ENDPOINTS) else "none").split(",")[0].strip()
    if name in ("", "none") or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = next((env[one] for one in PROTOCOLS if env.get(one)), "http/protobuf")
    return f"otlp_proto_{'grpc' if protocol == 'grpc' else 'http'}" if name == "otlp" else name


def own_tracing(model: str, env: Mapping[str, str]) -> Tracing | None:
    """Tracing with a provider of our own: the SDK's, whose sampler and resource come from the environment."""
    name = exporter_name(env) or ""
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporters = list(entry_points(group=GROUP, name=name))
        if not exporters:
            raise ImportError(f"there is no exporter {name}")
        named = {} if env.get("OTEL_SERVICE_NAME") else {"service.name": "lookahead"}
        provider = TracerProvider(resource=Resource.create(named))
        provider.add_span_processor(BatchSpanProcessor(exporters[0].load()()))
    except Exception as error:  # exporters check their settings in many ways
        fix = "pip install opentelemetry-sdk opentelemetry-exporter-otlp" if isinstance(error, ImportError) else NAMES
        log.warning("traces are not exported: %s; %s", error, fix)
        return None
    return Tracing(provider, model, own=True)
