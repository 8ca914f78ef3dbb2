"""Sorts the nodes of an invariant step's trees by depth, once for all layers.

`attention` then adds one depth after the other. Nodes of one depth stand in groups of 16, which is how many keys the
matrix units add at once. A token sees at most one node of each depth, so at most one of a group. The root is not among
them: it stands right behind the text, and is added with the text's last tokens.
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
"""Programs of the launch: two per multiprocessor of an H200. Each works on every so many-th tile."""


@triton.jit
def _order_by_depth(
    counts, tiles, positions, places, bits, order, words, size, most_nodes,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles at a time). See `order_by_depth` for the tensors.

    Only nodes below the root that some token of the tile sees get a place: behind all groups of lesser depths, and
    behind the earlier nodes of the same depth. A chunk's tile has no nodes.
    """
    node = tl.arange(0, BLOCK)
    local = tl.arange(0, TOKENS)
    for tile in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        end, root, count, first_query, is_tree, _line = load_tile(tiles, tile, BLOCK_M)
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
        # Nodes per depth. `node` counts depths here: like nodes, they are below BLOCK.
        sizes = tl.sum((depth[None, :] == node[:, None]).to(tl.int32), 1)
        sixteens = (sizes + 15) // 16
        before = tl.cumsum(sixteens, 0) - sixteens
        place = 16 * tl.sum(tl.where(depth[:, None] == node[None, :], before[None, :], 0), 1) + rank
        used = 16 * tl.sum(sixteens, 0)
        for i in range(0, tl.cdiv(used, BLOCK)):
            tl.store(own + 1 + i * BLOCK + node, -1, mask=i * BLOCK + node < used)
        tl.debug_barrier()
        where = tl.load(places + root + node, mask=there, other=0)
        tl.store(own + 1 + place, where, mask=seen_here)
        tl.store(own + 1 + 16 * most_nodes + place // 16, depth, mask=seen_here)
        tl.store(own, used)
        sights = own + 1 + 17 * most_nodes + local * (most_nodes // 4 + 1)
        place = tl.where(seen_here, place, -64)
        sight = (place % 16 + 1) << (8 * (place % 64 // 16))
        for word in range(0, tl.cdiv(used, 64)):
            here = tl.where((place // 64 == word)[None, :], seen * sight[None, :], 0)
            tl.store(sights + word, tl.sum(here, 1), mask=inside)


def order_size(most_nodes: int, tiles: Tiles, group: int) -> int:
    """How many numbers `order_by_depth` has for each tile."""
    return 1 + 17 * most_nodes + _tokens(tiles, group) * (most_nodes // 4 + 1) + 1


def most_nodes_of(rows: int) -> int:
    """The most nodes that a tree of an invariant step of so many rows may have: a power of two from 16 on."""
    return max(16, triton.next_power_of_2(min(rows, INVARIANT_ROWS)))


def _tokens(tiles: Tiles, group: int) -> int:
    """Room for the tokens of a tile, a power of two. Its first and last token may be only partly in it."""
    return triton.next_power_of_2(tiles.block_m // group + 2 * (tiles.block_m % group > 0))


def order_by_depth(rows: Rows, order: torch.Tensor, tiles: Tiles, group: int) -> torch.Tensor:
    """For each tile of a tree, sort the nodes below the root that it sees into groups of 16 nodes of one depth.

    `group`: how many query heads share a K/V head. order [at least T x order_size] gets for each tile:

    - one number: how many places are used, a multiple of 16
    - 16 numbers per node that a tree may have: a node's place in the pages, or -1 where a group is not full
    - a number per node that a tree may have: a group's depth
    - for each token of the tile a byte per group, in words of four: the place within the group of the node that the
      token sees, plus 1, or 0 if it sees none
    """
    size, most = len(rows.positions), most_nodes_of(len(rows.positions))
    _order_by_depth[(min(MOST_PROGRAMS, len(rows.tiles)),)](
        rows.counts, rows.tiles, rows.positions, rows.places, rows.bits, order, rows.bits.shape[1],
        order_size(most, tiles, group), most,
        GROUP=group, BLOCK_M=tiles.block_m, BLOCK=most, TOKENS=_tokens(tiles, group), num_warps=8 if size > 32 else 4,
    )  # fmt: skip
    return order
