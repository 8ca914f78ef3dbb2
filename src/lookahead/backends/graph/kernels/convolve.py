"""Short convolutions over the tokens before each row: those of a prompt chunk, or a node's ancestors.

Inputs before the step's first row are stored: the last `taps` - 1 inputs of each slot. The inputs and results of nodes
are kept, too, because the next step needs those of accepted nodes. A row's result depends on its own inputs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels import state_rows
from lookahead.backends.graph.kernels.activations import _activated
from lookahead.backends.graph.kernels.records import SEQUENCE_SIZE, SEQUENCE_SLOT, load_walk
from lookahead.backends.graph.kernels.state_rows import StateRows
from lookahead.backends.graph.kernels.state_shapes import Channels

NO_INPUT = tl.constexpr(state_rows.NO_INPUT)
BLOCK_CHANNELS = 512


@triton.jit
def load_column(projected, column, bias, order, scales, mask):
    """Columns [n] of a row: see `state_shapes.Columns`."""
    index = tl.load(order + column, mask=mask, other=0) if order is not None else column
    x = tl.load(projected + index, mask=mask, other=0.0)
    if bias is not None:
        x = x + tl.load(bias + index, mask=mask, other=0.0)
    if scales is not None:
        x = (x.to(tl.float32) * tl.load(scales + column, mask=mask, other=0.0)).to(x.dtype)
    return x


@triton.jit
def _load_input(
    projected, channel, bias, order, scales, mask,
    CHANNELS: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The input of a row's convolution."""
    x = load_column(projected, FIRST + channel, bias, order, scales, mask)
    if GATED:
        x = x * load_column(projected, 2 * CHANNELS + channel, bias, order, scales, mask)
    return x


@triton.jit
def _convolve(
    projected, stored, weight, bias, column_bias, order, scales, mixed, kept_inputs, kept_mixed, sequence_of,
    sequences, above, kept, width, CHANNELS: tl.constexpr, TAPS: tl.constexpr, REACH: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    sequence = tl.load(sequence_of + row)
    if sequence >= 0:
        slot = tl.load(sequences + sequence * SEQUENCE_SIZE + SEQUENCE_SLOT)
        own = projected + row * width
        x = _load_input(own, channel, column_bias, order, scales, inside, CHANNELS, FIRST, GATED)
        total = x.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(1, TAPS):
            source = tl.load(above + row * REACH + j - 1)
            factor = tl.load(weight + channel * TAPS + TAPS - 1 - j, mask=inside, other=0.0).to(tl.float32)
            from_step = tl.maximum(source, 0).to(tl.int64) * width
            in_step = channel < tl.where(source >= 0, CHANNELS, 0)
            before = _load_input(
                projected + from_step, channel, column_bias, order, scales, in_step, CHANNELS, FIRST, GATED
            )
            from_store = (slot.to(tl.int64) * (TAPS - 1) + tl.maximum(TAPS - 1 + source, 0)) * CHANNELS
            is_stored = channel < tl.where((source < 0) & (source != NO_INPUT), CHANNELS, 0)
            earlier = tl.load(stored + from_store + channel, mask=is_stored, other=0.0)
            total += tl.where(source >= 0, before, earlier).to(tl.float32) * factor
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        y = total.to(x.dtype)
        if ACTIVATION is not None:
            y = _activated(y.to(tl.float32), 0.0, 0.0, 0.0, 0.0, ACTIVATION).to(x.dtype)
        if GATED:
            y = y * load_column(own, CHANNELS + channel, column_bias, order, scales, inside)
        tl.store(mixed + row * CHANNELS + channel, y, mask=inside)
        place = tl.load(kept + row).to(tl.int64)
        is_kept = channel < tl.where(place >= 0, CHANNELS, 0)
        tl.store(kept_inputs + place * CHANNELS + channel, x, mask=is_kept)
        if kept_mixed is not None:
            tl.store(kept_mixed + place * CHANNELS + channel, y, mask=is_kept)


def convolve(
    projected: torch.Tensor,
    channels: Channels,
    stored: torch.Tensor,
    mixed: torch.Tensor,
    kept_inputs: torch.Tensor,
    kept_mixed: torch.Tensor | None,
    rows: StateRows,
) -> None:
    """mixed [R, channels] = activation(convolution(inputs)) of every row, from projected [R or more, width].

    stored [slots, taps - 1, channels]: the last inputs before the step. The inputs and results of nodes are copied to
    kept_inputs and kept_mixed [ring, channels]; the latter may be None.
    """
    block = min(BLOCK_CHANNELS, triton.next_power_of_2(channels.count))
    _convolve[(len(rows.sequence_of), triton.cdiv(channels.count, block))](
        projected, stored, channels.weight, channels.bias, *channels.columns.tensors, mixed, kept_inputs,
        kept_mixed, rows.sequence_of, rows.sequences, rows.above, rows.kept, projected.shape[1],
        CHANNELS=channels.count, TAPS=channels.taps, REACH=rows.above.shape[1], FIRST=channels.first,
        GATED=channels.gated, ACTIVATION=None if channels.activation is None else channels.activation.value,
        BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _store_inputs(
    projected, stored, column_bias, order, scales, walks, count, width, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks at a time, blocks of channels)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    for walk in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        slot, _fresh, begin, tokens, _write_from = load_walk(walks, walk)
        own = stored + slot.to(tl.int64) * (TAPS - 1) * CHANNELS + channel
        for i in tl.static_range(TAPS - 1):  # the oldest first: each reads a place that is written later
            token = tokens - (TAPS - 1) + i
            is_new = channel < tl.where(token >= 0, CHANNELS, 0)
            row = projected + (begin + tl.maximum(token, 0)).to(tl.int64) * width
            x = _load_input(row, channel, column_bias, order, scales, is_new, CHANNELS, FIRST, GATED)
            is_old = channel < tl.where(token < 0, CHANNELS, 0)
            older = tl.load(own + tl.minimum(i + tokens, TAPS - 2) * CHANNELS, mask=is_old, other=0.0)
            tl.store(own + i * CHANNELS, tl.where(token >= 0, x, older), mask=inside)


def store_inputs(projected: torch.Tensor, channels: Channels, stored: torch.Tensor, rows: StateRows) -> None:
    """After `convolve` has read them, replace the stored inputs of sequences with prompt chunks by those of the chunk's
    last tokens."""
    block = min(BLOCK_CHANNELS, triton.next_power_of_2(channels.count))
    _store_inputs[(min(8, len(rows.chunk_walks)), triton.cdiv(channels.count, block))](
        projected, stored, *channels.columns.tensors, rows.chunk_walks, rows.chunk_count, projected.shape[1],
        CHANNELS=channels.count, TAPS=channels.taps, FIRST=channels.first, GATED=channels.gated, BLOCK=block,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _replay_inputs(
    stored, kept_inputs, walks, count, order, stored_layer, kept_layer,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (replays at a time, blocks of channels, layers)."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    layer = tl.program_id(2).to(tl.int64)
    for walk in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        slot, _fresh, begin, tokens, _write_from = load_walk(walks, walk)
        own = stored + layer * stored_layer + slot.to(tl.int64) * (TAPS - 1) * CHANNELS + channel
        for i in tl.static_range(TAPS - 1):
            token = tokens - (TAPS - 1) + i
            place = tl.load(order + begin + tl.maximum(token, 0)).to(tl.int64)
            is_new = channel < tl.where(token >= 0, CHANNELS, 0)
            x = tl.load(kept_inputs + layer * kept_layer + place * CHANNELS + channel, mask=is_new, other=0.0)
            is_old = channel < tl.where(token < 0, CHANNELS, 0)
            older = tl.load(own + tl.minimum(i + tokens, TAPS - 2) * CHANNELS, mask=is_old, other=0.0)
            tl.store(own + i * CHANNELS, tl.where(token >= 0, x, older), mask=inside)


def replay_inputs(
    stored: torch.Tensor, kept_inputs: torch.Tensor, walks: torch.Tensor, count: torch.Tensor, order: torch.Tensor
) -> None:
    """Move the inputs of accepted tokens behind the stored ones, in all layers.

    stored [layers, slots, taps - 1, channels], kept_inputs [layers, ring, channels]; walks [n, 5], count [1] and order
    [m] as in `StateRows.replays`.
    """
    layers, _slots, before, channels = stored.shape
    block = min(BLOCK_CHANNELS, triton.next_power_of_2(channels))
    _replay_inputs[(min(8, len(walks)), triton.cdiv(channels, block), layers)](
        stored, kept_inputs, walks, count, order, stored.stride(0), kept_inputs.stride(0),
        CHANNELS=channels, TAPS=before + 1, BLOCK=block, num_warps=4,
    )  # fmt: skip
