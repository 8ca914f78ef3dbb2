"""A server around the tiny model for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Running, running

import lookahead
from lookahead import LookaheadConfig


@pytest.fixture(scope="session")
def loaded(model: Any, tokenizer: Any, settings: LookaheadConfig) -> Any:
    return lookahead.load((model, tokenizer), config=settings)


@pytest.fixture(scope="module")
def server(loaded: Any) -> Iterator[Running]:
    with running(loaded) as one:
        yield one
