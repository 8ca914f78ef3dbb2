"""Products of rows with stacked matrices in plain numbers: one matrix, or one for each expert.

A row's bits depend on that row and its matrix only. K is cut into the same splits for every number of rows, and a
split's sum runs in the order of the columns (see `quantised`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.experts import ExpertRows, pairs_of_tile
from lookahead.backends.graph.kernels.splits import SplitMemory, sum_of_splits

BLOCK_K = 64
"""Columns that are multiplied at once."""
SPLIT_PROGRAMS, SPLIT_COLUMNS = 256, 512
"""K is split until a product of one row has this many programs, but into no fewer columns: constants, because texts
depend on the splits."""
TILE_N = 64


@dataclass(frozen=True)
class Launch:
    """How a product is launched; the result does not depend on it. `parallel`: a program per split."""

    block_n: int
    block_m: int
    warps: int
    stages: int
    parallel: bool


def splits_of(out: int, width: int, matrices: int = 1) -> int:
    """The number of splits of K, for every number of rows. `matrices`: how many a single row is multiplied by."""
    tiles, splits = matrices * triton.cdiv(out, TILE_N), 1
    while tiles * splits < SPLIT_PROGRAMS and width >= 2 * splits * SPLIT_COLUMNS:
        splits *= 2
    return splits


def pairs_per_tile(rows: int, top_k: int, experts: int) -> int:
    """The pairs of a tile: about twice those of an expert, so that most experts have one tile."""
    return min(128, max(16, triton.next_power_of_2(2 * rows * top_k // experts)))


def launch_of(block_m: int, splits: int) -> Launch:
    """The fastest launch on an H200 for tiles of this many rows."""
    if block_m <= 16:
        return Launch(64, 16, 4, 6, parallel=splits > 1)
    if block_m <= 64:
        return Launch(64, block_m, 4, 4, parallel=splits > 1)
    return Launch(128, block_m, 8, 3, parallel=splits > 2)


@triton.jit
def sum_of_columns(
    at, own, inside, known, first, last, K,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products of blocks first to last of the columns, [BLOCK_N, BLOCK_M]. at [1, BLOCK_M] and own [BLOCK_N, 1]
    point to the rows of x and of the matrix."""
    part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first, last):
        column = block * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(own + column[None, :], mask=inside, other=0.0)
            given = tl.load(at + column[:, None], mask=known[None, :], other=0.0)
        else:
            weight = tl.load(own + column[None, :], mask=inside & (column < K)[None, :], other=0.0)
            given = tl.load(at + column[:, None], mask=known[None, :] & (column < K)[:, None], other=0.0)
        if own.dtype.element_ty != at.dtype.element_ty:
            weight, given = weight.to(tl.float32), given.to(tl.float32)
        part = tl.dot(weight, given, part, input_precision="ieee")
    return part


@triton.jit
def _multiply(
    x, weights, bias, out, tiles, counts, table, numbers, partials, arrived,
    rows, capacity, N, K, x_stride, stride, out_stride,
    SPLITS: tl.constexpr, PARALLEL: tl.constexpr, PER: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of N x splits if PARALLEL, tiles of rows). A tile is out^T [BLOCK_N, BLOCK_M]."""
    if PARALLEL:
        tile, first_split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
        last_split = first_split + 1
    else:
        tile, first_split, last_split = tl.program_id(0), 0, SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if table is not None:
        if tl.program_id(1) >= tl.load(numbers):
            return
        expert, to, known = pairs_of_tile(tl.program_id(1), tiles, counts, table, capacity, BLOCK_M)
        weights += expert.to(tl.int64) * N * stride
    else:
        expert, to = 0, tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        known = to < rows
    at = x + (to // PER).to(tl.int64)[None, :] * x_stride
    own = weights + n.to(tl.int64)[:, None] * stride
    inside = (n < N)[:, None]
    blocks = tl.cdiv(K, BLOCK_K)
    per = tl.cdiv(blocks, SPLITS)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(first_split, last_split):
        first, last = split * per, tl.minimum((split + 1) * per, blocks)
        total += sum_of_columns(at, own, inside, known, first, last, K, EVEN, BLOCK_N, BLOCK_M, BLOCK_K)
    if PARALLEL:
        number = tl.program_id(1) * tl.cdiv(N, BLOCK_N) + tile
        total, is_last = sum_of_splits(total, partials, arrived, number, first_split, SPLITS, BLOCK_N, BLOCK_M)
        if is_last == 0:
            return
    if bias is not None:
        total += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    target = out + to.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=known[None, :] & inside)


def multiply(
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    launch: Launch,
    splits: int,
    memory: SplitMemory,
    *,
    bias: torch.Tensor | None = None,
    experts: ExpertRows | None = None,
    per: int = 1,
    tiles: int = 0,
) -> None:
    """out [R, N] = x [R, K] W^T + bias [N], in sums of fp32, for weights [N, K].

    With `experts`, out [pairs, N] and weights [E, N, K]: a pair is multiplied by the matrix of its expert, and its x is
    row pair // `per`. bias [E, N]. `tiles`: the most tiles of pairs. Columns are next to one another in all.
    """
    (out_width, width), rows = weights.shape[-2:], len(out)
    columns = triton.cdiv(out_width, launch.block_n) * (splits if launch.parallel else 1)
    listed = (None,) * 4 if experts is None else (experts.tiles, experts.counts, experts.table, experts.numbers)
    _multiply[(columns, tiles or triton.cdiv(rows, launch.block_m))](
        x, weights, bias, out, *listed, memory.partials, memory.arrived, rows,
        0 if experts is None else experts.capacity, out_width, width, x.stride(0), weights.stride(-2), out.stride(0),
        SPLITS=splits, PARALLEL=launch.parallel, PER=per, EVEN=width % BLOCK_K == 0, BLOCK_N=launch.block_n,
        BLOCK_M=launch.block_m, BLOCK_K=BLOCK_K, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
