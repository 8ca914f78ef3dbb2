"""The small endpoints: models, tokenize and detokenize, health, version and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from lookahead.machine import package_version
from lookahead.serve.chat_protocol import TokenizeBody
from lookahead.serve.errors import ApiError, bad_request, unavailable
from lookahead.serve.prompts import encode_chat
from lookahead.serve.protocol import DetokenizeBody
from lookahead.serve.service import Service
from lookahead.serve.tools import Toolbox, style_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [_model(request.app.state.service)]}


@router.get("/v1/models/{name}")
async def model(name: str, request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.check_model(name)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    backend = service.model.backend
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "lookahead",
        "max_model_len": backend.max_length,
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """The token ids of a text, or of a chat after the chat template."""
    service: Service = request.app.state.service
    service.check_model(body.model)

    def encode() -> list[int]:
        if body.messages is not None:
            box = Toolbox(tuple(body.tools or ()), *style_of(service.template))
            return encode_chat(service.model, service.template, body, box)
        try:
            return service.model.encode(body.prompt or "", raw=True)
        except ValueError as error:
            raise bad_request(str(error)) from error

    ids = await service.in_worker(encode, len(await request.body()))
    return {"tokens": ids, "count": len(ids), "max_model_len": service.model.backend.max_length}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of token ids."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    vocabulary = service.model.backend.vocab_size
    for token in body.tokens:
        if token >= vocabulary:
            raise bad_request(f"tokens: {token} is not one of the model's 0 to {vocabulary - 1}", "tokens")
    return {"prompt": await service.in_worker(lambda: service.decode(body.tokens), len(body.tokens))}


@router.get("/health")
async def health(request: Request) -> Response:
    """The process is alive, and its device is not lost. When this fails, the process must be replaced."""
    service: Service = request.app.state.service
    if service.lost is not None:
        return unavailable(str(service.lost)).response()
    return JSONResponse({"status": "alive"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """The server can answer: it is not draining, and its engine runs."""
    service: Service = request.app.state.service
    try:
        service.check_ready()
    except ApiError as error:
        return error.response()
    return JSONResponse({"status": "ready", "model": service.name})


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": package_version("lookahead-decoding") or "unknown"}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus. They cover all keys, so a key needs the right to see them: a prefix cache hit, a
    page in use or a short first step would reveal another key's prompt."""
    request.state.owner.require_right("metrics", "/metrics")
    service: Service = request.app.state.service
    text = await service.metrics_text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
