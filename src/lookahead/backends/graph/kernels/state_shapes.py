"""What a recurrent layer's kernels know of it: the columns of its projections, and the shape of its states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lookahead.models.feed_forward import Activation


class ScanShape(NamedTuple):
    """The states of a layer: `heads` of `key` x `value` numbers. Consecutive heads share a k and a q, of which there
    are `key_heads`. In the columns of a row (see `convolve`), q, k and v begin at `q_at`, `k_at` and `v_at`. `delta`:
    v is what k does not recall yet, and k and q have scales of their own."""

    heads: int
    key_heads: int
    key: int
    value: int
    q_at: int
    k_at: int
    v_at: int
    delta: bool

    @property
    def gates(self) -> int:
        """Numbers of a row in `gates`: for each head its decay, then for each its beta; with `delta` for each key head
        the scale of q, then for each that of k."""
        return 2 * self.heads + 2 * self.key_heads * self.delta


@dataclass(frozen=True, eq=False)
class Columns:
    """How the columns that a layer means are found in the product of its projection, which is without its bias.

    Column c is (product[order[c]] + bias[order[c]]) * scales[c]. order [columns] int32, bias [columns] in the model's
    dtype, scales [columns] fp32; None for those that a layer does not have.
    """

    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Bias, order and scales, as the kernels take them."""
        return self.bias, self.order, self.scales


@dataclass(frozen=True, eq=False)
class Channels:
    """The inputs and weights of a layer's convolution.

    Channel i reads column `first` + i. With `gated` it is the product of columns i and 2 n + i of n channels, and its
    result is multiplied by column n + i. weight [channels, taps] and bias [channels] in the model's dtype, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Activation | None
    columns: Columns
    first: int = 0
    gated: bool = False

    @property
    def count(self) -> int:
        return self.weight.shape[0]

    @property
    def taps(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, eq=False)
class Gating:
    """What the gates of a layer are computed from: see `models.recurrent`.

    Time steps are columns `time_at` + h, for head h; of a gated delta net betas are columns `beta_at` + h, whose
    sigmoids are multiplied by `beta_scale`. a_log [H], time_bias [H]. Time steps of a prompt's tokens are clamped to
    `limits`.
    """

    a_log: torch.Tensor
    time_bias: torch.Tensor
    columns: Columns
    time_at: int
    beta_at: int = 0
    beta_scale: float = 1.0
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def limited(self) -> bool:
        """Whether the limits matter. Time steps are positive."""
        return self.limits[0] > 0 or self.limits[1] < math.inf
