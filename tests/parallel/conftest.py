"""A saved model for worlds to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def folder(make_model: Callable[..., Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """One world of two ranks for all that needs no more: what each rank reports of the random cases, of the requests
    with a config and with a measured one, and of models that differ."""
    from cases import random_cases
    from requests_of_two import CHANGES, CONFIG, REQUESTS
    from worlds import World

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    parts = [
        {"do": "identity", "cases": random_cases(0, 8, tokens=16), "check": False},
        {"do": "requests", "model": str(folder), "config": CONFIG, "requests": REQUESTS},
        {"do": "requests", "model": str(folder), "requests": REQUESTS[:1]},
        {"do": "mismatch", "model": str(folder), "changes": CHANGES},
    ]
    home = tmp_path_factory.mktemp("two")
    with World(home, 2, *parts, variables={"LOOKAHEAD_CACHE": str(home / "cache")}) as world:
        return world.reports(200)
