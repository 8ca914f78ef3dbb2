"""Lower a description to the ONNX model of a step: rows of tokens in, hidden states of the needed ones out, K/V written
in place.

Inputs (R rows; L sequences of at most P rows each; B blocks; N needed rows). Those below the line are per group of
layers (see `groups`, also for their full names): its H query heads have the width D, and G of them share one of Hkv K/V
heads. A row has A = H + 2 Hkv vectors of width D in such a layer: its queries, its keys and its values. In a layer that
reads the K/V of an earlier one it has A = H, and there is no `key`, `value` and `cells`.

    tokens [R]            the rows' tokens
    positions [R]         the rows' positions, only for a model with learned ones
    ones [2, B]           ones, whose product sums blocks
    needed [N]            the rows that a head computes logits of
    keys_i, values_i      layer i's K/V: [L, B, Hkv, BLOCK, D] and [L, B, Hkv, BLOCK, D + 1], if it has its own
    -----
    vectors [1, R A]      0 to R A - 1, the rows of the rotary inputs
    cosine, sine [R A, dim / 2]  the rotary tables at the vectors' positions; 1 and 0 for values, which are not rotated
    query [L, 1, Hkv, G P]   the vector in each column of a sequence; any vector, where it has fewer rows
    key, value [R, Hkv]   which vectors are keys, and which are values
    cells [1, R, Hkv, 4]  sequence, block, K/V head and cell that a key and a value are written to
    answers [R, H]        index of a row's head among the L 2 Hkv G P results
    mask [L, B, 1, G P, BLOCK]  0 where a row sees a cell, HIDDEN elsewhere
    query_scale [L, 1, 1, G P, 1]  what the queries are multiplied by, if that depends on their positions
    maxima [R, H, 1]      index of a row's head among the L Hkv G P highest scores, for a layer with sinks

Outputs: hidden [N, hidden], the needed rows' states after the last norm, times `state_scale`, from which a head
computes logits (see `head` and `screen`); and each layer's K/V, which must be bound to the memory of the input: then
only new rows are written.

A row's numbers must not depend on the other rows of its step, bit for bit. Most operations are row-wise anyway.
Softmax's own sum is the exception (it adds in SIMD lanes, so a cell's index matters), and so is a product with one
row, for which there is another kernel. Hence attention is exp, and a product with [V | 1] per block (see `cells`);
a product with two rows of ones sums the blocks. See `invariance` for the check.

A node takes some microseconds, whatever it computes, and there are dozens in each layer. So q, k and v are one product
and are rotated at once, index inputs replace nodes that reshape and transpose, and factors are folded into the nodes
that are there anyway: those of what a block adds into its last product or norm, that of logits into the last norm, and
an order of heads into the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx import helper

from lookahead.backends.cpu.cells import BLOCK
from lookahead.backends.cpu.groups import Group, layer_groups
from lookahead.backends.cpu.lower_attention import attention
from lookahead.backends.cpu.lower_experts import check_experts, mixture
from lookahead.backends.cpu.lower_parts import add_norm, feed_forward, norm
from lookahead.backends.cpu.onnx_model import FLOAT, INT64, OnnxModel, array
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import MoE
from lookahead.models.spec import Block, Decoder, check_plain, expert_matrices_in


def check_lowers(decoder: Decoder) -> None:
    """Raise UnsupportedModelError, with the reason, for a description that the CPU backend does not run."""

    def refuse(reason: str) -> None:
        raise UnsupportedModelError(f"the cpu backend does not run this model: {reason}")

    weight = decoder.embedding
    try:
        check_plain(decoder)
        for matrix in expert_matrices_in(decoder):
            check_experts(matrix)
    except UnsupportedModelError as error:
        refuse(str(error))
    if not decoder.causal_prompt:
        refuse("the tokens of its prompts see each other")
    if weight.device.type != "cpu":
        refuse(f"it is on {weight.device.type}")
    if weight.dtype != torch.float32:
        refuse(f"its weights are {str(weight.dtype).removeprefix('torch.')}; load it with dtype='float32'")


def state_scale(decoder: Decoder) -> float:
    """What the last norm multiplies hidden states by. So the head's product is scaled already: it gives the logits, or
    with a soft cap what the tanh is computed of."""
    return decoder.logit_scale / (decoder.logit_softcap or 1.0)


def lower(decoder: Decoder) -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """The ONNX file of a step, and the arrays of the weights that it names."""
    made, groups = OnnxModel(), layer_groups(decoder)
    tokens = "tokens"
    for token, other in decoder.aliases:
        tokens = made.add("Where", made.add("Equal", tokens, made.constant(token)), made.constant(other), tokens)
    x: str = made.add("Gather", made.weight("embedding", array(decoder.embedding)), tokens)
    if decoder.embedding_scale != 1.0:
        x = made.add("Mul", x, made.constant(decoder.embedding_scale, np.float32))
    added: str | None = None  # what the next norm adds to x: the previous block's output, or learned positions
    if decoder.position_embedding is not None:
        learned = made.weight("position_embedding", array(decoder.position_embedding))
        added = made.add("Gather", learned, "positions")
    for number, (block, group) in enumerate(zip(decoder.blocks, groups, strict=True)):
        x, added = _block(made, block, group, number, x, added)
    x = made.add("Gather", x, "needed")
    added = None if added is None else made.add("Gather", added, "needed")
    normed, _ = add_norm(made, "norm", decoder.norm, x, added, decoder.hidden, state_scale(decoder))
    made.add_named("Identity", [normed], ["hidden"])
    return _step_file(made, groups, decoder.position_embedding is not None), made.arrays


def _block(
    made: OnnxModel, block: Block, group: Group, number: int, x: str, added: str | None
) -> tuple[str, str | None]:
    """One block, whose input is x + added [R, hidden]. Returns its output in the same way."""
    # 1. Attention. What a half adds is scaled by its last norm, or else by its last product.
    own, after_own = block.plain()
    width = own.out.shape[0]
    normed, x = add_norm(made, f"{number}.mixer_norm", block.mixer_norm, x, added, width)
    after, scale = block.mixer_out_norm, block.residual_scale
    in_product = scale if after is None else 1.0
    attended = attention(made, own, group, number, normed, in_product)
    attended = norm(made, f"{number}.mixer_out_norm", after, attended, width, scale)
    # 2. The feed-forward; in a parallel block it reads the same x.
    if not block.parallel:
        normed, x = add_norm(made, f"{number}.feed_forward_norm", block.feed_forward_norm, x, attended, width)
    elif block.feed_forward_norm is not block.mixer_norm:
        normed = norm(made, f"{number}.feed_forward_norm", block.feed_forward_norm, x, width)
    after = block.feed_forward_out_norm
    in_product = scale if after is None else 1.0
    if isinstance(after_own, MoE):
        fed = mixture(made, after_own, number, normed, in_product)
    else:
        fed = feed_forward(made, after_own, str(number), normed, in_product)
    fed = norm(made, f"{number}.feed_forward_out_norm", after, fed, width, scale)
    # 3. The sum, which is left to the next norm if nothing else needs it.
    if block.parallel:
        fed = made.add("Add", attended, fed)
    if block.output_scale is None:
        return x, fed
    return made.add("Mul", made.add("Add", x, fed), made.constant(float(block.output_scale), np.float32)), None


def _step_file(made: OnnxModel, groups: list[Group], learned_positions: bool) -> bytes:
    """The step's file, with its inputs and outputs. `groups` are the layers' own."""
    value = helper.make_tensor_value_info
    inputs = {
        "tokens": value("tokens", INT64, ["R"]),
        "ones": value("ones", FLOAT, [2, "B"]),
        "needed": value("needed", INT64, ["N"]),
    }
    if learned_positions:
        inputs["positions"] = value("positions", INT64, ["R"])
    for group in groups:
        for kind, (dtype, shape) in _group_inputs(group).items():
            inputs[group.input(kind)] = value(group.input(kind), dtype, shape)
    outputs = [value("hidden", FLOAT, None)]
    for number, group in enumerate(groups):
        if not group.own_kv:
            continue
        for name, width in ((f"keys_{number}", group.head_dim), (f"values_{number}", group.head_dim + 1)):
            shape = ["L", "B", group.kv_heads, BLOCK, width]
            inputs[name] = value(name, FLOAT, shape)
            outputs.append(value(f"{name}_out", FLOAT, shape))
    return made.file(list(inputs.values()), outputs)


def _group_inputs(group: Group) -> dict[str, tuple[int, list[Any]]]:
    """Kind of input -> its type and shape, for all inputs of a group."""
    columns = f"{group.sharing}P"
    kinds: dict[str, tuple[int, list[Any]]] = {"query": (INT64, ["L", 1, group.kv_heads, columns])}
    if group.own_kv:
        kinds |= {
            "key": (INT64, ["R", group.kv_heads]),
            "value": (INT64, ["R", group.kv_heads]),
            "cells": (INT64, [1, "R", group.kv_heads, 4]),
        }
    kinds |= {"answers": (INT64, ["R", group.heads]), "mask": (FLOAT, ["L", "B", 1, columns, BLOCK])}
    if group.rope is not None:
        vectors, half = f"{group.vectors}R", group.rotary_dim // 2
        kinds |= {
            "vectors": (INT64, [1, vectors]),
            "cosine": (FLOAT, [vectors, half]),
            "sine": (FLOAT, [vectors, half]),
        }
    if group.query_scale is not None:
        kinds["query_scale"] = (FLOAT, ["L", 1, 1, columns, 1])
    if group.sinks:
        kinds["maxima"] = (INT64, ["R", group.heads, 1])
    return kinds
