"""Attention sums over the keys after a tile's prefix: the keys near its rows, and the nodes of its tree.

An invariant step adds them one by one, in the order of positions; other steps add a tree's nodes 32 at a time (see
`attention`, whose `_attend_tile` documents `text` and `rows`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels.softmax import add, add_singly, load_keys, lowest_key, no_keys


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
    query, text, rows, by_depth, scoring,
    HEAD: tl.constexpr, PART_N: tl.constexpr, BOUNDED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The partial sums of an invariant step's near keys, added one by one: first those from the border on, up to the
    row itself in a chunk and up to the root in a tree; then the tree's other nodes by depth, in groups of 16 nodes of
    one depth (see `depths`), PART_N nodes per product. `by_depth`: the tile's part of `order`, the maximum number of
    nodes of a tree, and the tile's first token."""
    keys, values, table, _longest, head, kv_heads = text
    end, _first_row, _row, _count, is_tree, token, position, border, oldest = rows
    order, most_nodes, first_token = by_depth
    dim = tl.arange(0, query.shape[1])
    top, total, acc = no_keys(query.shape[0], query.shape[1])
    used = tl.load(order)
    # A token sees at most one node of a group. Its sights hold a byte per group: that node's index plus 1, or 0.
    sights = order + 1 + 17 * most_nodes + (token - first_token) * (most_nodes // 4 + 1)
    next_sight = tl.load(sights)
    past_root = end + is_tree  # the root directly follows the text
    lowest = lowest_key(oldest, BOUNDED)
    first = tl.min(border, 0)
    if BOUNDED:
        first = tl.maximum(first, lowest // 16 * 16)
    for key0 in range(first, tl.minimum(past_root, tl.max(position, 0) + 1), 16):
        base = ((tl.load(table + key0 // PAGE).to(tl.int64) * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
        key = key0 + tl.arange(0, 16)
        there = key < past_root
        if BOUNDED:
            there = there & (key >= lowest)
        at = tl.arange(0, 16)[:, None] * HEAD + dim[None, :]
        k, v = load_keys(keys + base, values + base, at, there, HEAD)
        seen = there[None, :] & (key[None, :] >= border[:, None]) & (key[None, :] <= position[:, None])
        if BOUNDED:
            seen = seen & (key[None, :] >= oldest[:, None])
        top, total, acc = add_singly(query, k, v, scoring, seen, (top, total, acc))
    column = tl.arange(0, PART_N)
    ones = tl.full([PART_N, 8], 1.0, values.dtype.element_ty)
    byte_shift, own_sight = 8 * (column // 16), column % 16 + 1
    for first_index in range(0, used, PART_N):
        sight = next_sight >> (first_index % 64 // 2)
        next_sight = tl.load(sights + (first_index + PART_N) // 64)
        there = first_index + column < used
        cell = tl.load(order + 1 + first_index + column, mask=there, other=-1).to(tl.int64)
        there = cell >= 0
        cell = tl.maximum(cell, 0)
        at = ((cell // PAGE * kv_heads + head) * PAGE + cell % PAGE)[:, None] * HEAD + dim[None, :]
        k, v = load_keys(keys, values, at, there, HEAD)
        seen = ((sight[:, None] >> byte_shift[None, :]) & 255) == own_sight[None, :]
        if BOUNDED:
            depth = tl.load(order + 1 + 16 * most_nodes + (first_index + column) // 16, mask=there, other=0)
            seen = seen & (end + depth[None, :] >= oldest[:, None])
        top, total, acc = add(query, k, v, ones, scoring, seen, (top, total, acc), True, True)
    return top, total, acc
