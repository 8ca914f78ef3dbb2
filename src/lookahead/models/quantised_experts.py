"""The experts modules of transformers: their matrices as a description has them, and what replaces a quantised one.

A class keeps the matrices of all experts of a layer as two parameters of one module, `gate_up_proj` [experts, 2 inner,
hidden] and `down_proj` [experts, hidden, inner], or both with their last two dimensions swapped. The module is called
with x [rows, hidden] and, for each row, the experts that the router has chosen and their weights [rows, top_k].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from math import gcd
from typing import Any

import torch

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.matrix import ExpertMatrix
from lookahead.models.number_formats import Format
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.rounding import quantise

NAMES = ("gate_up_proj", "down_proj")
"""The names of the two matrices, in all classes."""


class QuantisedExperts(torch.nn.Module):
    """The experts of a layer with quantised matrices, called as the module that it replaces.

    gate_up_proj       QuantisedLinear [experts x 2 inner, hidden]: of each expert all of gate, then all of up; or a row
                       of each in turns, where the class has them so (then `is_concatenated` is False)
    down_proj          QuantisedLinear [experts x hidden, inner]
    gate_up_proj_bias  [experts, 2 inner] or None; down_proj_bias [experts, hidden] or None

    It computes what the class does with the dequantised weights, with the class's own activation. A pass expands the
    experts that some row has chosen, one after the other, and adds a row's outputs in the order of its choices.
    """

    def __init__(
        self,
        replaced: torch.nn.Module,
        gate_up: QuantisedLinear,
        down: QuantisedLinear,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_experts: int
        for name, value in vars(replaced).items():  # the sizes, and constants that the activation reads
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, child in replaced.named_children():
            self.add_module(name, child)
        self.replaced: Any = type(replaced)
        self.is_transposed = False
        self.gate_up_proj, self.down_proj = gate_up, down
        self.gate_up_proj_bias, self.down_proj_bias = _parameter(gate_up_bias), _parameter(down_bias)
        expert_matrices(self)  # raises ValueError if their shapes do not fit

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [rows, hidden], and the chosen experts and their weights [rows, top_k] -> [rows, hidden]."""
        (rows, top_k), chosen, weights = top_k_index.shape, top_k_index.flatten(), top_k_weights.flatten()
        dtype = torch.promote_types(hidden_states.dtype, weights.dtype)
        outputs = hidden_states.new_zeros(rows * top_k, hidden_states.shape[1], dtype=dtype)
        for expert in chosen.unique().tolist():
            picked = (chosen == expert).nonzero()[:, 0]
            gate_up = self._product("gate_up_proj", expert, hidden_states[picked // top_k])
            out = self._product("down_proj", expert, self.replaced._apply_gate(self, gate_up))
            outputs[picked] = out * weights[picked, None]
        return outputs.view(rows, top_k, -1).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out], by one expert's matrix."""
        linear, bias = getattr(self, name), getattr(self, f"{name}_bias")
        out = linear.out_features // self.num_experts
        return linear.product(x, expert * out, (expert + 1) * out, None if bias is None else bias[expert])


def is_experts(module: torch.nn.Module) -> bool:
    """Whether this is a module of gated experts, plain or quantised, whose matrices are stacked."""
    if isinstance(module, QuantisedExperts):
        return True
    stacked = all(getattr(module._parameters.get(name), "ndim", 0) == 3 for name in NAMES)
    gated = getattr(module, "has_gate", False) and hasattr(module, "_apply_gate")
    return stacked and gated and not getattr(module, "has_post_expert_norm", False)


def expert_matrices(module: Any) -> tuple[ExpertMatrix, ExpertMatrix]:
    """(gate_up, down) of an experts module, plain or quantised. Its `is_concatenated` says how gate and up lie.

    Plain weights are the parameters themselves, not views: a backend may move them within the model.
    """
    if not is_experts(module):
        raise UnsupportedModelError(f"a {type(module).__name__} is no stack of gated experts")

    def matrix(name: str) -> ExpertMatrix:
        weights, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
        return ExpertMatrix(weights, module.num_experts, None if bias is None else bias.detach(), module.is_transposed)

    return matrix("gate_up_proj"), matrix("down_proj")


@torch.no_grad()
def quantised_experts(module: Any, format: Format, device: torch.device) -> QuantisedExperts | None:
    """Round the experts of a module to a format, one after the other on the device where their codes will be.

    The module loses each matrix when its codes are complete. None, and nothing is changed, if the format has two codes
    in a byte and rows are of odd lengths.
    """
    matrices = list(expert_matrices(module))
    if format.codes.bits == 4 and any(matrix.shape[1] % 2 for matrix in matrices):
        return None
    made, biases = list[QuantisedLinear](), [matrix.bias for matrix in matrices]
    for name in NAMES:
        made.append(_quantised(matrices.pop(0), format, device))
        module.register_parameter(name, None)  # what it took makes room for the next one
    return QuantisedExperts(module, made[0], made[1], *biases).train(module.training)


def _quantised(matrix: ExpertMatrix, format: Format, device: torch.device) -> QuantisedLinear:
    assert isinstance(matrix.weights, torch.Tensor)
    dtype = matrix.weights.dtype
    each = (quantise(matrix.weight(expert, dtype).to(device).contiguous(), format) for expert in range(matrix.experts))
    return stacked(each, matrix.experts)


@torch.no_grad()
def stacked(parts: Iterable[QuantisedLinear], count: int) -> QuantisedLinear:
    """The rows of `count` layers of one shape as one layer. They are taken one by one: only one is there twice.

    Raises ValueError if their formats differ. Where rows share scales and a layer's last ones are fewer, fewer rows do.
    """
    given = iter(parts)
    first = _split_evenly(next(given))
    names = [name for name, _ in first.named_buffers() if name != "order"]
    tensors = {name: _larger(getattr(first, name), count) for name in names}
    for index, one in enumerate(chain([first], given)):
        part = _split_evenly(one)
        if part.format != first.format or part.scales.dtype is not first.scales.dtype:
            raise ValueError(f"its experts have several formats, {first.format} and {part.format}")
        if first.order is not None and part.order is not None and not torch.equal(first.order, part.order):
            raise ValueError("its experts have their columns in different orders (GPTQ's desc_act)")
        for name, tensor in tensors.items():
            own = getattr(part, name)
            tensor[index * len(own) : (index + 1) * len(own)] = own
    zeros, offsets = tensors.get("zeros"), tensors.get("offsets")
    return QuantisedLinear(
        first.format,
        tensors["codes"],
        tensors["scales"],
        zeros=zeros,
        offsets=offsets,
        order=first.order,
        dtype=first.dtype,
    )


def _larger(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.new_empty(count * len(tensor), tensor.shape[1])


def _split_evenly(layer: QuantisedLinear) -> QuantisedLinear:
    """The same weights, with scales that fewer rows share if the layer's rows are not a multiple of those that do."""
    format, out = layer.format, layer.out_features
    rows = gcd(format.rows, out)
    if rows == format.rows:
        return layer

    def spread(groups: torch.Tensor | None) -> torch.Tensor | None:
        return None if groups is None else groups.repeat_interleave(format.rows // rows, 0)[: out // rows]

    scales, zeros, offsets = spread(layer.scales), spread(layer.zeros), spread(layer.offsets)
    assert scales is not None
    finer = replace(format, rows=rows)
    return QuantisedLinear(
        finer, layer.codes, scales, zeros=zeros, offsets=offsets, order=layer.order, dtype=layer.dtype
    )


def _parameter(tensor: torch.Tensor | None) -> torch.nn.Parameter | None:
    return None if tensor is None else torch.nn.Parameter(tensor.detach(), requires_grad=False)
