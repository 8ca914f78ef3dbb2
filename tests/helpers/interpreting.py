"""Triton's interpreter without the work that a test does not need: what it computes stays the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save most of the interpreter's own time, which is a multiple of the arithmetic's, until the test ends."""
    _patch_language_once(monkeypatch)
    _skip_unread_overflow_checks(monkeypatch)
    _keep_numpy_types(monkeypatch)


def _patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter replace the functions of `triton.language` once per launch.

    It does so again at each call of a helper.
    """
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


def _skip_unread_overflow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not repeat the integer arithmetic in 64 bits: the comparison is only asserted under `debug`, which is off."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _keep_numpy_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up NumPy's type of each Triton type once: the interpreter fills a table of all of them at each call."""
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, dict[Any, Any]()

    def kept(dtype: Any) -> Any:
        name = str(dtype)
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", kept)
