"""Kernels run compiled where there is CUDA, and elsewhere in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
def language_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter replace the functions of `triton.language` once per launch.

    It does so again at each call of a helper, which takes longer than all of the arithmetic.
    """
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: list[bool] = []

    def patch_once(fn: Any) -> Any:
        if patched:
            return None
        scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        patched.append(True)
        scope.restore = restore_all
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
