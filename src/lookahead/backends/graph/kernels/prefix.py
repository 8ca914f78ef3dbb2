"""Attention sums over the prefix of a tile's sequence, block of keys by block: of one split, or of all of them.

The prefix lies in pages. Of n splits, each takes every n-th block (see `attention`). With a sliding window or a chunk a
tile reads only the blocks from the lowest key on that one of its rows sees (BOUNDED). Which split takes a block does
not depend on that key, so a row's sums do not depend on the other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels import tiles
from lookahead.backends.graph.kernels.softmax import LOWEST, add, join, load_keys, lowest_key, no_keys

NEAR_BLOCKS = tl.constexpr(tiles.NEAR_BLOCKS)


@triton.jit
def splits_in_use(blocks, splits, near_splits):
    """Number of splits that share a prefix of `blocks` blocks: the first ones."""
    return tl.maximum(tl.minimum(blocks, near_splits), tl.minimum(tl.maximum(blocks - NEAR_BLOCKS, 0), splits))


@triton.jit
def _near_blocks(split, near_splits):
    """Number of a split's blocks among the first NEAR_BLOCKS."""
    return tl.where(split < near_splits, tl.cdiv(NEAR_BLOCKS - split, near_splits), 0)


@triton.jit
def _block(i, split, near, splits, near_splits):
    """The index of a split's i-th block: its first `near` blocks are every `near_splits`-th one below NEAR_BLOCKS, the
    others every `splits`-th one from there on."""
    return tl.where(i < near, split + i * near_splits, NEAR_BLOCKS + split + (i - near) * splits)


@triton.jit
def _blocks_below(end, split, near, splits, near_splits):
    """Number of a split's blocks before block `end`."""
    far = tl.cdiv(tl.maximum(end - NEAR_BLOCKS - split, 0), splits)
    return tl.minimum(tl.cdiv(tl.maximum(end - split, 0), near_splits), near) + far


@triton.jit
def add_split(
    query, text, rows, cut, split, scoring,
    HEAD: tl.constexpr, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, EXACT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The partial sums of one split: its blocks of keys before the border. `text`, `rows` and `cut`: see
    `attention._attend_tile`.

    A block entirely before the border needs no mask, unless keys before it are out of a row's sight.
    """
    keys, values, table, longest, head, kv_heads = text
    end, _first_row, _row, _count, _is_tree, _token, _position, border, oldest = rows
    blocks, splits, near_splits = cut
    DIM: tl.constexpr = query.shape[1]
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD
    top, total, acc = no_keys(query.shape[0], DIM)
    ones = tl.full([BLOCK_N, 8], 1.0, values.dtype.element_ty)
    near = _near_blocks(split, near_splits)
    lowest = lowest_key(oldest, BOUNDED)
    first = _blocks_below(lowest // BLOCK_N, split, near, splits, near_splits) if BOUNDED else 0
    masked = _blocks_below(tl.min(border, 0) // BLOCK_N, split, near, splits, near_splits)
    if BOUNDED:
        masked = tl.where(tl.max(oldest, 0) == 0, masked, first)
    at = tl.arange(0, BLOCK_N)[:, None] * HEAD + dim[None, :]
    # A block's page is looked up one block ahead, so that the lookup does not delay the loads of its keys.
    key0 = _block(first, split, near, splits, near_splits) * BLOCK_N
    page = tl.load(table + tl.minimum(key0 // PAGE, longest - 1)).to(tl.int64)
    for i in range(first, masked):
        base = ((page * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
        key0 = _block(i + 1, split, near, splits, near_splits) * BLOCK_N
        page = tl.load(table + tl.minimum(key0 // PAGE, longest - 1)).to(tl.int64)
        if HEAD == DIM:
            k = tl.load(keys + base + at)
            v = tl.load(values + base + at)
        else:
            k = tl.load(keys + base + at, mask=in_head[None, :], other=0.0)
            v = tl.load(values + base + at, mask=in_head[None, :], other=0.0)
        top, total, acc = add(query, k, v, ones, scoring, True, (top, total, acc), False, EXACT)
    for i in range(masked, _blocks_below(blocks, split, near, splits, near_splits)):
        base = ((page * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
        key = key0 + tl.arange(0, BLOCK_N)
        key0 = _block(i + 1, split, near, splits, near_splits) * BLOCK_N
        page = tl.load(table + tl.minimum(key0 // PAGE, longest - 1)).to(tl.int64)
        k, v = load_keys(keys + base, values + base, at, (key < end) & (key >= lowest) if BOUNDED else key < end, HEAD)
        seen = key[None, :] < border[:, None]
        if BOUNDED:
            seen = seen & (key[None, :] >= oldest[:, None])
        top, total, acc = add(query, k, v, ones, scoring, seen, (top, total, acc), True, EXACT)
    return top, total, acc


@triton.jit
def _next_block(block, split, cut):
    """For a program that handles all splits: the block after this one, its split, and whether it starts a new split."""
    blocks, splits, near_splits = cut
    crossing = tl.where(block + near_splits < NEAR_BLOCKS, block + near_splits, NEAR_BLOCKS + split)
    following = tl.where(block < NEAR_BLOCKS, crossing, block + splits)
    over = following >= blocks
    split += over.to(tl.int32)
    first = tl.where(split < tl.minimum(near_splits, NEAR_BLOCKS), split, NEAR_BLOCKS + split)
    return tl.where(over, first, following), split, over


@triton.jit
def add_all_splits(
    query, text, rows, cut, scoring,
    HEAD: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr, EXACT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The sums of all splits, one after the other, joined in their order. In an invariant step the bits are those of a
    program per split.

    It is one loop over all blocks, so that a split's first keys are loaded while the previous split is added. A block
    is added in parts of PART_N keys, of which `Tiles.stages` are loaded ahead.
    """
    keys, values, table, longest, head, kv_heads = text
    end, _first_row, _row, _count, _is_tree, _token, _position, border, _oldest = rows
    blocks, _splits, _near_splits = cut
    BLOCK_M: tl.constexpr = query.shape[0]
    DIM: tl.constexpr = query.shape[1]
    dim = tl.arange(0, DIM)
    ones = tl.full([PART_N, 8], 1.0, values.dtype.element_ty)
    all_top = tl.full([BLOCK_M], LOWEST, tl.float32)
    all_mass = tl.zeros([BLOCK_M], tl.float32)
    all_acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    top, total, acc = no_keys(BLOCK_M, DIM)
    at = tl.arange(0, PART_N)[:, None] * HEAD + dim[None, :]
    block, split = 0, 0
    page = tl.load(table).to(tl.int64)
    for i in range(0, blocks * (BLOCK_N // PART_N)):
        part = i % (BLOCK_N // PART_N) * PART_N
        key = block * BLOCK_N + part + tl.arange(0, PART_N)
        base = ((page * kv_heads + head) * PAGE + (block * BLOCK_N + part) % PAGE) * HEAD
        last = part == BLOCK_N - PART_N
        next_block, next_split, over = _next_block(block, split, cut)
        block, split = tl.where(last, next_block, block), tl.where(last, next_split, split)
        page = tl.load(table + tl.minimum(block * BLOCK_N // PAGE, longest - 1)).to(tl.int64)
        k, v = load_keys(keys + base, values + base, at, key < end, HEAD)
        seen = key[None, :] < border[:, None]
        top, total, acc = add(query, k, v, ones, scoring, seen, (top, total, acc), True, EXACT)
        if last & over:
            all_top, all_mass, all_acc = join((all_top, all_mass, all_acc), (top, tl.max(total, 1), acc))
            top, total, acc = no_keys(BLOCK_M, DIM)
    return all_top, all_mass, all_acc


@triton.jit
def add_bounded_splits(
    query, text, rows, cut, scoring,
    HEAD: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr, EXACT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """As `add_all_splits`, over the blocks of a sliding window or a chunk only: a loop over splits around a loop over
    the split's blocks. A split that has none of these blocks adds nothing."""
    keys, values, table, longest, head, kv_heads = text
    end, _first_row, _row, _count, _is_tree, _token, _position, border, oldest = rows
    blocks, splits, near_splits = cut
    BLOCK_M: tl.constexpr = query.shape[0]
    DIM: tl.constexpr = query.shape[1]
    PARTS: tl.constexpr = BLOCK_N // PART_N
    dim = tl.arange(0, DIM)
    ones = tl.full([PART_N, 8], 1.0, values.dtype.element_ty)
    all_top = tl.full([BLOCK_M], LOWEST, tl.float32)
    all_mass = tl.zeros([BLOCK_M], tl.float32)
    all_acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    at = tl.arange(0, PART_N)[:, None] * HEAD + dim[None, :]
    lowest = lowest_key(oldest, True)
    for split in range(0, splits_in_use(blocks, splits, near_splits)):
        near = _near_blocks(split, near_splits)
        first = _blocks_below(lowest // BLOCK_N, split, near, splits, near_splits)
        last = _blocks_below(blocks, split, near, splits, near_splits)
        top, total, acc = no_keys(BLOCK_M, DIM)
        block = _block(first, split, near, splits, near_splits)
        page = tl.load(table + tl.minimum(block * BLOCK_N // PAGE, longest - 1)).to(tl.int64)
        for i in range(first * PARTS, last * PARTS):
            key0 = block * BLOCK_N + i % PARTS * PART_N
            base = ((page * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
            key = key0 + tl.arange(0, PART_N)
            block = _block((i + 1) // PARTS, split, near, splits, near_splits)
            page = tl.load(table + tl.minimum(block * BLOCK_N // PAGE, longest - 1)).to(tl.int64)
            k, v = load_keys(keys + base, values + base, at, (key < end) & (key >= lowest), HEAD)
            seen = (key[None, :] < border[:, None]) & (key[None, :] >= oldest[:, None])
            top, total, acc = add(query, k, v, ones, scoring, seen, (top, total, acc), True, EXACT)
        all_top, all_mass, all_acc = join((all_top, all_mass, all_acc), (top, tl.max(total, 1), acc))
    return all_top, all_mass, all_acc
