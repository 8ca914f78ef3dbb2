"""An ONNX model built node by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import helper, numpy_helper

OPSET, IR_VERSION = 19, 10
MICROSOFT = "com.microsoft"

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
INT32, BOOL = onnx.TensorProto.INT32, onnx.TensorProto.BOOL

Array = npt.NDArray[np.float32]


def array(tensor: torch.Tensor) -> Array:
    """The tensor as an array, which shares its memory."""
    return tensor.detach().contiguous().numpy()


@dataclass
class OnnxModel:
    """An ONNX model that grows node by node. `arrays` are its large weights, which are not part of the file."""

    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    _constants: dict[Any, str] = field(default_factory=dict)
    _shared: dict[str, str] = field(default_factory=dict)
    _values: int = 0

    def add(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Add a node. Returns the name of its output, or of its outputs."""
        names = [f"value_{self._values + i}" for i in range(outputs)]
        self._values += outputs
        self.add_named(kind, inputs, names, domain, **attributes)
        return names[0] if outputs == 1 else names

    def add_named(self, kind: str, inputs: Any, names: list[str], domain: str = "", **attributes: Any) -> None:
        """Add a node whose outputs have these names."""
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))

    def rename_last(self, name: str) -> None:
        """Give the output of the last node this name."""
        self.nodes[-1].output[0] = name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A small constant, stored in the file."""
        array = np.asarray(value, dtype=dtype)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def once(self, name: str, make: Callable[[], str]) -> str:
        """The value of this name, created by `make` on first use."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def branch(self, name: str, make: Callable[[], str]) -> Any:
        """A graph for a node that has branches: `make` adds its nodes, which may read all values so far, and returns
        the name of its float output. What it makes `once` is its own."""
        outer = self.nodes, self._shared
        self.nodes, self._shared = [], {}
        output = make()
        graph = helper.make_graph(self.nodes, name, [], [helper.make_tensor_value_info(output, FLOAT, None)])
        self.nodes, self._shared = outer
        return graph

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> str:
        """A weight that stays in the caller's memory; the session gets it beside the file."""
        if name not in self.arrays:
            tensor = onnx.TensorProto(
                name=name,
                data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
                dims=array.shape,
                data_location=onnx.TensorProto.EXTERNAL,
            )
            tensor.external_data.add(key="location", value="memory")
            self.initializers.append(tensor)
            self.arrays[name] = array
        return name

    def file(self, inputs: list[Any], outputs: list[Any]) -> bytes:
        """The serialized model."""
        graph = helper.make_graph(self.nodes, "step", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        file: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
        return file
