"""Attention of a step's tree over a long cached prefix: FlashAttention, split over the keys, masked by the tree's bits.

A dense mask over the context would be as long as the context, and nearly all ones. Here the prefix needs no mask: a
token sees all of it. Only the K tokens of the step need one, K x K bits packed into words, 2 KB at K = 128.

    keys      | prefix block 0 | 1 | 2 | 3 | ... | tree |
    programs  |  split 0       | 1 | 0 | 1 | ... |  0   |   (two splits)

Each split takes every n-th block of the prefix, so that where a block ends does not depend on the context's length;
split 0 takes the tree as well. The last split to arrive joins all of them by their log-sum-exp. The prefix's length is
read on the device, so that one captured graph serves all lengths.

The same row decoded alone finds the tree's part of its keys in the prefix. Sums are rounded, so it would not get the
same bits, and in half precision soon another text. An *invariant* step (`Tiles.reach`) adds up every row in one order:

    keys      | prefix block 0 | 1 | ... | up to 16 to 31 keys before the row | the rest of the prefix, the tree |
    programs  |  split 0       | 1 | ... |                                    |  one more, a key at a time       |

Where the first part ends depends on the row's position alone, in whole sixteens, which is how the matrix units add; a
guess is never further from the root than that. The rest goes one key at a time, by position: it does not matter whether
a key stands in the prefix or somewhere in the tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.kernels.depths import by_depth, new_slots
from lookahead.kernels.early import options, wait
from lookahead.kernels.tiles import MOST, Tiles, tiles_for

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1e6)
"""Below every score, in powers of two."""


@triton.jit
def _weigh(q, k, scale, seen, top, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """Scores of a block of keys as probabilities [M, N] below a new maximum [M], and what shrinks the ones before.

    The maximum is a whole power of two. Which maximum a key meets depends on how the keys are grouped; so scaled, its
    probability has the same digits whatever the group, and rounds the same. With EXACT to the last one: scores are
    taken to a grid of 2 ** -16 (coarser above 64), on which they lose nothing when a maximum is taken off.
    `scale` includes log2(e).
    """
    lift: tl.constexpr = 192.0 if EXACT else 0.0
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + lift
    if MASKED:
        scores = tl.where(seen, scores, LOWEST)
    new = tl.maximum(top, tl.ceil(tl.max(scores, 1) - lift))
    p = tl.exp2(scores - (new + lift)[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return new, p.to(k.dtype), tl.exp2(top - new)


@triton.jit
def _add(q, k, v, ones, scale, seen, top, total, acc, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One online-softmax step. q, acc [M, D]; k, v [N, D]; seen [M, N]; top [M]; total [M, 16], all columns equal."""
    top, p, shrink = _weigh(q, k, scale, seen, top, MASKED, EXACT)
    total = tl.dot(p, ones, total * shrink[:, None], input_precision="ieee")
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _add_singly(q, k, v, scale, seen, top, total, acc, EACH: tl.constexpr):
    """The same for 16 keys, of which a row sees at most one in EACH; total [M] fp64.

    A row adds one key at a time: its sum depends on its keys and their order, not on where they stand. (The loop has to
    be unrolled: as a loop, Triton 3.6 gave wrong sums on an H200.)
    """
    top, p, shrink = _weigh(q, k, scale, seen, top, True, True)
    total = total * shrink.to(tl.float64) + tl.sum(p.to(tl.float64), 1)
    acc = acc * shrink[:, None]
    turn = tl.arange(0, 16)[None, :] // EACH
    for i in tl.static_range(16 // EACH):
        acc = tl.dot(tl.where(turn == i, p, 0.0).to(p.dtype), v, acc, input_precision="ieee")
    return top, total, acc


# One kernel for all K, batches and capacities of a cut: compiled for particular numbers it is hardly shorter (4% for
# one token, nothing for 128), and each would take seconds to compile, 13 in fp32.
@triton.jit(do_not_specialize=["count", "capacity", "kv_heads", "splits", "words"])
def _attend(
    q, keys, values, rows, lengths, positions, bits, slots, out, part, part_top, arrived,
    scale, count, capacity, kv_heads, splits, words,
    GROUP: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TREE_N: tl.constexpr, WINDOW: tl.constexpr, REACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (batch x kv_heads, blocks of count x GROUP rows, splits; with REACH one more)."""
    batch, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    split = tl.program_id(2)
    length = tl.load(lengths + batch)
    # 1. The queries: row r is token r // GROUP of the step, head r % GROUP of the group that shares these keys.
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    real = token < count
    token = tl.minimum(token, count - 1)
    position = tl.load(positions + batch * count + token)
    # The keys before `border` go in blocks, those from it on one by one. It is a matter of the row's position alone.
    border = tl.zeros([BLOCK_M], tl.int32) + length
    if REACH > 0:
        border = tl.minimum(tl.maximum(position - REACH, 0) // 16 * 16, length // 16 * 16)
    blocks = tl.cdiv(tl.max(border, 0), BLOCK_N)
    live = tl.minimum(blocks, splits)
    if REACH == 0:
        live = tl.maximum(live, 1)
    if (split >= live) & (split < splits):
        return
    dim = tl.arange(0, DIM)
    whole = dim < HEAD
    place = ((batch * count + token) * kv_heads + head) * GROUP + row % GROUP
    wait(EARLY)  # what came before are the step's packet, which is long there; now the layer's q, keys and values
    query = tl.load(q + place[:, None] * HEAD + dim[None, :], mask=whole[None, :], other=0.0)
    base = (tl.load(rows + batch).to(tl.int64) * kv_heads + head) * capacity
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    ones = tl.full([BLOCK_N, 16], 1.0, values.dtype.element_ty)
    if split < splits:
        # 2. Every `splits`-th block of the prefix. Whole blocks need no mask, unless a window ends in them.
        whole_blocks = tl.min(border, 0) // BLOCK_N if WINDOW == 0 else 0
        for block in range(split, whole_blocks, splits):
            at = (base + block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * HEAD + dim[None, :]
            if HEAD == DIM:
                k = tl.load(keys + at)
                v = tl.load(values + at)
            else:
                k = tl.load(keys + at, mask=whole[None, :], other=0.0)
                v = tl.load(values + at, mask=whole[None, :], other=0.0)
            top, total, acc = _add(query, k, v, ones, scale, True, top, total, acc, False, REACH > 0)
        first_block = whole_blocks + (split - whole_blocks % splits + splits) % splits
        for block in range(first_block, blocks, splits):
            key = block * BLOCK_N + tl.arange(0, BLOCK_N)
            at = (base + key)[:, None] * HEAD + dim[None, :]
            k = tl.load(keys + at, mask=(key < length)[:, None] & whole[None, :], other=0.0)
            v = tl.load(values + at, mask=(key < length)[:, None] & whole[None, :], other=0.0)
            seen = key[None, :] < border[:, None]
            if WINDOW > 0:
                seen = seen & (position[:, None] - key[None, :] < WINDOW)
            top, total, acc = _add(query, k, v, ones, scale, seen, top, total, acc, True, REACH > 0)
    mass = tl.max(total, 1)
    # 3. The tree: its keys stand behind the prefix, its bits say who sees whom. Without REACH a word at a time.
    if REACH == 0:
        if split == 0:
            word_ones = tl.full([TREE_N, 16], 1.0, values.dtype.element_ty)
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
                top, total, acc = _add(query, k, v, word_ones, scale, seen, top, total, acc, True, False)
            mass = tl.max(total, 1)
    elif split == splits:
        # With it the rest of the prefix, and then the tree's nodes by depth, four of one depth in each quarter.
        exact = tl.zeros([BLOCK_M], tl.float64)
        lane = tl.arange(0, 16)
        for key0 in range(tl.min(border, 0), length, 16):
            key = key0 + lane
            there = key < length
            at = (base + key)[:, None] * HEAD + dim[None, :]
            k = tl.load(keys + at, mask=there[:, None] & whole[None, :], other=0.0)
            v = tl.load(values + at, mask=there[:, None] & whole[None, :], other=0.0)
            seen = there[None, :] & (key[None, :] >= border[:, None])
            if WINDOW > 0:
                seen = seen & (position[:, None] - key[None, :] < WINDOW)
            top, exact, acc = _add_singly(query, k, v, scale, seen, top, exact, acc, 1)
        own_bits = bits + (batch * count + token) * words
        word0 = tl.load(own_bits)
        word1 = tl.load(own_bits + tl.minimum(1, words - 1))
        word2 = tl.load(own_bits + tl.minimum(2, words - 1))
        word3 = tl.load(own_bits + tl.minimum(3, words - 1))
        own_slots = slots + (batch * tl.num_programs(1) + tl.program_id(1)) * (4 * count + 1)
        used = tl.load(own_slots)
        for slot0 in range(0, used, 16):
            node = tl.load(own_slots + 1 + slot0 + lane, mask=slot0 + lane < used, other=-1)
            there = node >= 0
            at = (base + length + node)[:, None] * HEAD + dim[None, :]
            k = tl.load(keys + at, mask=there[:, None] & whole[None, :], other=0.0)
            v = tl.load(values + at, mask=there[:, None] & whole[None, :], other=0.0)
            low = tl.where((node < 32)[None, :], word0[:, None], word1[:, None])
            high = tl.where((node < 96)[None, :], word2[:, None], word3[:, None])
            its_bits = tl.where((node < 64)[None, :], low, high)
            seen = there[None, :] & (((its_bits >> (node % 32)[None, :]) & 1) != 0)
            if WINDOW > 0:
                other = tl.load(positions + batch * count + node, mask=there, other=0)
                seen = seen & (position[:, None] - other[None, :] < WINDOW)
            top, exact, acc = _add_singly(query, k, v, scale, seen, top, exact, acc, 4)
        mass = exact.to(tl.float32)
    # 4. Alone, the result. Else leave this split's part; whoever comes last adds all of them, in the splits' order.
    parts = live
    if REACH > 0:
        parts = live + 1
        split = tl.minimum(split, live)
    arrival = parts - 1
    if parts > 1:
        slot = place * tl.num_programs(2)
        tl.store(part + (slot + split)[:, None] * DIM + dim[None, :], acc, mask=real[:, None])
        tl.store(part_top + (slot + split) * 2, top, mask=real)
        tl.store(part_top + (slot + split) * 2 + 1, mass, mask=real)
        tl.debug_barrier()
        counter = arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        arrival = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrival == parts - 1:
            tl.store(counter, 0)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            mass = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM], tl.float32)
            for i in range(0, parts):
                # Past the first-level cache, which may hold what stood there before.
                its_top = tl.load(part_top + (slot + i) * 2, mask=real, other=LOWEST, cache_modifier=".cg")
                its_total = tl.load(part_top + (slot + i) * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
                at = (slot + i)[:, None] * DIM + dim[None, :]
                its_acc = tl.load(part + at, mask=real[:, None], other=0.0, cache_modifier=".cg")
                new = tl.maximum(top, its_top)
                mine, its = tl.exp2(top - new), tl.exp2(its_top - new)
                mass = mass * mine + its_total * its
                acc = acc * mine[:, None] + its_acc * its[:, None]
                top = new
    if arrival == parts - 1:
        acc = acc / tl.where(real, mass, 1.0)[:, None]
        inside = real[:, None] & whole[None, :]
        tl.store(out + place[:, None] * HEAD + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


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
    slots: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """q, out [B, K, H, D]; keys, values [R, Hkv, capacity, D], of which batch row b uses row rows[b].

    lengths [B] int32: tokens of each prefix; the step's K tokens follow it in keys and values. positions [B, K] int32;
    bits [B, K, ceil(K/32)] int32, see `tree.packed_visibility`. `window` 0 is none. Bits beyond K are zero.
    slots: see `by_depth`; only tiles with a reach need them.
    """
    batch, count, heads, dim = q.shape
    _, kv_heads, capacity, _ = keys.shape
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(dim))  # a product needs 16 at least
    tiles = tiles or tiles_for(batch, count, heads, kv_heads, padded)
    if tiles.reach and slots is None:
        assert count <= MOST, f"an invariant step has at most {MOST} tokens, not {count}"
        slots = new_slots(batch, count, tiles, group, q.device)
        by_depth(positions, lengths, bits, slots, tiles, group)
    parts = tiles.splits + (tiles.reach > 0)
    grid = (batch * kv_heads, triton.cdiv(count * group, tiles.block_m), parts)
    work.reserve(batch * count * heads, parts, padded, grid[0] * grid[1])
    _attend[grid](
        q, keys, values, rows, lengths, positions, bits, bits if slots is None else slots, out,
        work.part, work.top, work.arrived,
        scale * LOG2E, count, capacity, kv_heads, tiles.splits, bits.shape[2],
        GROUP=group, HEAD=dim, DIM=padded, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        TREE_N=32, WINDOW=window, REACH=tiles.reach,
        num_warps=tiles.warps, num_stages=tiles.stages, **options(early),
    )  # fmt: skip
    return out
