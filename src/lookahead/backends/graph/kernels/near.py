"""Attention sums over the keys after a tile's prefix: the keys near its rows, and the nodes of its tree.

An invariant step adds them in blocks of 16 positions, along the paths of the tree; other steps add a tree's nodes 32 at
a time (see `attention`, whose `_attend_tile` documents `text` and `rows`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels.paths import LENGTH, TOGETHER
from lookahead.backends.graph.kernels.softmax import add, load_keys, lowest_key, no_keys


@triton.jit
def add_tree(query, text, rows, tree, scoring, sums, HEAD: tl.constexpr, BOUNDED: tl.constexpr, PAGE: tl.constexpr):
    """Add a tree's nodes to `sums`, a word of bits at a time, in a step that need not be invariant.

    `tree`: cells, positions and bits of the step's rows, and words per row of bits.
    """
    keys, values, _table, _longest, head, kv_heads = text
    _end, root, row, count, _is_tree, _token, _position, _border, oldest = rows
    cells, positions, bits, words = tree
    top, total, acc = sums
    dim = tl.arange(0, query.shape[1])
    ones = tl.full([32, 8], 1.0, values.dtype.element_ty)
    for word in range(0, tl.cdiv(count, 32)):
        node = word * 32 + tl.arange(0, 32)
        there = node < count
        cell = tl.load(cells + root + node, mask=there, other=0).to(tl.int64)
        at = ((cell // PAGE * kv_heads + head) * PAGE + cell % PAGE)[:, None] * HEAD + dim[None, :]
        k, v = load_keys(keys, values, at, there, HEAD)
        its_bits = tl.load(bits + row * words + word)
        seen = ((its_bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0
        if BOUNDED:
            other = tl.load(positions + root + node, mask=there, other=0)
            seen = seen & (other[None, :] >= oldest[:, None])
        top, total, acc = add(query, k, v, ones, scoring, seen, (top, total, acc), True, False)
    return top, total, acc


@triton.jit
def add_near(
    query, text, rows, listed, scoring,
    HEAD: tl.constexpr, PART: tl.constexpr, BOUNDED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The partial sums of an invariant step's keys from the border on, in blocks of 16 positions: first those of the
    text, then the paths of the tree (see `paths`), PART keys per product; in fp16 one block, because a weight far below
    the largest of its product is rounded to fewer digits there.

    `listed`: the tile's list of paths, the sizes of its parts, and the tile's first token.
    """
    keys, values, table, _longest, head, kv_heads = text
    end, _first_row, _row, count, is_tree, token, position, border, oldest = rows
    paths, most_paths, most_blocks, first_token = listed
    PART_N: tl.constexpr = LENGTH if values.dtype.element_ty == tl.float16 else PART
    dim = tl.arange(0, query.shape[1])
    top, total, acc = no_keys(query.shape[0], query.shape[1])
    column = tl.arange(0, PART_N)
    ones = tl.full([PART_N, 8], 1.0, values.dtype.element_ty)
    used = tl.load(paths)
    # 1. The text: all of a chunk; up to the root's block in a tree; with the root, if it is alone.
    past = tl.where(is_tree == 0, tl.minimum(end, tl.max(position, 0) + 1), end // LENGTH * LENGTH)
    past = tl.where((is_tree == 1) & (count == 1), end + 1, past)
    lowest = lowest_key(oldest, BOUNDED)
    first = tl.min(border, 0)
    if BOUNDED:
        first = tl.maximum(first, lowest)
    at = column[:, None] * HEAD + dim[None, :]
    for key0 in range(first // PART_N * PART_N, past, PART_N):
        base = ((tl.load(table + key0 // PAGE).to(tl.int64) * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
        key = key0 + column
        there = key < past
        if BOUNDED:
            there = there & (key >= lowest)
        k, v = load_keys(keys + base, values + base, at, there, HEAD)
        seen = there[None, :] & (key[None, :] >= border[:, None]) & (key[None, :] <= position[:, None])
        if BOUNDED:
            seen = seen & (key[None, :] >= oldest[:, None])
        top, total, acc = add(query, k, v, ones, scoring, seen, (top, total, acc), True, True)
    # 2. The paths. The keys of a product are of paths through one block. A row sees one of these, up to itself.
    bases = paths + 1 + LENGTH * most_paths
    path_of = bases + most_paths // TOGETHER + (token - first_token) * most_blocks
    for index in range(0, used, PART_N):
        start = tl.load(bases + index // (LENGTH * TOGETHER))
        its_path = tl.load(path_of + start // LENGTH - end // LENGTH)
        cell = tl.load(paths + 1 + index + column).to(tl.int64)
        key = start + column % LENGTH
        there = cell >= 0
        if BOUNDED:
            there = there & (key >= lowest)
        cell = tl.maximum(cell, 0)
        offset = ((cell // PAGE * kv_heads + head) * PAGE + cell % PAGE)[:, None] * HEAD + dim[None, :]
        k, v = load_keys(keys, values, offset, there, HEAD)
        seen = (its_path[:, None] == (index + column)[None, :] // LENGTH) & (key[None, :] <= position[:, None])
        if BOUNDED:
            seen = seen & (key[None, :] >= oldest[:, None])
        top, total, acc = add(query, k, v, ones, scoring, seen, (top, total, acc), True, True)
    return top, total, acc
