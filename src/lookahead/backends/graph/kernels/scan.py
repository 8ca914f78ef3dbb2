"""The recurrence of gated delta nets and of Mamba-2: states are updated along walks, one token after the other.

A state S [key, value] of a head is kept in fp32. A token with vectors k and v, a decay and a factor beta updates it:

    S = decay S;  S = S + k (beta (v - k S))^T  (a gated delta net)  or  S = S + k (beta v)^T  (Mamba-2);  y = q S

Mamba-2 has its B as k, its C as q, and its time step as beta.

Sums are rounded, so the order of adding decides the bits. Prompts, single tokens, trees and replays must all have the
same ones. Therefore they are all walks of one kernel, with one loop, in which a program owns some columns of a state
and updates them in registers. No mul and add are fused to one rounding, which the compiler would do in some contexts
only. A program for each leaf of a tree starts from the stored state, and updates what it shares with other leaves
again: with the same bits, and without storing a state for each node.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.records import load_walk
from lookahead.backends.graph.kernels.state_shapes import ScanShape

BLOCK_VALUES = 16
"""Columns of a state that a program updates. One warp holds a block of 128 x 16 in 64 registers, and its sums need no
barrier. Not yet measured against other sizes."""
PROGRAMS = 4096
"""Programs of a launch, over all layers, heads and blocks: 31 warps per multiprocessor of an H200. They take further
walks in turn: most launches have few walks, and a program without one takes its time, too. Not yet measured."""


@triton.jit
def _updated(state, k, v, decay, beta, DELTA: tl.constexpr):
    """The state [key, value] after a token."""
    state = state * decay
    if DELTA:
        v = v - tl.sum(state * k[:, None], 0)
    return state + k[:, None] * (v * beta)[None, :]


@triton.jit(
    do_not_specialize=["state_layer", "row_layer", "gate_layer", "row_size", "stores"],
    do_not_specialize_on_alignment=["walks", "count", "order"],
)
def _scan(
    states, mixed, gates, skip, out, walks, count, order, state_layer, row_layer, gate_layer, row_size, stores,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, DELTA: tl.constexpr, GATES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: (walks at a time, heads x blocks of columns, layers)."""
    parts: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(1) // parts
    layer = tl.program_id(2).to(tl.int64)
    states += layer * state_layer
    mixed += layer * row_layer
    gates += layer * gate_layer
    key_head = head // (HEADS // KEY_HEADS)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(1) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < KEY, value < VALUE
    inside = in_key[:, None] & in_value[None, :]
    at = key[:, None] * VALUE + value[None, :]
    for walk in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        slot, fresh, begin, tokens, write_from = load_walk(walks, walk)
        own = states + (slot.to(tl.int64) * HEADS + head) * (KEY * VALUE)
        there = key < tl.where(fresh == 0, KEY, 0)
        state = tl.load(own + at, mask=there[:, None] & in_value[None, :], other=0.0)
        for i in range(0, tokens):
            row = tl.load(order + begin + i).to(tl.int64)
            columns = mixed + row * row_size
            gate = gates + row * GATES
            k = tl.load(columns + K_AT + key_head * KEY + key, mask=in_key, other=0.0).to(tl.float32)
            v = tl.load(columns + V_AT + head * VALUE + value, mask=in_value, other=0.0).to(tl.float32)
            if DELTA:
                k = k * tl.load(gate + 2 * HEADS + KEY_HEADS + key_head)
            state = _updated(state, k, v, tl.load(gate + head), tl.load(gate + HEADS + head), DELTA)
            if i >= write_from:
                q = tl.load(columns + Q_AT + key_head * KEY + key, mask=in_key, other=0.0).to(tl.float32)
                if DELTA:
                    q = q * tl.load(gate + 2 * HEADS + key_head)
                y = tl.sum(state * q[:, None], 0)
                if not DELTA:
                    y = y + v * tl.load(skip + head).to(tl.float32)
                tl.store(out + row * (HEADS * VALUE) + head * VALUE + value, y, mask=in_value)
        if stores != 0:
            tl.store(own + at, state, mask=inside)


def scan(
    states: torch.Tensor,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    skip: torch.Tensor | None,
    out: torch.Tensor,
    walks: torch.Tensor,
    count: torch.Tensor,
    order: torch.Tensor,
    shape: ScanShape,
    *,
    stores: bool,
) -> None:
    """Update states along walks, and write the outputs of the tokens that a walk owns.

    states [layers, slots, H, key, value] fp32, mixed [layers, rows, columns], gates [layers, rows, G] fp32 (see
    `ScanShape.gates`), skip [H]: times v it is added to y in Mamba-2; None in a gated delta net. out [rows, H x value],
    or, if no walk writes, any tensor of its type. walks [n, 5], count [1] and order [m] int32: see `StateRows`.
    `stores`: the last state of each walk is stored. No other walk of the launch may read it.
    """
    layers = len(states)
    block = min(BLOCK_VALUES, triton.next_power_of_2(shape.value))
    blocks = shape.heads * triton.cdiv(shape.value, block)
    _scan[(min(len(walks), max(1, PROGRAMS // (blocks * layers))), blocks, layers)](
        states, mixed, gates, skip, out, walks, count, order, states.stride(0), mixed.stride(0), gates.stride(0),
        mixed.shape[2], int(stores), HEADS=shape.heads, KEY_HEADS=shape.key_heads, KEY=shape.key, VALUE=shape.value,
        Q_AT=shape.q_at, K_AT=shape.k_at, V_AT=shape.v_at, DELTA=shape.delta, GATES=shape.gates,
        BLOCK_K=triton.next_power_of_2(shape.key), BLOCK_V=block, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
