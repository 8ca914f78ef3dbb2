"""The web application: routes, middleware and error handlers around one model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from lookahead.generate import LookaheadModel
from lookahead.serve import chat, completions, errors, messages, openapi, pages, responses, tokens
from lookahead.serve.access import RequestLog
from lookahead.serve.limits import Gate
from lookahead.serve.messages_errors import MessagesErrors
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings


def make_app(model: LookaheadModel, settings: ServeSettings, kind: Callable[..., Service] = Service) -> FastAPI:
    """An application that serves this model. `app.state.service` is its service, created by `kind`."""
    service = kind(model, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.close()

    app = FastAPI(
        title="lookahead",
        summary="An OpenAI-compatible server with lookahead decoding",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    pages.web_files()  # read now, so that a missing file fails at startup
    for module in (chat, completions, responses, messages, tokens, pages):  # FastAPI matches routes in this order
        app.include_router(module.router)
    errors.install(app, service.metrics.refused)
    openapi.install(app, service)
    app.add_middleware(
        Gate,
        keys=service.keys,
        max_body=settings.max_body,
        refused=service.metrics.refused,
        hosts=settings.allowed_hosts,
    )
    app.add_middleware(MessagesErrors)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(
        RequestLog, refused=service.metrics.refused, tracing=service.tracing, tags=service.tags_responses
    )
    return app
