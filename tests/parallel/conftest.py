"""A saved model for worlds to load; and the helpers beside the tests, and beside the backends' tests, as modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for beside in (Path(__file__).parent, Path(__file__).parents[1] / "backends"):
    if str(beside) not in sys.path:
        sys.path.insert(0, str(beside))


@pytest.fixture(scope="session")
def folder(make_model: Callable[..., Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
