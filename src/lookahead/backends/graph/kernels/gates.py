"""The numbers of each row that `scan` reads besides q, k and v: how a state fades, and how much is added to it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.convolve import load_column
from lookahead.backends.graph.kernels.records import (
    SEQUENCE_FIRST_ROW,
    SEQUENCE_LENGTH,
    SEQUENCE_SIZE,
    load_root,
)
from lookahead.backends.graph.kernels.state_rows import StateRows
from lookahead.backends.graph.kernels.state_shapes import Gating, ScanShape

EPS = tl.constexpr(1e-6)
"""Added to the squared length of q and k."""


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where exp(x) is small beside 1."""
    grown = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + grown
    lost = whole - 1.0
    exact = tl.log(whole) * (grown / tl.where(lost == 0, 1.0, lost))
    return tl.where(x > 20.0, x, tl.where(lost == 0, grown, exact))


@triton.jit
def _gate(
    projected, mixed, a_log, time_bias, column_bias, order, scales, gates, kept_gates, kept, sequence_of, width,
    mixed_width, beta_scale, query_scale, sequences, prompts, least, most,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, DELTA: tl.constexpr, GATES: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, BETA_AT: tl.constexpr, TIME_AT: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_KH: tl.constexpr, BLOCK_K: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequence_of + row)
    if sequence >= 0:
        own = projected + row * width
        place = tl.load(kept + row).to(tl.int64)
        target, copy = gates + row * GATES, kept_gates + place * GATES
        # 1. The decay and beta of each head.
        head = tl.arange(0, BLOCK_H)
        inside, is_kept = head < HEADS, head < tl.where(place >= 0, HEADS, 0)
        rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
        time = load_column(own, TIME_AT + head, column_bias, order, scales, inside).to(tl.float32)
        time = _softplus(time + tl.load(time_bias + head, mask=inside, other=0.0).to(tl.float32))
        if LIMITED:
            root = load_root(sequences, sequence)
            position = tl.load(sequences + sequence * SEQUENCE_SIZE + SEQUENCE_LENGTH) + row
            position -= tl.load(sequences + sequence * SEQUENCE_SIZE + SEQUENCE_FIRST_ROW)
            is_prompt = (row <= root) & (position < tl.load(prompts + sequence))  # draft tokens are none
            time = tl.where(is_prompt, tl.minimum(tl.maximum(time, least), most), time)
        decay = tl.exp(-rate * time)
        beta = time
        if DELTA:
            given = load_column(own, BETA_AT + head, column_bias, order, scales, inside)
            beta = (1 / (1 + tl.exp(-given.to(tl.float32)))).to(given.dtype).to(tl.float32) * beta_scale
        tl.store(target + head, decay, mask=inside)
        tl.store(target + HEADS + head, beta, mask=inside)
        tl.store(copy + head, decay, mask=is_kept)
        tl.store(copy + HEADS + head, beta, mask=is_kept)
        # 2. The lengths of q and k.
        if DELTA:
            key_head, key = tl.arange(0, BLOCK_KH), tl.arange(0, BLOCK_K)
            at = mixed + row * mixed_width + key_head[:, None] * KEY + key[None, :]
            there = (key_head < KEY_HEADS)[:, None] & (key < KEY)[None, :]
            q = tl.load(at + Q_AT, mask=there, other=0.0).to(tl.float32)
            k = tl.load(at + K_AT, mask=there, other=0.0).to(tl.float32)
            q_scale = tl.rsqrt(tl.sum(q * q, 1) + EPS) * query_scale
            k_scale = tl.rsqrt(tl.sum(k * k, 1) + EPS)
            scale = 2 * HEADS + key_head
            tl.store(target + scale, q_scale, mask=key_head < KEY_HEADS)
            tl.store(target + KEY_HEADS + scale, k_scale, mask=key_head < KEY_HEADS)
            is_kept = key_head < tl.where(place >= 0, KEY_HEADS, 0)
            tl.store(copy + scale, q_scale, mask=is_kept)
            tl.store(copy + KEY_HEADS + scale, k_scale, mask=is_kept)


def gate(
    projected: torch.Tensor,
    mixed: torch.Tensor,
    gating: Gating,
    shape: ScanShape,
    gates: torch.Tensor,
    kept_gates: torch.Tensor,
    rows: StateRows,
) -> None:
    """gates [R, G] fp32 of every row (see `ScanShape.gates`), and those of nodes also in kept_gates [ring, G].

    projected [R or more, width], mixed [R, columns] after the convolution.
    """
    _gate[(len(rows.sequence_of),)](
        projected, mixed, gating.a_log, gating.time_bias, *gating.columns.tensors, gates, kept_gates, rows.kept,
        rows.sequence_of, projected.shape[1], mixed.shape[1], gating.beta_scale, shape.key**-0.5,
        rows.sequences, rows.prompts, *gating.limits,
        HEADS=shape.heads, KEY_HEADS=shape.key_heads, KEY=shape.key, DELTA=shape.delta, GATES=shape.gates,
        Q_AT=shape.q_at, K_AT=shape.k_at, BETA_AT=gating.beta_at, TIME_AT=gating.time_at,
        BLOCK_H=triton.next_power_of_2(shape.heads), BLOCK_KH=triton.next_power_of_2(shape.key_heads),
        BLOCK_K=triton.next_power_of_2(shape.key), LIMITED=gating.limited, num_warps=4,
    )  # fmt: skip
