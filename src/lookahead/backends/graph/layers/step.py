"""What the layers of one captured forward pass share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.kinds import ForwardKind
from lookahead.backends.graph.kv import PagedKV

Run = Callable[[], None]
"""What a layer does in every pass of one kind. Its inputs and outputs are buffers, always the same."""


class Activations(Protocol):
    """The memory of activations, which all layers and all captured steps share."""

    def rows(self, name: str, width: int) -> torch.Tensor:
        """The buffer of this name as [rows of the largest step, width]."""
        ...


@dataclass(frozen=True)
class StepContext:
    """A forward pass of one kind, before it is captured: what its layers plan for.

    `views` are the packet's fields on the device. For each attention group of the model: `rows`, where the step's rows
    stand in its pages, `tiles`, how attention is cut, and `work`, memory for attention's partial results.
    """

    kind: ForwardKind
    buffers: Activations
    kv: PagedKV
    views: dict[str, torch.Tensor]
    rows: Sequence[Rows]
    tiles: Sequence[Any]
    work: Sequence[Any]
