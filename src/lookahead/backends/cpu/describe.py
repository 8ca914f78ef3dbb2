"""The model's step as an ONNX model: rows of tokens in, hidden states of the needed ones out, K/V written in place.

Inputs (R rows; L lanes of at most P rows each; B blocks; N needed rows; G query heads share a K/V head). A row has
A = H + 2 Hkv vectors of width D: its queries, its keys and its values.

    tokens [R]            the rows' tokens
    vectors [1, R A]      0 to R A - 1, the lines of the rotary tables
    cosine, sine [R A, D/2]  the rotary tables at the vectors' positions; 1 and 0 for values, which are not turned
    query [L, 1, Hkv, G P]   the vector at each place of a lane; any vector, where a lane has fewer rows
    key, value [R, Hkv]   which vectors are keys, and which are values
    cells [1, R, Hkv, 4]  lane, block, K/V head and cell that a key and a value are written to
    answers [R, H]        where the result of a row's head stands among the L 2 Hkv G P ones
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

A node takes some microseconds, whatever it computes, and there are dozens in each layer. So q, k and v are one product
and are turned at once, and inputs say where vectors come from, instead of nodes that reshape and transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lookahead.backends.cpu.cells import BLOCK
from lookahead.backends.cpu.weights import Layer, Linear, Weights, joined

HIDDEN = -1e30
"""What the mask adds to a score that does not count."""
LOWEST, NOTHING = -80.0, 1e-34
"""The lowest argument of an exponential, and how small a result counts as 0. exp(LOWEST) does, so masked cells add
exact zeros. A lower argument would take 8 times as long: processors are slow at numbers so near to 0."""
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
        """A small constant, kept in the file."""
        array = np.asarray(value, dtype=dtype)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def once(self, name: str, make: Callable[[], str]) -> str:
        """The value of this name, which is made when it is asked for the first time."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

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
        both = products.linear(made, f"{number}.gate_up", normed, joined(layer.gate, layer.up))
        gate, up = made.add("Split", both, outputs=2, axis=1, num_outputs=2)
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
        return _norm(made, weights, x, gain), x
    normed, _, _, total = made.add(
        "SkipSimplifiedLayerNormalization", x, added, gain, outputs=4, domain=MICROSOFT, epsilon=weights.eps
    )
    return normed, total


def _norm(made: Description, weights: Weights, x: str, gain: str) -> str:
    """RMSNorm along the last axis."""
    normed: str = made.add("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=weights.eps, stash_type=1)
    return normed


def _vectors(made: Description, weights: Weights, products: Products, layer: Layer, number: int, normed: str) -> str:
    """The rows' queries, keys and values at their positions: [R, hidden] -> [1, R A, D]."""
    heads, kv_heads, dim = weights.heads, weights.kv_heads, weights.dim
    x = products.linear(made, f"{number}.qkv", normed, joined(layer.q, layer.k, layer.v))
    if layer.q_norm is not None and layer.k_norm is not None:
        x = made.add("Reshape", x, made.constant([0, -1, dim]))
        q, k, v = made.add("Split", x, made.constant([heads, kv_heads, kv_heads]), outputs=3, axis=1)
        q = _norm(made, weights, q, made.weight(f"{number}.q_norm", layer.q_norm))
        k = _norm(made, weights, k, made.weight(f"{number}.k_norm", layer.k_norm))
        x = made.add("Concat", q, k, v, axis=1)
    x = made.add("Reshape", x, made.constant([1, -1, dim]))
    turned: str = made.add(
        "RotaryEmbedding", x, "vectors", "cosine", "sine", domain=MICROSOFT, num_heads=1,
        rotary_embedding_dim=dim, interleaved=0,
    )  # fmt: skip
    return turned


def _attention(made: Description, weights: Weights, products: Products, layer: Layer, number: int, normed: str) -> str:
    """Attention of one layer. Writes the rows' K/V, then reads all of them: [R, hidden] -> [R, hidden]."""
    heads, dim = weights.heads, weights.dim
    # 1. q, k and v; k and v go to their cells.
    vectors = _vectors(made, weights, products, layer, number, normed)
    q, k, v = (made.add("Gather", vectors, which, axis=1) for which in ("query", "key", "value"))
    v = made.add("Pad", v, made.constant([0, 0, 0, 0, 0, 0, 0, 1]), made.constant(1, np.float32))
    keys, values = f"keys_{number}_out", f"values_{number}_out"
    made.add_named("ScatterND", [f"keys_{number}", "cells", k], [keys])
    made.add_named("ScatterND", [f"values_{number}", "cells", v], [values])
    # 2. Scores [1, L, B, Hkv, G P, BLOCK], and their exponentials. The highest of each block comes first: a maximum
    #    over two axes at once takes several times as long.
    scores = made.add("FusedMatMul", q, keys, domain=MICROSOFT, transB=1, alpha=weights.scale)
    scores = made.add("Add", scores, f"mask_{layer.window}")
    highest = made.add("ReduceMax", scores, made.constant([5]), keepdims=1)
    highest = made.add("ReduceMax", highest, made.constant([2]), keepdims=1)
    powers = made.add("Exp", made.add("Max", made.add("Sub", scores, highest), made.constant(LOWEST, np.float32)))
    powers = made.add("ThresholdedRelu", powers, alpha=NOTHING)
    # 3. Per block the values' sums and the exponentials' sum, then the sum over blocks.
    sums = made.add("Reshape", made.add("MatMul", powers, values), made.constant([0, 0, 0, -1]))
    sums = made.add("Reshape", made.add("MatMul", "ones", sums), made.constant([-1, dim + 1]))
    # 4. Back to rows [R, H, D + 1], and the division.
    sums = made.add("Gather", sums, "answers")
    weighted, total = made.add("Split", sums, made.constant([dim, 1]), outputs=2, axis=-1)
    result = made.add("Reshape", made.add("Div", weighted, total), made.constant([-1, heads * dim]))
    return products.linear(made, f"{number}.out", result, layer.out)


def _step_file(made: Description, weights: Weights) -> bytes:
    """The step's file, with its inputs and outputs."""
    half, group = weights.dim // 2, weights.heads // weights.kv_heads
    value = helper.make_tensor_value_info
    inputs = [
        value("tokens", INT64, ["R"]),
        value("vectors", INT64, [1, "V"]),
        value("cosine", FLOAT, ["V", half]),
        value("sine", FLOAT, ["V", half]),
        value("query", INT64, ["L", 1, weights.kv_heads, f"{group}P"]),
        value("key", INT64, ["R", weights.kv_heads]),
        value("value", INT64, ["R", weights.kv_heads]),
        value("cells", INT64, [1, "R", weights.kv_heads, 4]),
        value("answers", INT64, ["R", weights.heads]),
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
