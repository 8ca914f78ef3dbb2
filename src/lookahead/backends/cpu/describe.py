"""The model's step as an ONNX model: rows of tokens in, hidden states of the needed ones out, K/V written in place.

Inputs (R rows; L lanes of at most P rows each; B blocks; N needed rows; G query heads share a K/V head):

    tokens [R]            the rows' tokens
    rows [1, R]           0 to R - 1, the lines of the rotary tables
    cosine, sine [R, D/2] the rotary tables at the rows' positions
    cells [R Hkv, 4]      lane, block, K/V head and cell that a row's key and value are written to
    padded [L, P]         the row at each place of a lane; any row, where a lane has fewer
    unpadded [R]          where a row stands among the L P places
    mask_w [L, B, 1, G P, BLOCK]  0 where a row sees a cell, HIDDEN elsewhere; one for each sliding window w
    ones [2, B]           ones, by which blocks are added up
    needed [N]            the rows that a head computes logits of
    keys_i, values_i      layer i's K/V: [L, B, Hkv, BLOCK, D] and [L, B, Hkv, BLOCK, D + 1]

Outputs: hidden [N, H], the needed rows' states behind the last norm, from which a head computes logits (see `head` and
`screen`); and each layer's K/V, which must be bound to the memory of the input: then only the new rows are written.

A row's numbers must not depend on the other rows of its step, bit for bit. Most operations treat rows alone anyway.
Softmax's own sum is the exception (it adds in lanes of a vector, so a cell's place matters), and so is a product with
one row, for which there is another kernel. Hence attention is exp, and a product with [V | 1] per block (see `cells`);
the blocks are added up by a product with two rows of ones. See `invariance` for the check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lookahead.backends.cpu.cells import BLOCK
from lookahead.backends.cpu.weights import Layer, Linear, Weights

HIDDEN = -1e30
"""What the mask adds to a score that does not count. Its exponential is exactly 0."""
OPSET, IR_VERSION = 18, 10
MICROSOFT = "com.microsoft"

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


@dataclass
class Description:
    """An ONNX model that grows node by node. `arrays` are its large weights, which are not part of the file."""

    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    _constants: dict[Any, str] = field(default_factory=dict)
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

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A small constant, kept in the file."""
        array = np.asarray(value, dtype=dtype)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

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


class Products:
    """How a linear layer is computed: here as it is, in fp32."""

    def linear(self, made: Description, name: str, x: str, linear: Linear) -> str:
        """Rows [R, in] -> [R, out]."""
        bias = [] if linear.bias is None else [made.weight(f"{name}.bias", linear.bias)]
        result: str = made.add("Gemm", x, made.weight(name, linear.matrix), *bias, transB=1)
        return result


def describe(weights: Weights, products: Products) -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """The ONNX file of a step, and the arrays of the weights that it names."""
    made = Description()
    embedding = made.weight("embedding", weights.embedding)
    x = made.add("Gather", embedding, "tokens")
    added: str | None = None  # what the block before adds to x; the norm that follows adds it
    for number, layer in enumerate(weights.layers):
        normed, x = _add_norm(made, weights, x, added, made.weight(f"{number}.before", layer.before))
        attended = _attention(made, weights, products, layer, number, normed)
        normed, x = _add_norm(made, weights, x, attended, made.weight(f"{number}.after", layer.after))
        gate = products.linear(made, f"{number}.gate", normed, layer.gate)
        up = products.linear(made, f"{number}.up", normed, layer.up)
        # QuickGelu with alpha 1 is SiLU.
        inner = made.add("Mul", made.add("QuickGelu", gate, domain=MICROSOFT, alpha=1.0), up)
        added = products.linear(made, f"{number}.down", inner, layer.down)
    x, last = made.add("Gather", x, "needed"), made.add("Gather", added or x, "needed")
    normed, _ = _add_norm(made, weights, x, last, made.weight("norm", weights.norm))
    made.add_named("Identity", [normed], ["hidden"])
    return _step_file(made, weights), made.arrays


def _add_norm(made: Description, weights: Weights, x: str, added: str | None, gain: str) -> tuple[str, str]:
    """RMSNorm of x + added. Returns it and the sum."""
    if added is None:
        normed = made.add("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=weights.eps, stash_type=1)
        return normed, x
    normed, _, _, total = made.add(
        "SkipSimplifiedLayerNormalization", x, added, gain, outputs=4, domain=MICROSOFT, epsilon=weights.eps
    )
    return normed, total


def _rotated(
    made: Description, weights: Weights, x: str, heads: int, gain: np.ndarray[Any, Any] | None, name: str
) -> str:
    """q or k [R, heads D] with Qwen3's norm, if there is one, at its rows' positions: [1, R, heads D]."""
    if gain is not None:
        split = made.add("Reshape", x, made.constant([-1, heads, weights.dim]))
        x = made.add(
            "SimplifiedLayerNormalization", split, made.weight(name, gain), axis=-1, epsilon=weights.eps, stash_type=1
        )
    x = made.add("Reshape", x, made.constant([1, -1, heads * weights.dim]))
    turned: str = made.add(
        "RotaryEmbedding", x, "rows", "cosine", "sine", domain=MICROSOFT, num_heads=heads,
        rotary_embedding_dim=weights.dim, interleaved=0,
    )  # fmt: skip
    return turned


def _attention(made: Description, weights: Weights, products: Products, layer: Layer, number: int, normed: str) -> str:
    """Attention of one layer. Writes the rows' K/V, then reads all of them: [R, hidden] -> [R, hidden]."""
    heads, kv_heads, dim = weights.heads, weights.kv_heads, weights.dim
    group = heads // kv_heads
    # 1. q, k and v; k and v go to their cells.
    q = products.linear(made, f"{number}.q", normed, layer.q)
    k = products.linear(made, f"{number}.k", normed, layer.k)
    v = products.linear(made, f"{number}.v", normed, layer.v)
    q = _rotated(made, weights, q, heads, layer.q_norm, f"{number}.q_norm")
    k = _rotated(made, weights, k, kv_heads, layer.k_norm, f"{number}.k_norm")
    k = made.add("Reshape", k, made.constant([-1, dim]))
    v = made.add("Reshape", v, made.constant([-1, dim]))
    v = made.add("Pad", v, made.constant([0, 0, 0, 1]), made.constant(1, np.float32))
    keys, values = f"keys_{number}_out", f"values_{number}_out"
    made.add_named("ScatterND", [f"keys_{number}", "cells", k], [keys])
    made.add_named("ScatterND", [f"values_{number}", "cells", v], [values])
    # 2. Scores [L, B, Hkv, G P, BLOCK], and their exponentials.
    q = made.add("Gather", made.add("Reshape", q, made.constant([-1, heads * dim])), "padded")
    q = made.add("Reshape", q, made.constant([0, 0, kv_heads, group, dim]))
    q = made.add("Transpose", q, perm=[0, 2, 3, 1, 4])
    q = made.add("Reshape", q, made.constant([0, 1, kv_heads, -1, dim]))
    scores = made.add("FusedMatMul", q, keys, domain=MICROSOFT, transB=1, alpha=weights.scale)
    scores = made.add("Add", scores, f"mask_{layer.window}")
    highest = made.add("ReduceMax", scores, made.constant([1, 4]), keepdims=1)
    powers = made.add("Exp", made.add("Sub", scores, highest))
    # 3. Per block the values' sums and the exponentials' sum, then the sum over blocks, and the division.
    sums = made.add("Reshape", made.add("MatMul", powers, values), made.constant([0, 0, -1]))
    sums = made.add("Gather", made.add("MatMul", "ones", sums), made.constant(0), axis=1)
    sums = made.add("Reshape", sums, made.constant([0, -1, dim + 1]))
    weighted, total = made.add("Split", sums, made.constant([dim, 1]), outputs=2, axis=-1)
    result = made.add("Reshape", made.add("Div", weighted, total), made.constant([0, heads, -1, dim]))
    # 4. Back to rows [R, H D].
    result = made.add("Transpose", result, perm=[0, 2, 1, 3])
    result = made.add("Reshape", result, made.constant([-1, heads * dim]))
    return products.linear(made, f"{number}.out", made.add("Gather", result, "unpadded"), layer.out)


def _step_file(made: Description, weights: Weights) -> bytes:
    """The step's file, with its inputs and outputs."""
    half, group = weights.dim // 2, weights.heads // weights.kv_heads
    value = helper.make_tensor_value_info
    inputs = [
        value("tokens", INT64, ["R"]),
        value("rows", INT64, [1, "R"]),
        value("cosine", FLOAT, ["R", half]),
        value("sine", FLOAT, ["R", half]),
        value("cells", INT64, ["W", 4]),
        value("padded", INT64, ["L", "P"]),
        value("unpadded", INT64, ["R"]),
        value("ones", FLOAT, [2, "B"]),
        value("needed", INT64, ["N"]),
        *(value(f"mask_{w}", FLOAT, ["L", "B", 1, f"{group}P", BLOCK]) for w in weights.windows),
    ]
    outputs = [value("hidden", FLOAT, None)]
    for number in range(len(weights.layers)):
        for name, width in ((f"keys_{number}", weights.dim), (f"values_{number}", weights.dim + 1)):
            shape: list[str | int | None] = ["L", "B", weights.kv_heads, BLOCK, width]
            inputs.append(value(name, FLOAT, shape))
            outputs.append(value(f"{name}_out", FLOAT, shape))
    return onnx_file(made, inputs, outputs)


def onnx_file(made: Description, inputs: list[Any], outputs: list[Any]) -> bytes:
    """The serialized model."""
    graph = helper.make_graph(made.nodes, "step", inputs, outputs, made.initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    file: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
    return file
