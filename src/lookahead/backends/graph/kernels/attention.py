"""Attention of a step's trees over cached prefixes: FlashAttention, split over the keys, masked by the trees' bits.

A dense mask would be as long as the context, and nearly all ones. Here the prefix needs no mask, because every node
sees all of it. Only the K nodes of a tree need one: K x K bits, packed into words, 2 KB at K = 128.

    keys      | prefix block 0 | 1 | 2 | 3 | ... | tree |
    programs  |  split 0       | 1 | 0 | 1 | ... |  1   |   (two splits)

The work is divided into splits that run in parallel. Of n splits, each takes every n-th block of the prefix, so that
where a block ends does not depend on the context's length. The last split takes the tree as well. In a long context
more splits take part from some block on (`tiles.FAR`). The last split waits for the others and joins all partial sums
by their log-sum-exp. The prefix's length is read on the device, so that one captured graph serves all lengths.

Invariant steps: a token that is decoded alone finds its ancestors in the prefix, not in a tree. Sums are rounded, so if
its keys were added in another order, it would get other bits, and in half precision soon another text. An *invariant*
step (`Tiles.reach`) therefore adds every row's keys in one order:

    keys      | prefix block 0 | 1 | ... | up to 16 to 31 keys before the row | the rest of the prefix, the tree |
    programs  |  split 0       | 1 | ... |                                    |  one more, a key at a time       |

The first part is added in blocks. Where it ends depends on the row's position alone. It ends at a multiple of 16,
because the matrix units add 16 keys at once, and it lies within the prefix, because no guess is further from the root
than 16. The rest is added one key at a time, in the order of positions, so that it does not matter whether a key stands
in the prefix or somewhere in the tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.depths import new_order, order_by_depth
from lookahead.backends.graph.kernels.tiles import FAR, Tiles, tiles_for
from lookahead.backends.graph.sizes import INVARIANT_ROWS

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1e6)
"""Where a maximum starts: below every score (in powers of two), but finite, in case a row sees no key."""


@triton.jit
def _weigh(q, k, scale, seen, top, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One block of keys: the new maximum [M], the keys' weights [M, N] relative to it, and the factor [M] that scales
    sums over earlier blocks to it.

    q [M, D]; k [N, D]; seen [M, N]; top [M], the maximum so far. `scale` includes log2(e).

    The maximum is rounded up to a whole power of two. Which maximum a key meets depends on how keys are grouped into
    blocks; relative to a power of two, its weight has the same digits in every grouping, and is rounded the same. With
    EXACT this holds to the last digit: scores are rounded to multiples of 2 ** -16 (coarser above 64), so that
    subtracting a maximum loses nothing.
    """
    # Between 128 and 256, fp32 numbers are multiples of 2 ** -16.
    lift: tl.constexpr = 192.0 if EXACT else 0.0
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + lift
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.ceil(tl.max(scores, 1) - lift))
    p = tl.exp2(scores - (new + lift)[:, None])
    if k.dtype == tl.float16:  # it has few small numbers, so scale the weights up
        p *= 32768.0
    return new, p.to(k.dtype), tl.exp2(top - new)


@triton.jit
def _add(q, k, v, ones, scale, seen, top, total, acc, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One online-softmax step. q, acc [M, D]; k, v [N, D]; seen [M, N]; top [M]; total [M, 8], all columns equal.

    The sum of weights is a matrix product with `ones` [N, 8], so that it is added in the same order as the values.
    """
    top, p, shrink = _weigh(q, k, scale, seen, top, MASKED, EXACT)
    total = tl.dot(p, ones, total * shrink[:, None], input_precision="ieee")
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _alone(p, i: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """p [M, 16] -> [M, N], N / 16 groups of 16 columns: the first group has column i of p and zeros, the next column
    i + 1, and so on.

    (`tl.join` would mix the groups: Triton lays its result out as numbers of half the width, and then takes keys of two
    groups into one step of the matrix units.)
    """
    column = i + tl.arange(0, N // 16)[None, :, None]
    alone = tl.where(tl.arange(0, 16)[None, None, :] == column, p[:, None, :], 0.0).to(p.dtype)
    return tl.reshape(alone, [M, N])


@triton.jit
def _add_singly(q, k, v, ones, scale, seen, top, total, acc, M: tl.constexpr, N: tl.constexpr):
    """As `_add`, for 16 keys that are added one after the other. k [16, D]; v [N, D] holds the 16 values N / 16 times.

    The matrix units add the products of 16 keys at once, and one group of 16 after the other. So each key gets a group
    of its own, N / 16 keys per product. Then a row's sum depends on its keys and their order, not on where they stand.
    """
    top, p, shrink = _weigh(q, k, scale, seen, top, True, True)
    total = total * shrink[:, None]
    acc = acc * shrink[:, None]
    for i in tl.static_range(0, 16, N // 16):
        alone = _alone(p, i, M, N)
        total = tl.dot(alone, ones, total, input_precision="ieee")
        acc = tl.dot(alone, v, acc, input_precision="ieee")
    return top, total, acc


@triton.jit
def _join(top, mass, acc, its_top, its_mass, its_acc):
    """Join two partial sums. Each is a maximum [M], a sum of weights [M] and a weighted sum of values [M, D]."""
    new = tl.maximum(top, its_top)
    mine, its = tl.exp2(top - new), tl.exp2(its_top - new)
    return new, mass * mine + its_mass * its, acc * mine[:, None] + its_acc * its[:, None]


@triton.jit
def _block(i, split, near, splits, near_splits, FAR: tl.constexpr):
    """The number of a split's i-th block: its first `near` blocks are every `near_splits`-th one below FAR, the others
    every `splits`-th one from there on."""
    return tl.where(i < near, split + i * near_splits, FAR + split + (i - near) * splits)


@triton.jit
def _blocks_below(end, split, near, splits, near_splits, FAR: tl.constexpr):
    """How many of a split's blocks stand before block `end`."""
    far = tl.cdiv(tl.maximum(end - FAR - split, 0), splits)
    return tl.minimum(tl.cdiv(tl.maximum(end - split, 0), near_splits), near) + far


# One kernel serves all K, batches and capacities. Compiled for particular numbers it would hardly be faster (4% for one
# token, nothing for 128), and each would take seconds to compile, 13 in fp32.
@triton.jit(do_not_specialize=["count", "capacity", "kv_heads", "splits", "near_splits", "words", "order_size"])
def _attend(
    q, keys, values, lanes, lengths, positions, bits, order, out, part, part_top, arrived,
    scale, count, capacity, kv_heads, splits, near_splits, words, order_size,
    GROUP: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TREE_N: tl.constexpr, WINDOW: tl.constexpr, REACH: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Grid: (batch x kv_heads, blocks of BLOCK_M queries, splits; with REACH one more).

    A query is a pair of token and head: each K/V head has count x GROUP of them. See `attend` for the tensors.
    """
    batch, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    split = tl.program_id(2)
    length = tl.load(lengths + batch)
    # 1. The queries: pair i is token i // GROUP of the tree, and head i % GROUP of the group that shares these keys.
    pair = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = pair // GROUP
    real = token < count
    token = tl.minimum(token, count - 1)
    position = tl.load(positions + batch * count + token)
    # Keys before `border` are added in blocks, keys from it on one by one. It depends on the row's position alone.
    border = tl.zeros([BLOCK_M], tl.int32) + length
    if REACH > 0:
        border = tl.minimum(tl.maximum(position - REACH, 0) // 16 * 16, length // 16 * 16)
    blocks = tl.cdiv(tl.max(border, 0), BLOCK_N)
    live = tl.maximum(tl.minimum(blocks, near_splits), tl.minimum(tl.maximum(blocks - FAR, 0), splits))
    if REACH == 0:
        live = tl.maximum(live, 1)
    if (split >= live) & (split < splits):
        return
    dim = tl.arange(0, DIM)
    whole = dim < HEAD
    place = ((batch * count + token) * kv_heads + head) * GROUP + pair % GROUP
    base = (tl.load(lanes + batch).to(tl.int64) * kv_heads + head) * capacity
    own_order = order + (batch * tl.num_programs(1) + tl.program_id(1)) * order_size
    used = tl.load(own_order)
    query = tl.load(q + place[:, None] * HEAD + dim[None, :], mask=whole[None, :], other=0.0)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M, 8], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    ones = tl.full([BLOCK_N, 8], 1.0, values.dtype.element_ty)
    if split < splits:
        # 2. This split's blocks of the prefix. A block that lies whole before the border needs no mask, unless there is
        # a sliding window.
        near = tl.where(split < near_splits, tl.cdiv(FAR - split, near_splits), 0)
        whole_blocks = tl.min(border, 0) // BLOCK_N if WINDOW == 0 else 0
        first = _blocks_below(whole_blocks, split, near, splits, near_splits, FAR)
        for i in range(0, first):
            block = _block(i, split, near, splits, near_splits, FAR)
            at = (base + block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * HEAD + dim[None, :]
            if HEAD == DIM:
                k = tl.load(keys + at)
                v = tl.load(values + at)
            else:
                k = tl.load(keys + at, mask=whole[None, :], other=0.0)
                v = tl.load(values + at, mask=whole[None, :], other=0.0)
            top, total, acc = _add(query, k, v, ones, scale, True, top, total, acc, False, REACH > 0)
        for i in range(first, _blocks_below(blocks, split, near, splits, near_splits, FAR)):
            block = _block(i, split, near, splits, near_splits, FAR)
            key = block * BLOCK_N + tl.arange(0, BLOCK_N)
            at = (base + key)[:, None] * HEAD + dim[None, :]
            k = tl.load(keys + at, mask=(key < length)[:, None] & whole[None, :], other=0.0)
            v = tl.load(values + at, mask=(key < length)[:, None] & whole[None, :], other=0.0)
            seen = key[None, :] < border[:, None]
            if WINDOW > 0:
                seen = seen & (position[:, None] - key[None, :] < WINDOW)
            top, total, acc = _add(query, k, v, ones, scale, seen, top, total, acc, True, REACH > 0)
    # 3. The tree: its keys stand behind the prefix, its bits say who sees whom. Without REACH, a word at a time.
    if REACH == 0:
        if split == live - 1:
            word_ones = tl.full([TREE_N, 8], 1.0, values.dtype.element_ty)
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
    elif split == splits:
        # With REACH: first the rest of the prefix, then the tree's nodes by depth, in groups of 16 nodes of one depth
        # (see `depths`).
        column = tl.arange(0, BLOCK_N)
        for key0 in range(tl.min(border, 0), length, 16):
            key = key0 + tl.arange(0, 16)
            there = key < length
            at = (base + key)[:, None] * HEAD + dim[None, :]
            k = tl.load(keys + at, mask=there[:, None] & whole[None, :], other=0.0)
            key_again = key0 + column % 16
            at = (base + key_again)[:, None] * HEAD + dim[None, :]
            v = tl.load(values + at, mask=(key_again < length)[:, None] & whole[None, :], other=0.0)
            seen = there[None, :] & (key[None, :] >= border[:, None])
            if WINDOW > 0:
                seen = seen & (position[:, None] - key[None, :] < WINDOW)
            top, total, acc = _add_singly(query, k, v, ones, scale, seen, top, total, acc, BLOCK_M, BLOCK_N)
        # A token sees at most one node of a group. Its sights hold a byte per group: that node's place plus 1, or 0.
        sights = own_order + 1 + 16 * count + (token - tl.program_id(1) * BLOCK_M // GROUP) * (count // 4 + 1)
        turn, place_there = 8 * (column // 16), column % 16 + 1
        next_sight = tl.load(sights)
        for first_place in range(0, used, BLOCK_N):
            sight = next_sight >> (first_place % 64 // 2)
            next_sight = tl.load(sights + (first_place + BLOCK_N) // 64)
            node = tl.load(own_order + 1 + first_place + column, mask=first_place + column < used, other=-1)
            there = node >= 0
            at = (base + length + node)[:, None] * HEAD + dim[None, :]
            k = tl.load(keys + at, mask=there[:, None] & whole[None, :], other=0.0)
            v = tl.load(values + at, mask=there[:, None] & whole[None, :], other=0.0)
            seen = ((sight[:, None] >> turn[None, :]) & 255) == place_there[None, :]
            if WINDOW > 0:
                other = tl.load(positions + batch * count + node, mask=there, other=0)
                seen = seen & (position[:, None] - other[None, :] < WINDOW)
            top, total, acc = _add(query, k, v, ones, scale, seen, top, total, acc, True, True)
    mass = tl.max(total, 1)
    # 4. All splits but the last store their partial sums. The last one waits for them and joins them, in the splits'
    # order. It must be the last to start: if waiting programs filled the device, they would wait for ever.
    others = live if REACH > 0 else live - 1
    first_part = place * tl.num_programs(2)
    counter = arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if split < others:
        tl.store(part + (first_part + split)[:, None] * DIM + dim[None, :], acc, mask=real[:, None])
        tl.store(part_top + (first_part + split) * 2, top, mask=real)
        tl.store(part_top + (first_part + split) * 2 + 1, mass, mask=real)
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release")
        return
    if others > 0:
        while tl.atomic_add(counter, 0, sem="acquire") < others:
            pass
        tl.store(counter, 0)
        all_top = tl.full([BLOCK_M], LOWEST, tl.float32)
        all_mass = tl.zeros([BLOCK_M], tl.float32)
        all_acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        for i in tl.range(0, others, loop_unroll_factor=2):
            # `.cg` reads past the first-level cache, which may hold old contents of this memory.
            its_top = tl.load(part_top + (first_part + i) * 2, mask=real, other=LOWEST, cache_modifier=".cg")
            its_mass = tl.load(part_top + (first_part + i) * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
            at = (first_part + i)[:, None] * DIM + dim[None, :]
            its_acc = tl.load(part + at, mask=real[:, None], other=0.0, cache_modifier=".cg")
            all_top, all_mass, all_acc = _join(all_top, all_mass, all_acc, its_top, its_mass, its_acc)
        top, mass, acc = _join(all_top, all_mass, all_acc, top, mass, acc)
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    inside = real[:, None] & whole[None, :]
    tl.store(out + place[:, None] * HEAD + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


class Workspace:
    """Memory for the splits' partial sums, and a counter of splits per block of queries. One serves all layers.

    `part` holds the sums of values, `top` the maxima and the sums of weights, `arrived` how many splits have stored.
    """

    def __init__(self, device: torch.device) -> None:
        self.part = torch.empty(0, dtype=torch.float32, device=device)
        self.top = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)

    def reserve(self, queries: int, splits: int, dim: int, blocks: int) -> None:
        """Make room for this many queries (batch x tokens x heads), and for a counter per block of them."""
        if splits > 1 and self.part.numel() < queries * splits * dim:
            self.part = self.part.new_empty(queries * splits * dim)
            self.top = self.top.new_empty(queries * splits * 2)
        if self.arrived.numel() < blocks:
            self.arrived = self.arrived.new_zeros(blocks)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lanes: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
    out: torch.Tensor,
    work: Workspace,
    *,
    scale: float,
    window: int = 0,
    tiles: Tiles | None = None,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of B trees of K nodes each, every one over its own prefix and tree, into `out`.

    q, out [B, K, H, D]; keys, values [lanes, Hkv, capacity, D], of which entry b uses lane lanes[b].
    lanes, lengths [B] int32: each prefix has lengths[b] tokens, and the tree's K nodes follow it in keys and values.
    positions [B, K] int32. bits [B, K, ceil(K/32)] int32, see `tree.packed_visibility`; bits beyond K are zero.
    `window`: the sliding window's tokens, 0 for none. order: see `depths.order_by_depth`; it is needed only by tiles
    with a reach, and made here if missing.
    """
    batch, count, heads, dim = q.shape
    _, kv_heads, capacity, _ = keys.shape
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(dim))  # Triton's matrix products need 16 at least
    tiles = tiles or tiles_for(batch, count, heads, kv_heads, padded)
    if tiles.reach and order is None:
        assert count <= INVARIANT_ROWS, f"an invariant step has at most {INVARIANT_ROWS} rows, not {count}"
        order = new_order(batch, count, tiles, group, q.device)
        order_by_depth(positions, lengths, bits, order, tiles, group)
    parts = tiles.splits + (tiles.reach > 0)
    grid = (batch * kv_heads, triton.cdiv(count * group, tiles.block_m), parts)
    work.reserve(batch * count * heads, parts, padded, grid[0] * grid[1])
    _attend[grid](
        q, keys, values, lanes, lengths, positions, bits, bits if order is None else order, out,
        work.part, work.top, work.arrived,
        scale * LOG2E, count, capacity, kv_heads, tiles.splits, tiles.near_splits or tiles.splits, bits.shape[2],
        0 if order is None else order.shape[2],
        GROUP=group, HEAD=dim, DIM=padded, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        TREE_N=32, WINDOW=window, REACH=tiles.reach, FAR=FAR,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip
    return out
