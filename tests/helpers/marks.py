"""Which parameters of a test are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch


def slow_but(names: Iterable[str], *quick: str) -> list[Any]:
    """All of the names as parameters, and those that are not among the quick ones marked as slow."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def slow_interpreted(*values: Any) -> Any:
    """Parameters of a kernel that take seconds in Triton's interpreter, and next to nothing where it is compiled."""
    return pytest.param(*values, marks=[] if torch.cuda.is_available() else pytest.mark.slow)
