"""Kernels run compiled where there is CUDA, and elsewhere in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
