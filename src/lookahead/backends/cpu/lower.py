"""Lower a description to the ONNX model of a step: rows of tokens in, hidden states of the needed ones out, K/V written
in place.

Inputs (R rows; L sequences of at most P rows each; B blocks; N needed rows). Those below the line are per group of
layers (see `groups`, also for their full names): its H query heads have the width D, and G of them share one of Hkv K/V
heads. A row has A = H + 2 Hkv vectors of width D in such a layer: its queries, its keys and its values.

    tokens [R]            the rows' tokens
    ones [2, B]           ones, whose product sums blocks
    needed [N]            the rows that a head computes logits of
    keys_i, values_i      layer i's K/V: [L, B, Hkv, BLOCK, D] and [L, B, Hkv, BLOCK, D + 1]
    -----
    vectors [1, R A]      0 to R A - 1, the rows of the rotary inputs
    cosine, sine [R A, D/2]  the rotary tables at the vectors' positions; 1 and 0 for values, which are not rotated
    query [L, 1, Hkv, G P]   the vector in each column of a sequence; any vector, where it has fewer rows
    key, value [R, Hkv]   which vectors are keys, and which are values
    cells [1, R, Hkv, 4]  sequence, block, K/V head and cell that a key and a value are written to
    answers [R, H]        index of a row's head among the L 2 Hkv G P results
    mask [L, B, 1, G P, BLOCK]  0 where a row sees a cell, HIDDEN elsewhere

Outputs: hidden [N, hidden], the needed rows' states after the last norm, from which a head computes logits (see `head`
and `screen`); and each layer's K/V, which must be bound to the memory of the input: then only new rows are written.

A row's numbers must not depend on the other rows of its step, bit for bit. Most operations are row-wise anyway.
Softmax's own sum is the exception (it adds in SIMD lanes, so a cell's index matters), and so is a product with one
row, for which there is another kernel. Hence attention is exp, and a product with [V | 1] per block (see `cells`);
a product with two rows of ones sums the blocks. See `invariance` for the check.

A node takes some microseconds, whatever it computes, and there are dozens in each layer. So q, k and v are one product
and are rotated at once, and index inputs replace nodes that reshape and transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnx import helper

from lookahead.backends.cpu.cells import BLOCK
from lookahead.backends.cpu.groups import Group, layer_groups
from lookahead.backends.cpu.onnx_model import FLOAT, INT64, MICROSOFT, OnnxModel, Products, array
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.plain import check_plain
from lookahead.models.spec import Activation, Attention, Decoder, FeedForward, Norm

HIDDEN = -1e30
"""What the mask adds to a masked score."""
LOWEST, NOTHING = -80.0, 1e-34
"""The lowest argument of an exponential, and the threshold below which a result is set to 0. exp(LOWEST) is below it,
so masked cells add exact zeros. A lower argument would take 8 times as long: denormal numbers are slow."""


def _silu(made: OnnxModel, x: str) -> str:
    """QuickGelu with alpha 1 is SiLU."""
    result: str = made.add("QuickGelu", x, domain=MICROSOFT, alpha=1.0)
    return result


ACTIVATIONS: dict[Activation, Callable[[OnnxModel, str], str]] = {Activation.SILU: _silu}


def check_lowers(decoder: Decoder) -> None:
    """Raise UnsupportedModelError, with the reason, for a description that the CPU backend does not run."""

    def refuse(reason: str) -> None:
        raise UnsupportedModelError(f"the cpu backend does not run this model: {reason}")

    weight = decoder.embedding
    if weight.device.type != "cpu":
        refuse(f"it is on {weight.device.type}")
    if weight.dtype != torch.float32:
        refuse(f"its weights are {str(weight.dtype).removeprefix('torch.')}; load it with dtype='float32'")
    try:
        check_plain(decoder)
    except UnsupportedModelError as error:
        refuse(str(error))
    for block in decoder.blocks:
        rope, dim, activation = block.attention.rope, block.attention.head_dim, block.feed_forward.activation
        if rope is not None and rope.dim != dim:
            refuse(f"its rotary positions turn {rope.dim} of a head's {dim} columns")
        if activation not in ACTIVATIONS:
            refuse(f"its activation is {activation.value!r}")


def lower(decoder: Decoder, products: Products) -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """The ONNX file of a step, and the arrays of the weights that it names."""
    made, groups = OnnxModel(), layer_groups(decoder)
    x = made.add("Gather", made.weight("embedding", array(decoder.embedding)), "tokens")
    added: str | None = None  # the previous block's output, which the next norm adds to x
    for number, (block, group) in enumerate(zip(decoder.blocks, groups, strict=True)):
        normed, x = _add_norm(made, f"{number}.attention_norm", block.attention_norm, x, added)
        attended = _attention(made, products, block.attention, group, number, normed)
        normed, x = _add_norm(made, f"{number}.feed_forward_norm", block.feed_forward_norm, x, attended)
        added = _feed_forward(made, products, block.feed_forward, number, normed)
    x, last = made.add("Gather", x, "needed"), made.add("Gather", added or x, "needed")
    normed, _ = _add_norm(made, "norm", decoder.norm, x, last)
    made.add_named("Identity", [normed], ["hidden"])
    return _step_file(made, groups), made.arrays


def _add_norm(made: OnnxModel, name: str, norm: Norm | None, x: str, added: str | None) -> tuple[str, str]:
    """RMSNorm of x + added [R, hidden]. Returns it and the sum."""
    assert norm is not None
    if added is None:
        return _norm(made, name, norm, x), x
    assert norm.weight is not None
    normed, _, _, total = made.add(
        "SkipSimplifiedLayerNormalization", x, added, made.weight(name, array(norm.weight)), outputs=4,
        domain=MICROSOFT, epsilon=norm.eps,
    )  # fmt: skip
    return normed, total


def _norm(made: OnnxModel, name: str, norm: Norm | None, x: str) -> str:
    """RMSNorm along the last axis."""
    assert norm is not None
    assert norm.weight is not None
    gain = made.weight(name, array(norm.weight))
    normed: str = made.add("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=norm.eps, stash_type=1)
    return normed


def _feed_forward(made: OnnxModel, products: Products, spec: FeedForward, number: int, normed: str) -> str:
    """[R, hidden] -> [R, hidden]."""
    both = products.linear(made, f"{number}.gate_up", normed, spec.gate_up)
    gate, up = made.add("Split", both, outputs=2, axis=1, num_outputs=2)
    inner = made.add("Mul", ACTIVATIONS[spec.activation](made, gate), up)
    return products.linear(made, f"{number}.down", inner, spec.down)


def _vectors(made: OnnxModel, products: Products, spec: Attention, group: Group, number: int, normed: str) -> str:
    """The rows' queries, keys and values at their positions: [R, hidden] -> [1, R A, D]."""
    x = products.linear(made, f"{number}.qkv", normed, spec.qkv)
    if spec.q_norm is not None or spec.k_norm is not None:
        x = made.add("Reshape", x, made.constant([0, -1, spec.head_dim]))
        sizes = made.constant([spec.heads, spec.kv_heads, spec.kv_heads])
        q, k, v = made.add("Split", x, sizes, outputs=3, axis=1)
        q = q if spec.q_norm is None else _norm(made, f"{number}.q_norm", spec.q_norm, q)
        k = k if spec.k_norm is None else _norm(made, f"{number}.k_norm", spec.k_norm, k)
        x = made.add("Concat", q, k, v, axis=1)
    x = made.add("Reshape", x, made.constant([1, -1, spec.head_dim]))
    if spec.rope is not None:
        x = made.add(
            "RotaryEmbedding", x, *map(group.input, ("vectors", "cosine", "sine")), domain=MICROSOFT, num_heads=1,
            rotary_embedding_dim=spec.head_dim, interleaved=0,
        )  # fmt: skip
    return str(x)


def _attention(made: OnnxModel, products: Products, spec: Attention, group: Group, number: int, normed: str) -> str:
    """Attention of one layer. Writes the rows' K/V, then reads all of them: [R, hidden] -> [R, hidden]."""
    # 1. q, k and v; k and v go to their cells.
    vectors = _vectors(made, products, spec, group, number, normed)
    q, k, v = (made.add("Gather", vectors, group.input(which), axis=1) for which in ("query", "key", "value"))
    v = made.add("Pad", v, made.constant([0, 0, 0, 0, 0, 0, 0, 1]), made.constant(1, np.float32))
    keys, values = f"keys_{number}_out", f"values_{number}_out"
    made.add_named("ScatterND", [f"keys_{number}", group.input("cells"), k], [keys])
    made.add_named("ScatterND", [f"values_{number}", group.input("cells"), v], [values])
    # 2. Scores [1, L, B, Hkv, G P, BLOCK], and their exponentials. The highest of each block comes first: a maximum
    #    over two axes at once takes several times as long.
    scores = made.add("FusedMatMul", q, keys, domain=MICROSOFT, transB=1, alpha=spec.scale)
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
    result = made.add("Reshape", made.add("Div", weighted, total), made.constant([-1, spec.heads * spec.head_dim]))
    return products.linear(made, f"{number}.out", result, spec.out)


def _step_file(made: OnnxModel, groups: list[Group]) -> bytes:
    """The step's file, with its inputs and outputs. `groups` are the layers' own."""
    value = helper.make_tensor_value_info
    inputs = {
        "tokens": value("tokens", INT64, ["R"]),
        "ones": value("ones", FLOAT, [2, "B"]),
        "needed": value("needed", INT64, ["N"]),
    }
    for group in groups:
        for kind, (dtype, shape) in _group_inputs(group).items():
            inputs[group.input(kind)] = value(group.input(kind), dtype, shape)
    outputs = [value("hidden", FLOAT, None)]
    for number, group in enumerate(groups):
        for name, width in ((f"keys_{number}", group.head_dim), (f"values_{number}", group.head_dim + 1)):
            shape = ["L", "B", group.kv_heads, BLOCK, width]
            inputs[name] = value(name, FLOAT, shape)
            outputs.append(value(f"{name}_out", FLOAT, shape))
    return made.file(list(inputs.values()), outputs)


def _group_inputs(group: Group) -> dict[str, tuple[int, list[Any]]]:
    """Kind of input -> its type and shape, for all inputs of a group."""
    columns = f"{group.sharing}P"
    kinds: dict[str, tuple[int, list[Any]]] = {
        "query": (INT64, ["L", 1, group.kv_heads, columns]),
        "key": (INT64, ["R", group.kv_heads]),
        "value": (INT64, ["R", group.kv_heads]),
        "cells": (INT64, [1, "R", group.kv_heads, 4]),
        "answers": (INT64, ["R", group.heads]),
        "mask": (FLOAT, ["L", "B", 1, columns, BLOCK]),
    }
    if group.rope is not None:
        vectors, half = f"{group.vectors}R", group.head_dim // 2
        kinds |= {
            "vectors": (INT64, [1, vectors]),
            "cosine": (FLOAT, [vectors, half]),
            "sine": (FLOAT, [vectors, half]),
        }
    return kinds
