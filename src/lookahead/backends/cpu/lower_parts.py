"""Lower the parts of a block other than attention: norms, activations and feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lookahead.backends.cpu.onnx_model import MICROSOFT, OnnxModel, array
from lookahead.backends.cpu.products import linear
from lookahead.models.feed_forward import Activation, FeedForward
from lookahead.models.norm import Norm


def add_norm(
    made: OnnxModel, name: str, spec: Norm | None, x: str, added: str | None, width: int, scale: float = 1.0
) -> tuple[str, str]:
    """The norm of x + added [R, width], times `scale`, and the sum. Without a norm both are the sum."""
    if added is None:
        return norm(made, name, spec, x, width, scale), x
    if spec is None or (spec.bias is not None and not spec.centered):
        total = made.add("Add", x, added)
        return norm(made, name, spec, total, width, scale), total
    kind = "SkipLayerNormalization" if spec.centered else "SkipSimplifiedLayerNormalization"
    normed, _, _, total = made.add(
        kind, x, added, *_factors(made, name, spec, width, scale), outputs=4, domain=MICROSOFT, epsilon=spec.eps
    )
    return normed, total


def norm(made: OnnxModel, name: str, spec: Norm | None, x: str, width: int, scale: float = 1.0) -> str:
    """The norm of x [..., width] along the last axis, times `scale`; None leaves x as it is.

    A weight [heads, width] is for x [R, heads, width].
    """
    if spec is None:
        return x
    kind = "LayerNormalization" if spec.centered else "SimplifiedLayerNormalization"
    attributes: dict[str, Any] = {"axis": -1, "epsilon": spec.eps, "stash_type": 1}
    factors = _factors(made, name, spec, width, scale)
    per_head = spec.weight is not None and spec.weight.dim() > 1
    if per_head:
        x = made.add(kind, x, _ones(made, width), **attributes)
        x = made.add("Mul", x, factors.pop(0))
    else:
        taken = factors[: 2 if spec.centered else 1]
        x = made.add(kind, x, *taken, **attributes)
        factors = factors[len(taken) :]
    for bias in factors:  # that the operation did not take
        x = made.add("Add", x, bias)
    return x


def _factors(made: OnnxModel, name: str, spec: Norm, width: int, scale: float) -> list[str]:
    """What the norm multiplies by and, if it has a bias, what it adds; both times `scale`."""
    if spec.weight is None and scale == 1.0:
        found = [_ones(made, width)]
    else:
        weight = torch.ones(width) if spec.weight is None else spec.weight
        weight = weight + spec.offset if spec.offset and spec.weight is not None else weight
        found = [made.weight(name, array(_scaled(weight, scale)))]
    if spec.bias is not None:
        found.append(made.weight(f"{name}.bias", array(_scaled(spec.bias, scale))))
    return found


def _ones(made: OnnxModel, width: int) -> str:
    return made.weight(f"ones.{width}", np.ones(width, np.float32))


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """The tensor itself, not a copy, if the scale is 1."""
    return tensor if scale == 1.0 else tensor * scale


def _quick_gelu(factor: float) -> Callable[[OnnxModel, str], str]:
    """x sigmoid(factor x): SiLU if the factor is 1."""

    def activate(made: OnnxModel, x: str) -> str:
        result: str = made.add("QuickGelu", x, domain=MICROSOFT, alpha=factor)
        return result

    return activate


def _relu2(made: OnnxModel, x: str) -> str:
    above = made.add("Relu", x)
    square: str = made.add("Mul", above, above)
    return square


ACTIVATIONS: dict[Activation, Callable[[OnnxModel, str], str]] = {
    Activation.SILU: _quick_gelu(1.0),
    Activation.GELU: lambda made, x: made.add("Gelu", x, domain=MICROSOFT),
    Activation.GELU_TANH: lambda made, x: made.add("FastGelu", x, domain=MICROSOFT),
    Activation.QUICK_GELU: _quick_gelu(1.702),
    Activation.RELU: lambda made, x: made.add("Relu", x),
    Activation.RELU2: _relu2,
}
"""All but those with constants."""


def _xielu(made: OnnxModel, x: str, constants: tuple[float, ...]) -> str:
    """a x^2 + c x above 0, else b (exp(min(x, d)) - 1) + (c - b) x.

    The operation Elu would save two nodes, but its results depend on an element's index in the tensor.
    """
    a, b, c, d = constants

    def constant(value: float) -> str:
        return made.constant(value, np.float32)

    above = made.add("Mul", x, made.add("Add", made.add("Mul", x, constant(a)), constant(c)))
    bent = made.add("Sub", made.add("Exp", made.add("Min", x, constant(d))), constant(1))
    below = made.add("Add", made.add("Mul", bent, constant(b)), made.add("Mul", x, constant(c - b)))
    result: str = made.add("Where", made.add("Greater", x, constant(0)), above, below)
    return result


def _clamped(made: OnnxModel, gate: str, up: str, constants: tuple[float, ...]) -> str:
    """(min(up, limit) + 1) g sigmoid(factor g), where g = min(gate, limit), and up is also above -limit."""
    limit, factor = constants
    most, least, one = (made.constant(value, np.float32) for value in (limit, -limit, 1))
    gate = _quick_gelu(factor)(made, made.add("Min", gate, most))
    result: str = made.add("Mul", made.add("Add", made.add("Clip", up, least, most), one), gate)
    return result


def activated(made: OnnxModel, activation: Activation, constants: tuple[float, ...], gate: str, up: str | None) -> str:
    """The activation of gate [R, width], times up, if there is one."""
    if activation is Activation.CLAMPED:
        assert up is not None  # see `feed_forward.FeedForward`
        return _clamped(made, gate, up, constants)
    inner = _xielu(made, gate, constants) if activation is Activation.XIELU else ACTIVATIONS[activation](made, gate)
    return inner if up is None else str(made.add("Mul", inner, up))


def feed_forward(made: OnnxModel, spec: FeedForward, name: str, normed: str, scale: float) -> str:
    """[R, hidden] -> [R, hidden], times `scale`."""
    inner, up = linear(made, f"{name}.gate_up", normed, spec.gate_up), None
    if spec.gated:
        inner, up = made.add("Split", inner, outputs=2, axis=1, num_outputs=2)
    inner = activated(made, spec.activation, spec.constants, inner, up)
    return linear(made, f"{name}.down", inner, spec.down, scale)
