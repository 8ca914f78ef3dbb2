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
def saying(server: Running, text: str, *then: str) -> Iterator[None]:
    """The server's replies are this text and then the end, whatever is asked. With more texts each request gets the
    next one, and the last one goes on."""
    service, tokenizer = server.service, server.model.tokenizer
    opened = service.open
    texts = [text, *then]

    async def forced(prepare: Callable[[], list[RequestSpec]], size: int) -> Reply:
        said = texts.pop(0) if len(texts) > 1 else texts[0]
        ids = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

        def specs() -> list[RequestSpec]:
            return [replace(spec, mask=ForcedText(ids, server.model.backend.vocab_size)) for spec in prepare()]

        return await opened(specs, size)

    replaced: Any = service
    replaced.open = forced
    try:
        yield
    finally:
        del replaced.open
