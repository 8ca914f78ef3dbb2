"""What the tests of replicas share: a tiny model in a folder, and one process that serves it, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Running, running

import lookahead
from lookahead import LookaheadConfig

pytest.importorskip("ray", reason="replicas need the extra 'ray'")


@pytest.fixture(scope="session")
def folder(make_json_model: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's files. Its vocabulary has every byte, so that it can write JSON."""
    path, model = tmp_path_factory.mktemp("replicas") / "tiny", make_json_model()
    model.model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def served(folder: Path, settings: LookaheadConfig) -> Any:
    return lookahead.load(str(folder), backend="eager", config=settings)


@pytest.fixture(scope="module")
def one_process(served: Any) -> Iterator[Running]:
    with running(served, model_name="tiny") as one:
        yield one
