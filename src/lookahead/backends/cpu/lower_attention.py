"""Lower the attention of one layer: its queries, keys and values at their positions, scores, and weighted sums.

See `lower` for the inputs, and for why attention is lowered to exponentials and products with [V | 1].
"""

from __future__ import annotations

import numpy as np

from lookahead.backends.cpu.groups import Group
from lookahead.backends.cpu.lower_parts import norm
from lookahead.backends.cpu.onnx_model import MICROSOFT, OnnxModel, array
from lookahead.backends.cpu.products import is_integer, linear, merged
from lookahead.models.matrix import Matrix
from lookahead.models.spec import Attention

HIDDEN = -1e30
"""What the mask adds to a masked score."""
LOWEST, NOTHING = -80.0, 1e-34
"""The lowest argument of an exponential, and the threshold below which a result is set to 0. exp(LOWEST) is below it,
so masked cells add exact zeros. A lower argument would take 8 times as long: denormal numbers are slow."""


def attention(made: OnnxModel, spec: Attention, group: Group, number: int, normed: str, scale: float) -> str:
    """Attention of one layer, times `scale`. Writes the rows' K/V, then reads all of them: [R, hidden] -> [R, hidden].

    A layer without its own K/V reads those that the earlier layer `kv_layer` has written.
    """
    # 1. q, k and v; k and v go to their cells.
    vectors = _vectors(made, spec, group, number, normed)
    source = number if spec.kv_layer is None else spec.kv_layer
    keys, values = f"keys_{source}_out", f"values_{source}_out"
    q = made.add("Gather", vectors, group.input("query"), axis=1)
    if spec.kv_layer is None:
        k, v = (made.add("Gather", vectors, group.input(which), axis=1) for which in ("key", "value"))
        v = made.add("Pad", v, made.constant([0, 0, 0, 0, 0, 0, 0, 1]), made.constant(1, np.float32))
        made.add_named("ScatterND", [f"keys_{number}", group.input("cells"), k], [keys])
        made.add_named("ScatterND", [f"values_{number}", group.input("cells"), v], [values])
    if spec.query_scale is not None:
        q = made.add("Mul", q, group.input("query_scale"))
    # 2. Scores [1, L, B, Hkv, G P, BLOCK], and their exponentials. The highest of each block comes first: a maximum
    #    over two axes at once takes several times as long.
    scores = _scores(made, spec, q, keys)
    scores = made.add("Add", scores, group.input("mask"))
    highest = made.add("ReduceMax", scores, made.constant([5]), keepdims=1)
    highest = made.add("ReduceMax", highest, made.constant([2]), keepdims=1)
    powers = made.add("Exp", made.add("Max", made.add("Sub", scores, highest), made.constant(LOWEST, np.float32)))
    powers = made.add("ThresholdedRelu", powers, alpha=NOTHING)
    # 3. Per block the values' sums and the exponentials' sum, then the sum over blocks.
    sums = made.add("Reshape", made.add("MatMul", powers, values), made.constant([0, 0, 0, -1]))
    sums = made.add("Reshape", made.add("MatMul", "ones", sums), made.constant([-1, spec.head_dim + 1]))
    # 4. Back to rows [R, H, D + 1], and the division.
    sums = made.add("Gather", sums, group.input("answers"))
    weighted, total = made.add("Split", sums, made.constant([spec.head_dim, 1]), outputs=2, axis=-1)
    if spec.sinks is not None:
        total = _add_sinks(made, spec, group, number, highest, total)
    result = made.add("Reshape", made.add("Div", weighted, total), made.constant([-1, spec.heads * spec.head_dim]))
    if spec.output_gate is not None:
        gate = made.add("Sigmoid", linear(made, f"{number}.output_gate", normed, spec.output_gate))
        result = made.add("Mul", result, gate)
    return linear(made, f"{number}.out", result, spec.out, scale)


def _scores(made: OnnxModel, spec: Attention, q: str, keys: str) -> str:
    """The scores before the mask."""
    factor = spec.scale if spec.softcap is None else spec.scale / spec.softcap
    scores: str = made.add("FusedMatMul", q, keys, domain=MICROSOFT, transB=1, alpha=factor)
    if spec.softcap is not None:
        scores = made.add("Mul", made.add("Tanh", scores), made.constant(spec.softcap, np.float32))
    return scores


def _add_sinks(made: OnnxModel, spec: Attention, group: Group, number: int, highest: str, total: str) -> str:
    """The sums of exponentials [R, H, 1] with those of the sinks.

    A sink need not take part in the maximum: where it is so much higher that its exponential is infinite, the weights
    of all tokens are below the smallest float, and 0 in either way.
    """
    assert spec.sinks is not None
    maxima = made.add("Gather", made.add("Reshape", highest, made.constant([-1])), group.input("maxima"))
    sinks = made.weight(f"{number}.sinks", array(spec.sinks.reshape(-1, 1).float()))
    result: str = made.add("Add", total, made.add("Exp", made.add("Sub", sinks, maxima)))
    return result


def _vectors(made: OnnxModel, spec: Attention, group: Group, number: int, normed: str) -> str:
    """The rows' queries, keys and values at their positions: [R, hidden] -> [1, R A, D]."""
    qkv, gathered = spec.qkv, None
    if spec.head_order is not None:
        qkv, gathered = _ordered(spec.qkv, spec.head_order, spec.head_dim)
    x = linear(made, f"{number}.qkv", normed, qkv)
    if spec.clip is not None:
        x = made.add("Clip", x, made.constant(-spec.clip, np.float32), made.constant(spec.clip, np.float32))
    if gathered is not None:
        x = made.add("Reshape", x, made.constant([0, -1, spec.head_dim]))
        x = made.add("Gather", x, made.constant(gathered), axis=1)
    norms_last = spec.norms_after_rope and spec.rope is not None
    if not norms_last:
        x = _head_norms(made, spec, number, x, [0, -1])
    flat = made.constant([1, -1, spec.head_dim])
    x = made.add("Reshape", x, flat)
    if spec.rope is not None:
        x = made.add(
            "RotaryEmbedding", x, *map(group.input, ("vectors", "cosine", "sine")), domain=MICROSOFT, num_heads=1,
            rotary_embedding_dim=spec.rope.dim, interleaved=int(spec.rope.interleaved),
        )  # fmt: skip
    if norms_last and (spec.q_norm or spec.k_norm or spec.v_norm):
        x = made.add("Reshape", _head_norms(made, spec, number, x, [-1, group.vectors]), flat)
    return str(x)


def _ordered(matrix: Matrix, order: tuple[int, ...], dim: int) -> tuple[Matrix, list[int] | None]:
    """A matrix whose heads are in this order, or the matrix itself and the heads to gather from its product.

    The matrix is copied. Where heads occur twice the product is gathered, so that their weights are read only once; and
    where activations are rounded for a product of floats, because the copy may be in another format.
    """
    rounds = any(format is not None and format.activations for format in matrix.formats) and not is_integer(matrix)
    if len(set(order)) < len(order) or rounds:
        return matrix, list(order)
    return merged(matrix, [head * dim + column for head in order for column in range(dim)]), None


def _head_norms(made: OnnxModel, spec: Attention, number: int, x: str, rows: list[int]) -> str:
    """The rows' vectors x, which are [R, A D], [R, A, D] or [1, R A, D], after their norms: one of the first two.

    `rows` is the beginning of the shape that makes it [R, A, D], or [R, A D] for norms of all heads at once.
    """
    if spec.q_norm is None and spec.k_norm is None and spec.v_norm is None:
        return x
    dim, heads = spec.head_dim, [spec.heads, spec.kv_heads, spec.kv_heads][: 3 if spec.kv_layer is None else 1]
    whole = spec.whole_norms
    x = made.add("Reshape", x, made.constant([-1, sum(heads) * dim] if whole else [*rows, dim]))
    parts = [x]
    if len(heads) > 1:
        parts = made.add("Split", x, made.constant([n * (dim if whole else 1) for n in heads]), outputs=3, axis=1)
    norms = [("q_norm", spec.q_norm), ("k_norm", spec.k_norm), ("v_norm", spec.v_norm)][: len(heads)]
    for index, (name, own) in enumerate(norms):
        if own is not None and whole and name == "v_norm":  # values have a norm per head, also here
            apart = made.add("Reshape", parts[index], made.constant([0, -1, dim]))
            apart = norm(made, f"{number}.{name}", own, apart, dim)
            parts[index] = made.add("Reshape", apart, made.constant([0, -1]))
        else:
            parts[index] = norm(made, f"{number}.{name}", own, parts[index], heads[index] * dim if whole else dim)
    return parts[0] if len(parts) == 1 else str(made.add("Concat", *parts, axis=1))
