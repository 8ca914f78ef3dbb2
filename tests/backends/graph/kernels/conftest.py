"""Kernels run compiled where there is CUDA, and elsewhere in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreting import quicken

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def products_add_in_sixteens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter add as a GPU's matrix units do: 16 products at once, one group of 16 after the other.

    NumPy adds all of them at once.
    """
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    whole = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        for k in range(0, a.data.shape[-1], 16):
            part = TensorHandle(a.data[..., k : k + 16], a.dtype), TensorHandle(b.data[..., k : k + 16, :], b.dtype)
            d = whole(self, *part, d, *rest)
        return d

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def interpreter_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        quicken(monkeypatch)
