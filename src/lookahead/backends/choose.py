"""Choose a model's backend: the graph backend if it can run the model, else the eager one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lookahead.backends.base import Backend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.support import UnsupportedModelError, check_supported, first_line, input_device, probe

BACKENDS = ("auto", "eager", "graph")


def check_name(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose from {', '.join(BACKENDS)}")


def make_backend(model: Any, name: str = "auto", log: Callable[[str], None] | None = None) -> Backend:
    """The backend of this name. 'auto' is the graph backend on CUDA for the models it knows, else the eager one."""
    check_name(name)
    check_supported(model)
    return choose(model, name, lambda: graph_backend(model), lambda: EagerBackend(model), log)


Graph = TypeVar("Graph")
Eager = TypeVar("Eager")


def choose(
    model: Any,
    name: str,
    graph: Callable[[], Graph],
    eager: Callable[[], Eager],
    log: Callable[[str], None] | None = None,
) -> Graph | Eager:
    """Make the backend of this name with `graph()` or `eager()`. If 'auto' cannot use the graph one, log why."""
    if name == "eager" or (name == "auto" and input_device(model).type != "cuda"):
        return eager()
    try:
        return graph()
    except (UnsupportedModelError, torch.OutOfMemoryError) as error:
        if name == "graph":
            raise
        if log is not None:
            log(f"note: {first_line(error)}; the eager backend runs it")
        return eager()


def graph_backend(model: Any, *, patient: bool = False) -> Backend:
    """Make and probe the model's graph backend. Raises UnsupportedModelError for a model it cannot run.

    `patient`: see `GraphBackend`.
    """
    from lookahead.backends.graph.backend import GraphBackend

    if input_device(model).type == "cuda":
        try:
            import lookahead.backends.graph.kernels.attention  # noqa: F401
        except ImportError as error:
            raise UnsupportedModelError(f"the graph backend does not run this model: {error}") from error
    backend = GraphBackend(model, patient=patient)
    probe(backend)
    return backend
