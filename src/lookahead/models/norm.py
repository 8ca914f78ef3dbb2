"""The norms of a described model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm, x / sqrt(mean(x^2) + eps), or with `centered` LayerNorm, which subtracts the mean of x first.

    It is computed in fp32, then multiplied by weight + `offset` (1 for Gemma) and added to the bias; None for a norm
    without them. `rounds_first`: the result is rounded to x's dtype before the weight, as in Llama's modules; if not,
    at the end. weight and bias [width]; as the norm of heads or groups also [heads, width], if each has its own.
    """

    weight: torch.Tensor | None
    eps: float
    bias: torch.Tensor | None = None
    centered: bool = False
    offset: float = 0.0
    rounds_first: bool = True
