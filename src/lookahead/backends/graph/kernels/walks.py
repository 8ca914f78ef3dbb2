"""Lists the walks of a step through its rows, and what convolutions read before each row, once for all layers."""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels import state_rows
from lookahead.backends.graph.kernels.records import load_sequence, store_walk
from lookahead.backends.graph.kernels.state_rows import StateRows

NODE, LEAF, FIRST_CHILD, CHUNK = (tl.constexpr(bit) for bit in range(4))
"""Bits of a row's flags: it is a node; one without children; the first child of its parent, or a root; the first row of
a prompt chunk."""
NO_INPUT = tl.constexpr(state_rows.NO_INPUT)
BLOCK_ROWS = 32


@triton.jit
def _locate(sequence_of, sequences, row, inside):
    """Of rows [n]: whether they are used, their sequence's slot, cached tokens, first row, and the row of its root."""
    sequence = tl.load(sequence_of + row, mask=inside, other=-1)
    used = sequence >= 0
    slot, length, chunk, first = load_sequence(sequences, tl.maximum(sequence, 0), used)
    return sequence, used, slot, length, first, first + chunk


@triton.jit
def _flag_rows(sequence_of, parents, sequences, flags, rows, BLOCK: tl.constexpr):
    """Grid: (blocks of rows). Every row looks for its children and its earlier siblings among all rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    sequence, used, _slot, _length, first, root = _locate(sequence_of, sequences, row, inside)
    is_node = used & (row >= root)
    node = row - root
    parent = tl.load(parents + row, mask=is_node, other=-1)
    children = tl.zeros((BLOCK,), tl.int32)
    siblings = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(sequence_of + other, mask=other < rows, other=-1)
        above = tl.load(parents + other, mask=other < rows, other=-1)
        related = (theirs[None, :] == sequence[:, None]) & (above[None, :] >= 0)
        children += tl.sum((related & (above[None, :] == node[:, None])).to(tl.int32), 1)
        before = other[None, :] < row[:, None]
        siblings += tl.sum((related & before & (above[None, :] == parent[:, None])).to(tl.int32), 1)
    found = is_node.to(tl.int32) << NODE
    found |= (is_node & (children == 0)).to(tl.int32) << LEAF
    found |= (is_node & (siblings == 0)).to(tl.int32) << FIRST_CHILD
    found |= (used & (row == first) & (row < root)).to(tl.int32) << CHUNK
    tl.store(flags + row, found, mask=inside)


@triton.jit
def _list_walks(
    sequence_of, parents, sequences, flags, kept_base, above, kept, order, chunk_walks, tree_walks, chunk_count,
    tree_count, rows, ring, width, REACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows). Walks are numbered in the order of their first rows, or of their leaves."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    _sequence, used, slot, length, first, root = _locate(sequence_of, sequences, row, inside)
    # 1. How many nodes, leaves and chunks come before each row.
    nodes = tl.full((), 0, tl.int32)
    leaves = tl.full((), 0, tl.int32)
    chunks = tl.full((), 0, tl.int32)
    for start in range(0, tl.program_id(0) * BLOCK, BLOCK):
        theirs = tl.load(flags + start + tl.arange(0, BLOCK))
        nodes += tl.sum((theirs >> NODE) & 1, 0)
        leaves += tl.sum((theirs >> LEAF) & 1, 0)
        chunks += tl.sum((theirs >> CHUNK) & 1, 0)
    own = tl.load(flags + row, mask=inside, other=0)
    is_node, is_leaf, is_chunk = (own >> NODE) & 1, (own >> LEAF) & 1, (own >> CHUNK) & 1
    node = nodes + tl.cumsum(is_node, 0) - is_node
    leaf = leaves + tl.cumsum(is_leaf, 0) - is_leaf
    chunk = chunks + tl.cumsum(is_chunk, 0) - is_chunk
    # 2. Where each node is kept, and the rows before each row.
    tl.store(kept + row, tl.where(is_node == 1, (tl.load(kept_base) + node) % ring, -1), mask=inside)
    tl.store(order + row, row, mask=inside)
    at = row
    for j in tl.static_range(REACH):
        in_tree = used & (at >= root)
        parent = tl.load(parents + at, mask=in_tree, other=-1)
        at = tl.where(in_tree, root + parent, at - 1)  # the token before a root is the last one of its chunk
        source = tl.where(at >= first, at, at - first)
        source = tl.where(used & (length + at >= first), source, NO_INPUT)
        tl.store(above + row * REACH + j, source, mask=inside)
    # 3. The chunks, and the paths to the leaves.
    fresh = (length == 0).to(tl.int32)
    store_walk(chunk_walks, chunk, slot, fresh, first, root - first, tl.zeros_like(row), is_chunk == 1)
    count = tl.zeros((BLOCK,), tl.int32)
    owned = tl.zeros((BLOCK,), tl.int32)  # nodes that this path writes
    is_own = is_leaf
    at = tl.where(is_leaf == 1, row - root, -1)
    while tl.max(at, 0) >= 0:
        climbing = at >= 0
        count += climbing.to(tl.int32)
        owned += is_own * climbing.to(tl.int32)
        flag = tl.load(flags + root + at, mask=climbing, other=0)
        is_own = is_own & (flag >> FIRST_CHILD) & 1
        at = tl.load(parents + root + at, mask=climbing, other=-1)
    begin = rows + leaf * width
    fresh = (length + root - first == 0).to(tl.int32)
    store_walk(tree_walks, leaf, slot, fresh, begin, count, count - owned, is_leaf == 1)
    at = tl.where(is_leaf == 1, row - root, -1)
    depth = count - 1
    while tl.max(at, 0) >= 0:
        climbing = at >= 0
        tl.store(order + begin + depth, root + at, mask=climbing)
        depth -= 1
        at = tl.load(parents + root + at, mask=climbing, other=-1)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(chunk_count, chunks + tl.sum(is_chunk, 0))
        tl.store(tree_count, leaves + tl.sum(is_leaf, 0))


def list_walks(rows: StateRows) -> None:
    """Compute the walks of a step, what comes before its rows, and where its nodes are kept; see `StateRows`.

    A node's output is written on the way to one of the leaves below it, to which first children lead: a path writes the
    nodes from its leaf up to the first that is not its parent's first child.
    """
    size, reach = rows.above.shape
    grid = (triton.cdiv(size, BLOCK_ROWS),)
    _flag_rows[grid](
        rows.sequence_of, rows.parents, rows.sequences, rows.flags, size, BLOCK=BLOCK_ROWS, num_warps=4,
    )  # fmt: skip
    _list_walks[grid](
        rows.sequence_of, rows.parents, rows.sequences, rows.flags, rows.kept_base, rows.above, rows.kept, rows.order,
        rows.chunk_walks, rows.tree_walks, rows.chunk_count, rows.tree_count, size, rows.ring, rows.most_nodes,
        REACH=reach, BLOCK=BLOCK_ROWS, num_warps=1,
    )  # fmt: skip
