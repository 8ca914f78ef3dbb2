"""The experts of a checkpoint: quantised matrices of each, or of all in a layer at once, read into `QuantisedExperts`.

Files name an expert's matrices gate_proj, up_proj and down_proj, or w1, w3 and w2 (Mixtral, MiniMax). Those of all
experts are gate_up_proj and down_proj, as in the model; Qwen3-VL's FP8 ones lie in [in, out].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lookahead.loading.quantised.stored import StoredLayer
from lookahead.loading.quantised.weights import Reader, UnreadableError, naming, read_layer
from lookahead.models.matrix import ExpertMatrix
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import NAMES, QuantisedExperts, expert_matrices, stacked

NAME = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?:(?P<number>\d+)\.)?(?P<matrix>\w+)")
PARTS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
"""A matrix of the model -> its parts in an expert's files, each by the names that it may have there."""

Tensors = Mapping[str, torch.Tensor]
TensorsOf = Callable[[StoredLayer], Tensors]
"""Gives the tensors of a layer, mapped from their files, by the last parts of their names."""


@dataclass
class StoredExperts:
    """The experts of a layer in the files: their name there, and their matrices by number and name.

    The number is None for a matrix of all experts.
    """

    name: str
    layers: dict[tuple[int | None, str], StoredLayer] = field(default_factory=dict)

    def part(self, expert: int, names: tuple[str, ...]) -> StoredLayer:
        """An expert's matrix, which has one of these names."""
        for name in names:
            if (expert, name) in self.layers:
                return self.layers[expert, name]
        raise ValueError(f"expert {expert} has no quantised {names[0]}")


def grouped_experts(layers: list[StoredLayer]) -> dict[str, StoredExperts]:
    """The layers whose names are those of experts, by the names of the modules that have them."""
    found: dict[str, StoredExperts] = {}
    for layer in layers:
        if parts := NAME.fullmatch(layer.name):
            number = None if parts["number"] is None else int(parts["number"])
            name = parts["experts"]
            found.setdefault(name, StoredExperts(name)).layers[number, parts["matrix"]] = layer
    return found


class AwaitedExperts(torch.nn.Module):
    """Stands for an experts module whose tensors will be read last. It has no parameters, so none is missing."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.awaited = (module,)  # no submodule, which transformers would initialise


@dataclass(frozen=True)
class ExpertsReader:
    """Reads experts by the reader of their format, one by one, to where the codes of all in a layer will be.

    `device` is that of the codes, and `dtype` the model's. Biases stay where the other parameters are.
    """

    reader: Reader
    tensors_of: TensorsOf
    device: str
    dtype: torch.dtype

    def read(self, stored: StoredExperts, module: Any) -> QuantisedExperts:
        """The module that replaces `module`, a class's own. Raises ValueError for what cannot be read."""
        with naming(stored.name):
            matrices = dict(zip(NAMES, expert_matrices(module), strict=True))
            last = max((number for number, _ in stored.layers if number is not None), default=0)
            if last >= module.num_experts:
                raise ValueError(f"there is an expert {last}, and the model has {module.num_experts}")
            turned = any(self._is_turned(stored, name, matrix.shape) for name, matrix in matrices.items())
            read = [self._matrix(stored, name, matrix, module, turned) for name, matrix in matrices.items()]
            (gate_up, gate_up_bias), (down, down_bias) = read
            return QuantisedExperts(module, gate_up, down, gate_up_bias, down_bias)

    def _matrix(
        self, stored: StoredExperts, name: str, matrix: ExpertMatrix, module: Any, turned: bool
    ) -> tuple[QuantisedLinear, torch.Tensor | None]:
        """A matrix of all experts, and its bias [experts, out]."""
        (out, width), whole = matrix.shape, stored.layers.get((None, name))
        if whole is None and not module.is_concatenated and name == "gate_up_proj":
            raise ValueError("its gates and ups are apart, and rows of the model's alternate")
        parts = len(PARTS[name]) if whole is None else 1
        given = (
            self._parts(stored, PARTS[name], matrix.experts) if whole is None else self._slices(whole, matrix, turned)
        )
        biases: list[torch.Tensor] = []

        def linears() -> Iterator[QuantisedLinear]:
            for own, tensors in given:
                shape, biased = (out // parts, width), matrix.bias is not None
                with naming(own):
                    weights, bias = read_layer(self.reader, own, tensors, shape, biased=biased, device=self.device)
                    if bias is not None and not biased:
                        raise ValueError("it has a bias, and the model's experts have none")
                if bias is not None:
                    biases.append(bias.to(self.dtype))
                yield weights.linear(None, self.dtype)

        made = stacked(linears(), matrix.experts * parts)
        return made, torch.cat(biases).view(matrix.experts, out) if biases else None

    def _parts(
        self, stored: StoredExperts, names: tuple[tuple[str, ...], ...], experts: int
    ) -> Iterator[tuple[str, Tensors]]:
        """The name and the tensors of each part of a matrix, expert by expert."""
        for expert in range(experts):
            for one in names:
                layer = stored.part(expert, one)
                yield layer.name, self.tensors_of(layer)

    def _slices(self, layer: StoredLayer, matrix: ExpertMatrix, turned: bool) -> Iterator[tuple[str, Tensors]]:
        """The same of a matrix of all experts."""
        tensors = self.tensors_of(layer)
        for local, tensor in tensors.items():
            if not tensor.ndim or len(tensor) != matrix.experts:
                raise UnreadableError(f"{layer.name} cannot be read: its {local} is {list(tensor.shape)}")
        for expert in range(matrix.experts):
            own = {local: tensor[expert] for local, tensor in tensors.items()}
            yield layer.name, {local: one.T if turned and one.ndim == 2 else one for local, one in own.items()}

    def _is_turned(self, stored: StoredExperts, name: str, shape: tuple[int, int]) -> bool:
        """Whether a matrix of all experts is [in, out] in the files. Of a square one that is not known."""
        layer = stored.layers.get((None, name))
        weight = None if layer is None else self.tensors_of(layer).get("weight")
        return weight is not None and tuple(weight.shape[1:]) == shape[::-1] != shape
