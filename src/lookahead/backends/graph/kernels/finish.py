"""What follows a product of a step's rows with their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lookahead.models.feed_forward import Activation


@dataclass(frozen=True)
class Finish:
    """`activation` with its constants, of gate and up if `gated`, whose columns may `alternate`; or without one the sum
    over a row's experts, plus the shared expert's output [R, N] and its bias [N], times the row's weight if `gated`."""

    activation: Activation | None = None
    constants: Sequence[float] = ()
    gated: bool = True
    alternate: bool = False
    shared: torch.Tensor | None = None
    shared_bias: torch.Tensor | None = None
