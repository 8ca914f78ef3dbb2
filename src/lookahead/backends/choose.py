"""Chooses a model's backend: on CUDA the graph backend and on a CPU the CPU backend, if they support the model; else
the eager one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lookahead.backends.base import Backend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.eager.chains import ChainBackend
from lookahead.backends.failures import CompilerError, brief, clear_errors
from lookahead.backends.probe import probe
from lookahead.backends.support import check_supported, input_device, why_no_trees
from lookahead.config import BACKENDS
from lookahead.models.facts import UnsupportedModelError, first_line
from lookahead.models.patches import patch_of
from lookahead.models.read import read

logger = logging.getLogger("lookahead")

HOOK_BACKENDS = ("auto", "eager", "graph")
"""Backends of `transformers_hook`. Packing weights for the CPU backend takes too long for one call of `generate`."""


def check_backend_name(name: str, known: Sequence[str] = BACKENDS) -> None:
    if name not in known:
        raise ValueError(f"unknown backend {name!r}; choose from {', '.join(known)}")


def make_backend(model: Any, name: str = "auto", log: Callable[[str], None] | None = None) -> Backend:
    """The backend of this name. 'auto' is the graph backend on CUDA and the CPU backend on a CPU, for models that
    they support, else the eager one."""
    check_backend_name(name)
    check_supported(model)
    if name == "cpu":
        return cpu_backend(model)
    if name == "auto" and input_device(model).type == "cpu":
        try:
            return cpu_backend(model)
        except UnsupportedModelError as error:
            if log is not None:
                log(f"note: {first_line(error)}; the eager backend runs it")
            return eager_backend(model, log)
    return graph_or_eager(model, name, lambda: graph_backend(model), lambda: eager_backend(model, log), log)


def eager_backend(model: Any, log: Callable[[str], None] | None = None) -> Backend:
    """Create and probe a backend that runs the model's own forward pass: over trees, or else over chains. If a probe
    refuses both, the error is that of the trees."""
    if reason := why_no_trees(model):
        backend = ChainBackend(model)
        if log is not None:
            log(f"note: {reason}; its steps are chains, in its own cache")
        return backend
    try:
        return EagerBackend(model)
    except UnsupportedModelError as error:
        if patch_of(model.modules()) is not None:
            raise
        try:
            backend = ChainBackend(model)
        except UnsupportedModelError:
            raise error from None
        if log is not None:
            log(f"note: {first_line(error)}; its steps are chains, in its own cache")
        return backend


Graph = TypeVar("Graph")
Eager = TypeVar("Eager")


def graph_or_eager(
    model: Any,
    name: str,
    graph: Callable[[], Graph],
    eager: Callable[[], Eager],
    log: Callable[[str], None] | None = None,
) -> Graph | Eager:
    """The result of `graph()` or `eager()`, by the backend's name. If 'auto' cannot use the graph backend, log why."""
    if name == "eager" or (name == "auto" and input_device(model).type != "cuda"):
        return eager()
    try:
        return graph()
    except (UnsupportedModelError, torch.OutOfMemoryError) as error:
        if name == "graph":
            raise
        # Problems of the machine are reported even without a log.
        machine = isinstance(error, (CompilerError, torch.OutOfMemoryError))
        warn = log or (logger.warning if machine else None)
        if warn is not None:
            warn(f"note: {first_line(error)}; the eager backend runs it")
    # Outside the handler, whose error keeps the memory of the failed backend alive.
    return eager()


def cpu_backend(model: Any) -> Backend:
    """Create and probe the model's CPU backend. Raises UnsupportedModelError for a model it cannot run, and if ONNX
    Runtime is not installed."""
    description = read(model, "cpu")
    try:
        from lookahead.backends.cpu.backend import CpuBackend
    except ImportError as error:
        raise UnsupportedModelError(
            f"the cpu backend, which is faster, is not there: {first_line(error)}; "
            "pip install 'lookahead-decoding[cpu]', with Python 3.11 or newer"
        ) from error
    return CpuBackend(model, description=description)


def graph_backend(
    model: Any, *, capture_after: int = 0, drop_pages: bool = True, adopts_prompts: bool = False
) -> Backend:
    """Create and probe the model's graph backend. Raises UnsupportedModelError for a model it cannot run, and if its
    kernels do not compile.

    `capture_after`, `drop_pages` and `adopts_prompts`: see `GraphBackend`.
    """
    from lookahead.backends.graph.backend import GraphBackend

    if input_device(model).type == "cuda":
        check_triton()
    with clear_errors(input_device(model), "the graph backend"):
        backend = GraphBackend(model, capture_after=capture_after, drop_pages=drop_pages, adopts_prompts=adopts_prompts)
        backend.compile_kernels()
        probe(backend)
    return backend


def check_triton() -> None:
    """Raise CompilerError if Triton, which compiles the graph backend's kernels, is missing or broken."""
    try:
        import lookahead.backends.graph.kernels.attention  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        raise CompilerError(f"Triton, which the graph backend needs, does not work here: {brief(error)}") from error
