"""Shared context of the layers of one captured forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.kinds import ForwardKind
from lookahead.backends.graph.kv import PagedKV
from lookahead.backends.graph.states import StepStates

Run = Callable[[], None]
"""The work of a layer in every pass of one kind, on fixed input and output buffers."""


class Activations(Protocol):
    """Activation buffers, shared by all layers and all captured steps."""

    def rows(self, name: str, width: int) -> torch.Tensor:
        """The buffer of this name as [rows of the largest step, width]."""
        ...


@dataclass(frozen=True)
class StepContext:
    """A forward pass of one kind that the layers plan for, before it is captured.

    `views` are the packet's fields on the device. For each attention group of the model: `rows`, the step's rows and
    their K/V cells; `tiles`, the launch parameters of attention; and `work`, the workspace of attention. `states` are
    those of recurrent layers; None in a model without.
    """

    kind: ForwardKind
    buffers: Activations
    kv: PagedKV
    views: dict[str, torch.Tensor]
    rows: Sequence[Rows]
    tiles: Sequence[Any]
    work: Sequence[Any]
    states: StepStates | None = None
