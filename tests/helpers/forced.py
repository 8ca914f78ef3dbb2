"""Servers whose model says what a test wants, token by token as it would say anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from http_server import Running

from lookahead.serve.reply import Reply
from lookahead.serve.requests import RequestSpec
from lookahead.serve.scoring import ForcedText


@contextmanager
def saying(server: Running, text: str) -> Iterator[None]:
    """The server's replies are this text and then the end, whatever is asked."""
    service, tokenizer = server.service, server.model.tokenizer
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    opened = service.open

    async def forced(prepare: Callable[[], list[RequestSpec]], size: int) -> Reply:
        def specs() -> list[RequestSpec]:
            return [replace(spec, mask=ForcedText(ids, server.model.backend.vocab_size)) for spec in prepare()]

        return await opened(specs, size)

    replaced: Any = service
    replaced.open = forced
    try:
        yield
    finally:
        del replaced.open
