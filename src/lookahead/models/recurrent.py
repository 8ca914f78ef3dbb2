"""Mixers with a recurrent state: gated delta nets, Mamba-2 and short convolutions.

A token's output depends on the tokens before it through the mixer's states alone: the last inputs of a convolution, and
in two of them a matrix for each head, in fp32. The fields name, in order, what the decoding of a single token computes.
`models.reference_recurrent` has its functions. A token tree is decoded likewise: a node's states are its parent's,
updated once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lookahead.models.feed_forward import Activation
from lookahead.models.matrix import Matrix, check_shape
from lookahead.models.norm import Norm


@dataclass(frozen=True, eq=False)
class Convolution:
    """Each channel's weighted sum of its last `taps` inputs, the newest one with the last weight, and an activation.

    weight [channels, taps], bias [channels]. The sum is in fp32, then rounded to the dtype of the inputs. Inputs before
    the start of the text are 0. The state is the last taps - 1 inputs, in their dtype.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    activation: Activation | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or (self.bias is not None and len(self.bias) != len(self.weight)):
            raise ValueError(f"a convolution of {list(self.weight.shape)}")

    @property
    def channels(self) -> int:
        return self.weight.shape[0]

    @property
    def taps(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """A gated delta net: `heads` states S [key_dim, value_dim], each of which recalls values by keys.

    1. `projection` gives the columns q [key_heads x key_dim], k [key_heads x key_dim], v [heads x value_dim],
       z [heads x value_dim], b [heads] and a [heads], in this order. If the model's own matrix has another one, `order`
       [columns] has for each of these columns its index in the matrix.
    2. `convolution` runs over the columns q, k and v. Head h reads query and key head h // (heads / key_heads).
    3. In fp32, each head's q and k are divided by their length, x / sqrt(sum(x^2) + 1e-6), then q by sqrt(key_dim).
    4. beta = sigmoid(b), rounded to the dtype of x, times `beta_scale`. decay = exp(-exp(a_log) softplus(a + dt_bias)),
       in fp32; a_log [heads], dt_bias [heads].
    5. S = decay S; S = S + k (beta (v - k S))^T; y = q S, all in fp32. y is rounded to the dtype of x.
    6. norm(y) silu(z), with one norm of width value_dim for every head; then `out`.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    projection: Matrix
    convolution: Convolution
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: Norm
    out: Matrix
    order: torch.Tensor | None = None
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.key_heads} key heads evenly")
        _check_columns(self.projection, self.columns, self.order)
        _check_channels(self.convolution, sum(self.columns[:3]))
        _check_per_head(self.heads, self.a_log, self.dt_bias)
        if self.norm.weight is not None and tuple(self.norm.weight.shape) != (self.value_dim,):
            raise ValueError(f"a norm of {list(self.norm.weight.shape)} for heads of {self.value_dim}")
        check_shape("out", self.out, (None, self.heads * self.value_dim))

    @property
    def columns(self) -> tuple[int, ...]:
        """The numbers of columns of q, k, v, z, b and a."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return keys, keys, values, values, self.heads, self.heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of a sequence's state."""
        return self.heads, self.key_dim, self.value_dim


@dataclass(frozen=True, eq=False)
class Mamba2:
    """Mamba-2: `heads` states S [head_dim, state_dim], which fade, and to which each token adds x B^T.

    1. `projection` gives the columns z [heads x head_dim], x [heads x head_dim], B [groups x state_dim],
       C [groups x state_dim] and dt [heads], in this order, times `column_scales` [columns] in fp32, if given.
    2. `convolution` runs over the columns x, B and C. Head h reads B and C of group h // (heads / groups).
    3. dt = softplus(dt + dt_bias), in fp32. That of a prompt's tokens is then clamped to `prompt_time_steps`; a token
       that was generated is not, as in the modules of transformers. dt_bias [heads].
    4. S = exp(-exp(a_log) dt) S + dt x B^T; y = S C + skip x, all in fp32. y is rounded to the dtype of x. a_log and
       skip [heads].
    5. y silu(z); with a `norm`, norm(y silu(z)), or if `norm_first` norm(y) silu(z). The norm is of each of equal parts
       of all heads' outputs in a row; its weight is [parts, width]. Then `out`.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    projection: Matrix
    convolution: Convolution
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    out: Matrix
    norm: Norm | None = None
    norm_first: bool = False
    column_scales: torch.Tensor | None = None
    prompt_time_steps: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads cannot share {self.groups} groups evenly")
        _check_columns(self.projection, self.columns, None)
        _check_channels(self.convolution, sum(self.columns[1:4]))
        _check_per_head(self.heads, self.a_log, self.dt_bias, self.skip)
        if self.column_scales is not None and len(self.column_scales) != sum(self.columns):
            raise ValueError(f"{len(self.column_scales)} scales of {sum(self.columns)} columns")
        if self.norm is not None:
            weight = self.norm.weight
            if weight is None or weight.ndim != 2 or weight.numel() != self.heads * self.head_dim:
                raise ValueError(f"a norm of {self.heads} heads of {self.head_dim} with another weight")
        check_shape("out", self.out, (None, self.heads * self.head_dim))

    @property
    def columns(self) -> tuple[int, ...]:
        """The numbers of columns of z, x, B, C and dt."""
        inner, shared = self.heads * self.head_dim, self.groups * self.state_dim
        return inner, inner, shared, shared, self.heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of a sequence's state."""
        return self.heads, self.head_dim, self.state_dim


@dataclass(frozen=True, eq=False)
class ShortConv:
    """out(C * convolution(B * x)), where `projection` gives all columns of B, then those of C, then those of x."""

    projection: Matrix
    convolution: Convolution
    out: Matrix

    def __post_init__(self) -> None:
        _check_columns(self.projection, self.columns, None)
        check_shape("out", self.out, (None, self.convolution.channels))

    @property
    def columns(self) -> tuple[int, ...]:
        """The numbers of columns of B, C and x."""
        return (self.convolution.channels,) * 3

    @property
    def state_shape(self) -> None:
        """It has no state but that of the convolution."""


Recurrent = GatedDelta | Mamba2 | ShortConv


def _check_columns(projection: Matrix, columns: tuple[int, ...], order: torch.Tensor | None) -> None:
    check_shape("projection", projection, (sum(columns), None))
    if order is not None and not torch.equal(order.cpu().sort().values, torch.arange(sum(columns))):
        raise ValueError(f"an order of {len(order)} columns for {sum(columns)}")


def _check_channels(convolution: Convolution, channels: int) -> None:
    if convolution.channels != channels:
        raise ValueError(f"a convolution of {convolution.channels} channels for {channels}")


def _check_per_head(heads: int, *given: torch.Tensor) -> None:
    for tensor in given:
        if tuple(tensor.shape) != (heads,):
            raise ValueError(f"{list(tensor.shape)} numbers for {heads} heads")
