"""The quantised matrices of a checkpoint's files, by the names that they have there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from lookahead.loading.quantised.weights import Reader

STACKED = re.compile(r"(?P<name>(?:.*\.)?experts\.(?:gate_up|down)_proj)(?:_(?P<local>\w+))?")
"""The name of a tensor of all experts of a layer: it has no dot before its last part, as those of matrices have."""
STACKED_LOCAL = {None: "weight", "scale_inv": "weight_scale_inv"}
"""The last parts of stacked tensors that are called otherwise in a matrix of their own."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its file, and its name there."""

    file: str
    key: str


@dataclass
class StoredLayer:
    """A matrix in the files, or one of all experts: its name, and its tensors by the last parts of their names."""

    name: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)


def stored_layers(files: list[str], reader: Reader) -> list[StoredLayer]:
    """The layers in these files that are quantised, by the names of their tensors."""
    found: dict[str, StoredLayer] = {}
    narrow = set()
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"its weights are in {Path(file).name}; quantised ones are read from safetensors only")
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (it is no dict)
                name, local = split_key(key)
                found.setdefault(name, StoredLayer(name)).tensors[local] = StoredTensor(file, key)
                if opened.get_slice(key).get_dtype().startswith("F8_E"):
                    narrow.add(name)
    layers = {name: layer for name, layer in found.items() if reader.marks & layer.tensors.keys()}
    if unscaled := sorted(narrow - layers.keys()):
        raise ValueError(f"{unscaled[0]} has weights in FP8 without scales")
    return list(layers.values())


def split_key(key: str) -> tuple[str, str]:
    """(name of the layer, last part of the tensor's name) of a tensor's name in the files."""
    stacked = STACKED.fullmatch(key)
    if stacked is not None:
        return stacked["name"], STACKED_LOCAL.get(stacked["local"], stacked["local"])
    name, _, local = key.rpartition(".")
    return name, local
