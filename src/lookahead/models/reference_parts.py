"""What the descriptions of models in plain PyTorch share: matrices, norms and activations. See `reference`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from lookahead.models.feed_forward import Activation
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.norm import Norm
from lookahead.models.quantised import QuantisedLinear

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.RELU: F.relu,
    Activation.RELU2: lambda x: F.relu(x).square(),
}
"""All but those with constants."""


def gated(activation: Activation, constants: Sequence[float], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation of gate [rows, width] times up."""
    if activation is not Activation.CLAMPED:
        return activate(activation, constants, gate) * up
    limit, factor = constants
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * factor))


def activate(activation: Activation, constants: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """The activation, with its constants, of x [rows, width]."""
    if activation is not Activation.XIELU:
        return ACTIVATIONS[activation](x)
    square, bent, linear, least = constants
    above = square * x * x + linear * x
    return torch.where(x > 0, above, (torch.expm1(x.clamp(max=least)) - x) * bent + linear * x)


def norm(spec: Norm | None, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [..., width] -> [..., width], in fp32 and rounded to this dtype, or else x's; None leaves it as it is."""
    if spec is None:
        return x
    dtype = dtype or x.dtype
    wide = x.float()
    if spec.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.rounds_first:
        wide = wide.to(dtype)
    if spec.weight is not None:
        weight = spec.weight if spec.rounds_first else spec.weight.float()
        wide = wide * (weight + spec.offset if spec.offset else weight)
    if spec.bias is not None:
        wide = wide + spec.bias
    return wide.to(dtype)


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def matrix(spec: Matrix, x: torch.Tensor) -> torch.Tensor:
    """x [rows, in] -> [rows, out]. A quantised part may round x."""
    if any(spec.formats):
        apart = [(part, Matrix((part,), spec.transposed)) for part in spec.parts]
        return torch.cat([part(x) if any(one.formats) else matrix(one, x) for part, one in apart], dim=-1)
    return F.linear(x, spec.weight(), spec.bias())


def expert_matrix(spec: ExpertMatrix, expert: int, x: torch.Tensor) -> torch.Tensor:
    """x [rows, in] -> [rows, out], by one expert. A quantised one may round x."""
    bias = None if spec.bias is None else spec.bias[expert].detach()
    if isinstance(spec.weights, QuantisedLinear):
        return spec.weights.product(x, expert * spec.shape[0], (expert + 1) * spec.shape[0], bias)
    return F.linear(x, spec.weight(expert, x.dtype), bias)
