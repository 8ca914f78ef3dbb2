"""Lists the paths that an invariant step's trees are read along, once for all layers.

`attention` adds a row's last keys in blocks of 16 positions, the number of keys that the matrix units add at once. Of a
block that reaches into the tree, a row sees the positions of its own path. So each of these paths is listed with the
K/V cells of its 16 positions, and a row sees those up to its own position. Rows on the same path share it: a row that
is not the last of its block takes the path to its deepest descendant there.

    positions      64 ...  75 | root 76, 77, 78, 79 | 80, 81, ...
    paths of block 4:         cells of 64 to 75, of the root, and of three nodes; one path for each node at 79 or leaf
    paths of block 5:         cells of nodes at 80, 81, ...; one path for each leaf there
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.records import load_tile
from lookahead.backends.graph.kernels.rows import PATH, Rows
from lookahead.backends.graph.kernels.tiles import Tiles
from lookahead.backends.graph.sizes import INVARIANT_NODES

MOST_PROGRAMS = 264
"""Programs of the launch: two per multiprocessor of an H200. They share the tiles in turn."""
TOGETHER = tl.constexpr(4)
"""The paths of a block are padded to a multiple of this, so that the keys of one product are all of one block."""
LENGTH = tl.constexpr(PATH)


@triton.jit
def _list_paths(
    counts, tiles, positions, bits, paths, lists, words, size, most_paths, most_blocks,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles at a time). See `list_paths` for the tensors. A chunk has no paths, and neither has a root alone,
    which directly follows the text."""
    node = tl.arange(0, BLOCK)
    local = tl.arange(0, TOKENS)
    for tile in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        # 1. Who sees whom: the tokens of the tile, and all nodes.
        end, root, count, first_query, is_tree, _slot = load_tile(tiles, tile, BLOCK_M)
        count = tl.where(count > 1, count, 0) * is_tree
        there = node < count
        token = first_query // GROUP + local
        inside = (token < count) & (token <= (first_query + BLOCK_M - 1) // GROUP)
        pairs = inside[:, None] & there[None, :]
        its_bits = tl.load(bits + (root + token)[:, None] * words + (node // 32)[None, :], mask=pairs, other=0)
        is_above = ((its_bits >> (node % 32)[None, :]) & 1) != 0
        its_bits = tl.load(bits + (root + node)[None, :] * words + (token // 32)[:, None], mask=pairs, other=0)
        is_below = ((its_bits >> (token % 32)[:, None]) & 1) != 0
        position = tl.load(positions + root + node, mask=there, other=0)
        block, place = position // LENGTH - end // LENGTH, position % LENGTH
        own_block = tl.load(positions + root + token, mask=inside, other=0) // LENGTH - end // LENGTH
        # 2. The nodes that paths lead to: of a token's own block its deepest descendant, the first of several; of an
        # earlier block its ancestor at the last position.
        key = tl.where(is_below & (block[None, :] == own_block[:, None]), (LENGTH - place) * BLOCK + node, 1 << 30)
        deepest = tl.min(key, 1) % BLOCK
        passed = is_above & (place == LENGTH - 1)[None, :] & (block[None, :] < own_block[:, None])
        leads = passed | ((node[None, :] == deepest[:, None]) & inside[:, None])
        is_end = tl.max(leads.to(tl.int32), 0) != 0
        # 3. Their order: by block, then by node.
        own = lists + tile * size
        bases = own + 1 + LENGTH * most_paths
        path_of = bases + most_paths // TOGETHER + local * most_blocks
        number = tl.full([BLOCK], 0, tl.int32)
        before = tl.full((), 0, tl.int32)
        for i in range(0, tl.max(tl.where(is_end, block, -1), 0) + 1):
            here = is_end & (block == i)
            rank = tl.cumsum(here.to(tl.int32), 0)
            number = tl.where(here, before + rank - 1, number)
            chosen = tl.where(leads & here[None, :], number[None, :], -1)
            tl.store(path_of + i, tl.max(chosen, 1), mask=inside)
            batches = tl.cdiv(tl.max(rank, 0), TOGETHER)
            batch = tl.arange(0, BLOCK)
            tl.store(bases + before // TOGETHER + batch, (end // LENGTH + i) * LENGTH, mask=batch < batches)
            before += batches * TOGETHER
        # 4. Their cells.
        for i in range(0, tl.cdiv(before * LENGTH, BLOCK)):
            tl.store(own + 1 + i * BLOCK + node, -1, mask=i * BLOCK + node < before * LENGTH)
        tl.debug_barrier()
        at = tl.arange(0, LENGTH)
        cell = tl.load(paths + (root + node)[:, None] * LENGTH + at[None, :], mask=is_end[:, None], other=-1)
        tl.store(own + 1 + number[:, None] * LENGTH + at[None, :], cell, mask=is_end[:, None])
        tl.store(own, before * LENGTH)


def most_nodes_of(rows: int) -> int:
    """Maximum nodes of a tree in an invariant step of this many rows, rounded up to a power of two, at least 16."""
    return max(16, triton.next_power_of_2(min(rows, INVARIANT_NODES)))


def most_blocks_of(nodes: int) -> int:
    """Maximum number of blocks of 16 positions that a tree of this many nodes reaches into."""
    return (nodes + PATH - 2) // PATH + 1


def most_paths_of(nodes: int) -> int:
    """Maximum number of listed paths of a tree of this many nodes, with their padding."""
    return nodes + TOGETHER.value * most_blocks_of(nodes)


def list_size(nodes: int, tiles: Tiles, group: int) -> int:
    """Numbers per tile in the output of `list_paths`."""
    most = most_paths_of(nodes)
    return 1 + PATH * most + most // TOGETHER.value + _tokens(tiles, group) * most_blocks_of(nodes)


def _tokens(tiles: Tiles, group: int) -> int:
    """Maximum tokens of a tile, rounded up to a power of two, at least 16. Its first and last token may be only partly
    in it."""
    return max(16, triton.next_power_of_2(tiles.block_m // group + 2 * (tiles.block_m % group > 0)))


def list_paths(rows: Rows, lists: torch.Tensor, tiles: Tiles, group: int) -> torch.Tensor:
    """For each tile of a tree, list the paths that its tokens see, block by block of 16 positions.

    `group`: query heads per K/V head. lists [at least T x list_size] receives for each tile:

    - one number: the length of the next list
    - for each path the K/V cells of its 16 positions, or -1 after its end; -1 also for paths that pad a block
    - for each four paths the first position of their block
    - for each token of the tile, and each block from the root's on: the index of the token's path, or -1
    """
    size = len(rows.positions)
    nodes = most_nodes_of(size)
    _list_paths[(min(MOST_PROGRAMS, len(rows.tiles)),)](
        rows.counts, rows.tiles, rows.positions, rows.bits, rows.paths, lists, rows.bits.shape[1],
        list_size(nodes, tiles, group), most_paths_of(nodes), most_blocks_of(nodes),
        GROUP=group, BLOCK_M=tiles.block_m, BLOCK=nodes, TOKENS=_tokens(tiles, group), num_warps=8 if size > 32 else 4,
    )  # fmt: skip
    return lists
