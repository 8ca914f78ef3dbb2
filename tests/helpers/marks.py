"""How much of a test `make test` runs: which parameters are slow, and how many random examples are tried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters of a test, all but the quick ones marked as slow."""
    return [pytest.param(value, marks=[] if value in quick else pytest.mark.slow) for value in values]


def slow_interpreted(*values: Any) -> Any:
    """Parameters of a kernel that take seconds in Triton's interpreter, and next to nothing where it is compiled."""
    import torch  # not by processes that tests start and that do without

    return pytest.param(*values, marks=[] if torch.cuda.is_available() else pytest.mark.slow)


def examples(count: int) -> int:
    """How many examples of a test that wants `count` of them this run's profile tries: `make test` one in four."""
    return max(3, count * hypothesis.settings.default.max_examples // 100)
