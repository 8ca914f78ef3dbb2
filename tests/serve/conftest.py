"""Servers around tiny models, one for all tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Running, running
from json_model import HERMES, json_model, json_tokenizer

import lookahead
from lookahead import LookaheadConfig


@pytest.fixture(scope="session")
def loaded(model: Any, tokenizer: Any, settings: LookaheadConfig) -> Any:
    return lookahead.load((model, tokenizer), config=settings)


@pytest.fixture(scope="module")
def server(loaded: Any) -> Iterator[Running]:
    with running(loaded) as one:
        yield one


@pytest.fixture(scope="session")
def make_json_model(settings: LookaheadConfig) -> Callable[[str], Any]:
    """A tiny model that can write JSON, with a chat template of one's choice."""
    return lambda template=HERMES: json_model(settings, json_tokenizer(template))


@pytest.fixture(scope="module")
def json_server(make_json_model: Callable[[str], Any]) -> Iterator[Running]:
    with running(make_json_model()) as one:
        yield one
