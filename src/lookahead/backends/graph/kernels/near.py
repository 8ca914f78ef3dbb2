"""Sums over what stands behind a tile's prefix: the keys near its rows, and the nodes of its tree.

An invariant step adds them one by one, in the order of positions; another step adds a tree's nodes 32 at a time (see
`attention`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels.softmax import add, add_singly, load_keys, no_keys


@triton.jit
def add_tree(
    query, keys, values, places, positions, bits, words, head, kv_heads, root, row, count, position, scale, top, total,
    acc, HEAD: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Add a tree's nodes, a word of bits at a time, in a step that need not be invariant."""
    dim = tl.arange(0, DIM)
    ones = tl.full([32, 8], 1.0, values.dtype.element_ty)
    for word in range(0, tl.cdiv(count, 32)):
        node = word * 32 + tl.arange(0, 32)
        there = node < count
        where = tl.load(places + root + node, mask=there, other=0).to(tl.int64)
        at = ((where // PAGE * kv_heads + head) * PAGE + where % PAGE)[:, None] * HEAD + dim[None, :]
        k, v = load_keys(keys, values, at, there, HEAD, DIM)
        its_bits = tl.load(bits + row * words + word)
        seen = ((its_bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0
        if WINDOW > 0:
            other = tl.load(positions + root + node, mask=there, other=0)
            seen = seen & (position[:, None] - other[None, :] < WINDOW)
        top, total, acc = add(query, k, v, ones, scale, seen, top, total, acc, True, False)
    return top, total, acc


@triton.jit
def add_near(
    query, keys, values, table, order, most_nodes, head, kv_heads, end, is_tree, token, first_token, position, border,
    scale, HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, PART_N: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """The partial sums of an invariant step's near keys, added one by one: first those from the border on, up to the
    row itself in a trail and up to the root in a tree; then the tree's other nodes by depth, in groups of 16 nodes of
    one depth (see `depths`), PART_N nodes per product. `order` is the tile's own."""
    dim = tl.arange(0, DIM)
    top, total, acc = no_keys(BLOCK_M, DIM)
    used = tl.load(order)
    # A token sees at most one node of a group. Its sights hold a byte per group: that node's place plus 1, or 0.
    sights = order + 1 + 17 * most_nodes + (token - first_token) * (most_nodes // 4 + 1)
    next_sight = tl.load(sights)
    past_root = end + is_tree  # the root stands right behind the text before it
    for key0 in range(tl.min(border, 0), tl.minimum(past_root, tl.max(position, 0) + 1), 16):
        base = ((tl.load(table + key0 // PAGE).to(tl.int64) * kv_heads + head) * PAGE + key0 % PAGE) * HEAD
        key = key0 + tl.arange(0, 16)
        there = key < past_root
        at = tl.arange(0, 16)[:, None] * HEAD + dim[None, :]
        k, v = load_keys(keys + base, values + base, at, there, HEAD, DIM)
        seen = there[None, :] & (key[None, :] >= border[:, None]) & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        top, total, acc = add_singly(query, k, v, scale, seen, top, total, acc)
    column = tl.arange(0, PART_N)
    ones = tl.full([PART_N, 8], 1.0, values.dtype.element_ty)
    turn, place_there = 8 * (column // 16), column % 16 + 1
    for first_place in range(0, used, PART_N):
        sight = next_sight >> (first_place % 64 // 2)
        next_sight = tl.load(sights + (first_place + PART_N) // 64)
        there = first_place + column < used
        where = tl.load(order + 1 + first_place + column, mask=there, other=-1).to(tl.int64)
        there = where >= 0
        where = tl.maximum(where, 0)
        at = ((where // PAGE * kv_heads + head) * PAGE + where % PAGE)[:, None] * HEAD + dim[None, :]
        k, v = load_keys(keys, values, at, there, HEAD, DIM)
        seen = ((sight[:, None] >> turn[None, :]) & 255) == place_there[None, :]
        if WINDOW > 0:
            depth = tl.load(order + 1 + 16 * most_nodes + (first_place + column) // 16, mask=there, other=0)
            seen = seen & (position[:, None] - end - depth[None, :] < WINDOW)
        top, total, acc = add(query, k, v, ones, scale, seen, top, total, acc, True, True)
    return top, total, acc
