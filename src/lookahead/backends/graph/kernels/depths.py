"""Sorts the nodes of an invariant step's trees by depth, once for all layers.

`attention` then adds one depth after the other. The nodes of a depth are in groups of 16, the number of keys that the
matrix units add at once. A token sees at most one node of each depth, so at most one of a group. The root is not
included: it directly follows the text, and is added with the text's last tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.records import load_tile
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.kernels.tiles import Tiles
from lookahead.backends.graph.sizes import INVARIANT_ROWS

MOST_PROGRAMS = 264
"""Programs of the launch: two per multiprocessor of an H200. They share the tiles in turn."""


@triton.jit
def _order_by_depth(
    counts, tiles, positions, cells, bits, order, words, size, most_nodes,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles at a time). See `order_by_depth` for the tensors.

    Only nodes below the root that some token of the tile sees get an index: after all groups of lower depths, and after
    the earlier nodes of the same depth. A chunk's tile has no nodes.
    """
    node = tl.arange(0, BLOCK)
    local = tl.arange(0, TOKENS)
    for tile in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        end, root, count, first_query, is_tree, _slot = load_tile(tiles, tile, BLOCK_M)
        count *= is_tree
        own = order + tile * size
        there = node < count
        token = first_query // GROUP + local
        inside = (token < count) & (token <= (first_query + BLOCK_M - 1) // GROUP)
        at = (root + token)[:, None] * words + (node // 32)[None, :]
        its_bits = tl.load(bits + at, mask=inside[:, None] & there[None, :], other=0)
        seen = (its_bits >> (node % 32)[None, :]) & 1
        seen_here = (tl.max(seen, 0) != 0) & (node > 0)
        depth = tl.load(positions + root + node, mask=there, other=0) - end
        depth = tl.where(seen_here, tl.minimum(tl.maximum(depth, 0), BLOCK - 1), BLOCK)
        same = depth[:, None] == depth[None, :]
        rank = tl.sum((same & (node[None, :] < node[:, None])).to(tl.int32), 1)
        # Nodes per depth. `node` enumerates depths here: like nodes, they are below BLOCK.
        sizes = tl.sum((depth[None, :] == node[:, None]).to(tl.int32), 1)
        sixteens = (sizes + 15) // 16
        before = tl.cumsum(sixteens, 0) - sixteens
        index = 16 * tl.sum(tl.where(depth[:, None] == node[None, :], before[None, :], 0), 1) + rank
        used = 16 * tl.sum(sixteens, 0)
        for i in range(0, tl.cdiv(used, BLOCK)):
            tl.store(own + 1 + i * BLOCK + node, -1, mask=i * BLOCK + node < used)
        tl.debug_barrier()
        cell = tl.load(cells + root + node, mask=there, other=0)
        tl.store(own + 1 + index, cell, mask=seen_here)
        tl.store(own + 1 + 16 * most_nodes + index // 16, depth, mask=seen_here)
        tl.store(own, used)
        sights = own + 1 + 17 * most_nodes + local * (most_nodes // 4 + 1)
        index = tl.where(seen_here, index, -64)
        sight = (index % 16 + 1) << (8 * (index % 64 // 16))
        for word in range(0, tl.cdiv(used, 64)):
            here = tl.where((index // 64 == word)[None, :], seen * sight[None, :], 0)
            tl.store(sights + word, tl.sum(here, 1), mask=inside)


def order_size(most_nodes: int, tiles: Tiles, group: int) -> int:
    """Numbers per tile in the output of `order_by_depth`."""
    return 1 + 17 * most_nodes + _tokens(tiles, group) * (most_nodes // 4 + 1) + 1


def most_nodes_of(rows: int) -> int:
    """Maximum nodes of a tree in an invariant step of this many rows, rounded up to a power of two, at least 16."""
    return max(16, triton.next_power_of_2(min(rows, INVARIANT_ROWS)))


def _tokens(tiles: Tiles, group: int) -> int:
    """Maximum tokens of a tile, rounded up to a power of two. Its first and last token may be only partly in it."""
    return triton.next_power_of_2(tiles.block_m // group + 2 * (tiles.block_m % group > 0))


def order_by_depth(rows: Rows, order: torch.Tensor, tiles: Tiles, group: int) -> torch.Tensor:
    """For each tile of a tree, sort the nodes below the root that it sees into groups of 16 nodes of one depth.

    `group`: query heads per K/V head. order [at least T x order_size] receives for each tile:

    - one number: the length of the ordered list, a multiple of 16
    - 16 numbers per possible node: the ordered nodes' K/V cells, or -1 where a group is not full
    - a number per possible node: a group's depth
    - for each token of the tile a byte per group (its *sight*), in words of four: the index within the group of the
      node that the token sees, plus 1, or 0 if it sees none
    """
    size, most = len(rows.positions), most_nodes_of(len(rows.positions))
    _order_by_depth[(min(MOST_PROGRAMS, len(rows.tiles)),)](
        rows.counts, rows.tiles, rows.positions, rows.cells, rows.bits, order, rows.bits.shape[1],
        order_size(most, tiles, group), most,
        GROUP=group, BLOCK_M=tiles.block_m, BLOCK=most, TOKENS=_tokens(tiles, group), num_warps=8 if size > 32 else 4,
    )  # fmt: skip
    return order
