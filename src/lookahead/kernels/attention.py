"""Attention of a step's tree over a long cached prefix: FlashAttention, split over the keys, masked by the tree's bits.

A dense mask over the context would be as long as the context, and nearly all ones. Here the prefix needs no mask: a
token sees all of it. Only the K tokens of the step need one, K x K bits packed into words, 2 KB at K = 128.

    keys      | prefix block 0 | 1 | 2 | 3 | ... | tree |
    programs  |  split 0       | 1 | 0 | 1 | ... |  0   |   (two splits)

Each split takes every n-th block of the prefix, so that where a block ends does not depend on the context's length;
split 0 takes the tree as well. The last split to arrive joins all of them by their log-sum-exp. The prefix's length is
read on the device, so that one captured graph serves all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def _update(q, k, v, scale, seen, top, total, acc, MASKED: tl.constexpr):
    """One online-softmax step. q, acc [M, D]; k, v [N, D]; seen [M, N]; top, total [M]. `scale` includes log2(e).

    The maximum that probabilities are scaled by is a whole power of two. Which maximum a key meets depends on how the
    keys are grouped; so scaled, its probability has the same digits whatever the group, and rounds the same.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.ceil(tl.max(scores, 1) * scale))
    base = new
    if MASKED:
        base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def _attend(
    q, keys, values, rows, lengths, positions, bits, out, part, part_top, arrived,
    scale, count, capacity, kv_heads, splits, words,
    GROUP: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TREE_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: (batch x kv_heads, blocks of count x GROUP rows, splits)."""
    batch, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    split = tl.program_id(2)
    length = tl.load(lengths + batch)
    blocks = tl.cdiv(length, BLOCK_N)
    live = tl.minimum(tl.maximum(blocks, 1), splits)
    if split >= live:
        return
    # 1. The queries: row r is token r // GROUP of the step, head r % GROUP of the group that shares these keys.
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    real = token < count
    token = tl.minimum(token, count - 1)
    dim = tl.arange(0, DIM)
    whole = dim < HEAD
    place = ((batch * count + token) * kv_heads + head) * GROUP + row % GROUP
    query = tl.load(q + place[:, None] * HEAD + dim[None, :], mask=whole[None, :], other=0.0)
    position = tl.load(positions + batch * count + token)
    base = (tl.load(rows + batch).to(tl.int64) * kv_heads + head) * capacity
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    # 2. Every `splits`-th block of the prefix. Whole blocks need no mask, unless a window ends in them.
    whole_blocks = length // BLOCK_N if WINDOW == 0 else 0
    for block in range(split, whole_blocks, splits):
        at = (base + block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * HEAD + dim[None, :]
        if HEAD == DIM:
            k = tl.load(keys + at)
            v = tl.load(values + at)
        else:
            k = tl.load(keys + at, mask=whole[None, :], other=0.0)
            v = tl.load(values + at, mask=whole[None, :], other=0.0)
        top, total, acc = _update(query, k, v, scale, True, top, total, acc, False)
    first_block = whole_blocks + (split - whole_blocks % splits + splits) % splits
    for block in range(first_block, blocks, splits):
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        there = key < length
        at = (base + key)[:, None] * HEAD + dim[None, :]
        k = tl.load(keys + at, mask=there[:, None] & whole[None, :], other=0.0)
        v = tl.load(values + at, mask=there[:, None] & whole[None, :], other=0.0)
        seen = there[None, :] & (token >= 0)[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        top, total, acc = _update(query, k, v, scale, seen, top, total, acc, True)
    # 3. The tree: its keys stand behind the prefix, its bits say who sees whom, a word at a time.
    if split == 0:
        for word in range(0, words):
            node = word * TREE_N + tl.arange(0, TREE_N)
            there = node < count
            at = (base + length + node)[:, None] * HEAD + dim[None, :]
            k = tl.load(keys + at, mask=there[:, None] & whole[None, :], other=0.0)
            v = tl.load(values + at, mask=there[:, None] & whole[None, :], other=0.0)
            its_bits = tl.load(bits + (batch * count + token) * words + word)
            seen = ((its_bits[:, None] >> tl.arange(0, TREE_N)[None, :]) & 1) != 0
            if WINDOW > 0:
                other = tl.load(positions + batch * count + node, mask=there, other=0)
                seen = seen & (position[:, None] - other[None, :] < WINDOW)
            top, total, acc = _update(query, k, v, scale, seen, top, total, acc, True)
    # 4. Alone, the result. Else leave this split's part; whoever comes last adds all of them, in the splits' order.
    arrival = live - 1
    if live > 1:
        slot = place * splits
        tl.store(part + (slot + split)[:, None] * DIM + dim[None, :], acc, mask=real[:, None])
        tl.store(part_top + (slot + split) * 2, top, mask=real)
        tl.store(part_top + (slot + split) * 2 + 1, total, mask=real)
        tl.debug_barrier()
        counter = arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        arrival = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrival == live - 1:
            tl.store(counter, 0)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM], tl.float32)
            for i in range(0, live):
                # Past the first-level cache, which may hold what stood there before.
                its_top = tl.load(part_top + (slot + i) * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
                its_total = tl.load(part_top + (slot + i) * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
                at = (slot + i)[:, None] * DIM + dim[None, :]
                its_acc = tl.load(part + at, mask=real[:, None], other=0.0, cache_modifier=".cg")
                new = tl.maximum(top, its_top)
                safe = tl.where(new == float("-inf"), 0.0, new)
                mine, its = tl.exp2(top - safe), tl.exp2(its_top - safe)
                total = total * mine + its_total * its
                acc = acc * mine[:, None] + its_acc * its[:, None]
                top = new
    if arrival == live - 1:
        acc = acc / tl.where(real, total, 1.0)[:, None]
        inside = real[:, None] & whole[None, :]
        tl.store(out + place[:, None] * HEAD + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tiles:
    """How one shape of step is cut: rows per program, keys per inner block, splits of the prefix, warps, stages."""

    block_m: int
    block_n: int
    splits: int
    warps: int = 4
    stages: int = 2


def tiles_for(batch: int, count: int, heads: int, kv_heads: int, dim: int, *, processors: int = 132) -> Tiles:
    """Tiles that give every multiprocessor about two programs.

    Measured on an H200 with an earlier version of the kernel, at 2048 and 16384 keys, 64 heads of 64: for one token
    16 x 128 with 4 splits and 3 stages was the best of 24 (15.7 and 67.6 us), for 121 tokens 64 x 64 with 2 splits and
    3 stages the best of 48.
    """
    rows = count * (heads // kv_heads)
    block_m = min(64 if dim <= 128 else 32, max(16, triton.next_power_of_2(rows)))
    programs = batch * kv_heads * triton.cdiv(rows, block_m)
    splits = max(1, min(64, 2 * (processors + 4) // programs))
    if dim > 128:
        return Tiles(block_m, 32, splits, warps=8, stages=1)
    return Tiles(block_m, 128 if block_m == 16 and dim <= 64 else 64, splits, stages=3)


class Workspace:
    """The splits' partial results, for the largest step it was asked for. One serves all layers."""

    def __init__(self, device: torch.device) -> None:
        self.part = torch.empty(0, dtype=torch.float32, device=device)
        self.top = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)

    def reserve(self, rows: int, splits: int, dim: int, blocks: int) -> None:
        """Room for this many rows (batch x tokens x heads), and for a counter per block of them."""
        if splits > 1 and self.part.numel() < rows * splits * dim:
            self.part = self.part.new_empty(rows * splits * dim)
            self.top = self.top.new_empty(rows * splits * 2)
        if self.arrived.numel() < blocks:
            self.arrived = self.arrived.new_zeros(blocks)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
    out: torch.Tensor,
    work: Workspace,
    *,
    scale: float,
    window: int = 0,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """q, out [B, K, H, D]; keys, values [R, Hkv, capacity, D], of which batch row b uses row rows[b].

    lengths [B] int32: tokens of each prefix; the step's K tokens follow it in keys and values. positions [B, K] int32;
    bits [B, K, ceil(K/32)] int32, see `tree.packed_visibility`. `window` 0 is none. Bits beyond K are zero.
    """
    batch, count, heads, dim = q.shape
    _, kv_heads, capacity, _ = keys.shape
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(dim))  # a product needs 16 at least
    tiles = tiles or tiles_for(batch, count, heads, kv_heads, padded)
    grid = (batch * kv_heads, triton.cdiv(count * group, tiles.block_m), tiles.splits)
    work.reserve(batch * count * heads, tiles.splits, padded, grid[0] * grid[1])
    _attend[grid](
        q, keys, values, rows, lengths, positions, bits, out, work.part, work.top, work.arrived,
        scale * LOG2E, count, capacity, kv_heads, tiles.splits, bits.shape[2],
        GROUP=group, HEAD=dim, DIM=padded, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        TREE_N=32, WINDOW=window, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
