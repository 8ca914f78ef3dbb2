"""Triton's interpreter without the work that a test does not need: what it computes stays the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save most of the interpreter's own time, which is a multiple of the arithmetic's, until the test ends."""
    _patch_language_once(monkeypatch)
    _skip_unread_overflow_checks(monkeypatch)
    _keep_numpy_types(monkeypatch)
    _keep_types_and_shapes(monkeypatch)
    _call_builtins_directly(monkeypatch)


def interpreted_backends(monkeypatch: pytest.MonkeyPatch, row_sizes: tuple[int, ...]) -> Any:
    """Makes graph backends on a CPU that run every operation as its Triton kernel, in steps of these sizes. Calling a
    twin raises."""
    from lookahead.backends.graph import runner, sizes, state
    from lookahead.backends.graph.backend import GraphBackend
    from lookahead.backends.graph.kernels import (
        reference,
        reference_draw,
        reference_heads,
        reference_layers,
        reference_states,
    )
    from lookahead.backends.graph.kernels.top import TopWork
    from lookahead.backends.graph.matrices.quantised import QuantisedMatrix
    from lookahead.backends.graph.ops import Ops

    def twin(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a twin was called in place of its kernel")

    quicken(monkeypatch)

    def make(model: Any, processors: int = 2, description: Any = None) -> GraphBackend:
        monkeypatch.setattr(state, "new_top_work", TopWork)  # top tokens by the kernel
        monkeypatch.setattr(sizes, "ROW_SIZES", row_sizes)
        monkeypatch.setattr(QuantisedMatrix, "_expand", twin)
        for name in ("attend", "move_accepted", "top_tokens"):
            monkeypatch.setattr(reference, name, twin)
        for name in ("locate_rows", "norm_heads", "rotate_write"):
            monkeypatch.setattr(reference_heads, name, twin)
        for name in ("embed", "add_norm", "activate", "apply_gate", "apply_head_gates", "scale", "finish_logits"):
            monkeypatch.setattr(reference_layers, name, twin)
        for name in ("list_walks", "convolve", "store_inputs", "replay_inputs", "gate", "scan", "gated_norm"):
            monkeypatch.setattr(reference_states, name, twin)
        for name in ("adjust", "count_tokens"):
            monkeypatch.setattr(reference_draw, name, twin)
        monkeypatch.setattr(runner, "Ops", partial(Ops, compiled=True, processors=processors))
        return GraphBackend(model, most_rows=row_sizes[-1], kv_tokens=512, description=description)

    return make


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


def _keep_types_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the types that follow from a type once, and the shape of its tensors: they are made for every operation."""
    import triton.language as tl
    from triton.language.core import constexpr
    from triton.language.semantic import TritonSemantic

    block, tensor = tl.block_type, tl.tensor
    make, with_element, to_ir, broadcast = (
        tensor.__init__,
        block.with_element_ty,
        block.to_ir,
        TritonSemantic.broadcast_impl_value,
    )
    unwrap, nested = tl.core._unwrap_if_constexpr, (list, tuple, tl.tuple)

    def init(self: Any, handle: Any, type: Any) -> None:
        if (known := vars(type).get("_known_shape")) is None:
            make(self, handle, type)
            type._known_shape = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    def with_element_ty(self: Any, scalar: Any) -> Any:
        if scalar is self.element_ty:
            return self
        if scalar.is_ptr():
            return with_element(self, scalar)
        known = vars(self).setdefault("_known_elements", {})
        if scalar not in known:
            known[scalar] = with_element(self, scalar)
        return known[scalar]

    def to_ir_once(self: Any, builder: Any) -> Any:
        if "_known_ir" not in vars(self):
            self._known_ir = to_ir(self, builder)
        return self._known_ir

    def broadcast_where_shapes_differ(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other or (
            one.is_block() == other.is_block() and (not one.is_block() or one.shape.values == other.shape.values)
        ):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def unwrap_the_simple(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return unwrap(value) if isinstance(value, nested) else value

    monkeypatch.setattr(tensor, "__init__", init)
    monkeypatch.setattr(block, "with_element_ty", with_element_ty)
    monkeypatch.setattr(block, "to_ir", to_ir_once)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_where_shapes_differ)
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_the_simple)


def _call_builtins_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the two functions between a kernel's call and what it calls."""
    from triton.runtime import interpreter

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    monkeypatch.setattr(interpreter, "_patch_attr", patch)
