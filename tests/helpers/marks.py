"""Marks that depend on the machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def slow_interpreted(*values: Any) -> Any:
    """Parameters of a kernel that take seconds in Triton's interpreter, and next to nothing where it is compiled."""
    return pytest.param(*values, marks=[] if torch.cuda.is_available() else pytest.mark.slow)
