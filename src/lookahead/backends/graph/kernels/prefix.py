"""Sums over the prefix of a tile's sequence, block of keys after block of keys: of one split, or of all of them.

The prefix lies in pages. Of n splits, each takes every n-th block (see `attention`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels.softmax import LOWEST, add, join, load_keys, no_keys


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


@triton.jit
def add_split(
    query, keys, values, table, longest, head, kv_heads, end, position, border, blocks, split, splits, near_splits,
    scale,
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    EXACT: tl.constexpr, FAR: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The partial sums of one split: its blocks of keys before the border. `table` are the sequence's pages.

    A block that lies whole before the border needs no mask, unless there is a sliding window.
    """
    dim = tl.arange(0, DIM)
    whole = dim < HEAD
    top, total, acc = no_keys(BLOCK_M, DIM)
    ones = tl.full([BLOCK_N, 8], 1.0, values.dtype.element_ty)
    near = tl.where(split < near_splits, tl.cdiv(FAR - split, near_splits), 0)
    whole_blocks = tl.min(border, 0) // BLOCK_N if WINDOW == 0 else 0
    first = _blocks_below(whole_blocks, split, near, splits, near_splits, FAR)
    at = tl.arange(0, BLOCK_N)[:, None] * HEAD + dim[None, :]
    # A block's page is looked up while the block before it is added. (Looked up when it is needed, nothing else would
    # be loaded in the meantime.)
    key0 = _block(0, split, near, splits, near_splits, FAR) * BLOCK_N
    page = tl.load(table + tl.minimum(key0 // PAGE, longest - 1)).to(tl.int64)
    for i in range(0, first):
        base = ((page * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
        key0 = _block(i + 1, split, near, splits, near_splits, FAR) * BLOCK_N
        page = tl.load(table + tl.minimum(key0 // PAGE, longest - 1)).to(tl.int64)
        if HEAD == DIM:
            k = tl.load(keys + base + at)
            v = tl.load(values + base + at)
        else:
            k = tl.load(keys + base + at, mask=whole[None, :], other=0.0)
            v = tl.load(values + base + at, mask=whole[None, :], other=0.0)
        top, total, acc = add(query, k, v, ones, scale, True, top, total, acc, False, EXACT)
    for i in range(first, _blocks_below(blocks, split, near, splits, near_splits, FAR)):
        base = ((page * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
        key = key0 + tl.arange(0, BLOCK_N)
        key0 = _block(i + 1, split, near, splits, near_splits, FAR) * BLOCK_N
        page = tl.load(table + tl.minimum(key0 // PAGE, longest - 1)).to(tl.int64)
        k, v = load_keys(keys + base, values + base, at, key < end, HEAD, DIM)
        seen = key[None, :] < border[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        top, total, acc = add(query, k, v, ones, scale, seen, top, total, acc, True, EXACT)
    return top, total, acc


@triton.jit
def _next_block(block, split, blocks, splits, near_splits, FAR: tl.constexpr):
    """Where one program does all splits: the block after this one, its split, and whether that split begins with it."""
    crossing = tl.where(block + near_splits < FAR, block + near_splits, FAR + split)
    following = tl.where(block < FAR, crossing, block + splits)
    over = following >= blocks
    split += over.to(tl.int32)
    first = tl.where(split < tl.minimum(near_splits, FAR), split, FAR + split)
    return tl.where(over, first, following), split, over


@triton.jit
def add_all_splits(
    query, keys, values, table, longest, head, kv_heads, end, position, border, blocks, splits, near_splits, scale,
    HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr,
    WINDOW: tl.constexpr, EXACT: tl.constexpr, FAR: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The sums of all splits, one after the other, joined in their order. In an invariant step the bits are those of a
    program per split.

    It is one loop over all blocks, so that a split's first keys are loaded while the split before it is added. A block
    is added in parts of PART_N keys; how many of them are loaded ahead, `Tiles.stages` says.
    """
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
        next_block, next_split, over = _next_block(block, split, blocks, splits, near_splits, FAR)
        block, split = tl.where(last, next_block, block), tl.where(last, next_split, split)
        page = tl.load(table + tl.minimum(block * BLOCK_N // PAGE, longest - 1)).to(tl.int64)
        k, v = load_keys(keys + base, values + base, at, key < end, HEAD, DIM)
        seen = key[None, :] < border[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        top, total, acc = add(query, k, v, ones, scale, seen, top, total, acc, True, EXACT)
        if last & over:
            all_top, all_mass, all_acc = join(all_top, all_mass, all_acc, top, tl.max(total, 1), acc)
            top, total, acc = no_keys(BLOCK_M, DIM)
    return all_top, all_mass, all_acc
