"""The nodes of an invariant step's trees by depth, once for all layers: `attention` adds one depth after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.tiles import Tiles


@triton.jit
def _order_by_depth(
    positions, lengths, bits, order, count, words, size,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (batch, blocks of rows as `_attend` has them). A node that some row of the block sees stands behind the
    sixteens of lesser depths and the nodes of its own depth before it."""
    batch, block = tl.program_id(0), tl.program_id(1)
    order += (batch * tl.num_programs(1) + block) * size
    node = tl.arange(0, BLOCK)
    there = node < count
    local = tl.arange(0, TOKENS)
    token = block * BLOCK_M // GROUP + local
    inside = (token < count) & (token <= (block * BLOCK_M + BLOCK_M - 1) // GROUP)
    at = (batch * count + token)[:, None] * words + (node // 32)[None, :]
    its_bits = tl.load(bits + at, mask=inside[:, None] & there[None, :], other=0)
    seen = (its_bits >> (node % 32)[None, :]) & 1
    seen_here = tl.max(seen, 0) != 0
    depth = tl.load(positions + batch * count + node, mask=there, other=0) - tl.load(lengths + batch)
    depth = tl.where(seen_here, tl.minimum(tl.maximum(depth, 0), count - 1), BLOCK)
    same = depth[:, None] == depth[None, :]
    rank = tl.sum((same & (node[None, :] < node[:, None])).to(tl.int32), 1)
    sizes = tl.sum((depth[None, :] == node[:, None]).to(tl.int32), 1)  # by depth, which is below BLOCK, too
    sixteens = (sizes + 15) // 16
    before = tl.cumsum(sixteens, 0) - sixteens
    place = 16 * tl.sum(tl.where(depth[:, None] == node[None, :], before[None, :], 0), 1) + rank
    used = 16 * tl.sum(sixteens, 0)
    for i in range(0, tl.cdiv(used, BLOCK)):
        tl.store(order + 1 + i * BLOCK + node, -1, mask=i * BLOCK + node < used)
    tl.debug_barrier()
    tl.store(order + 1 + place, node, mask=seen_here)
    tl.store(order, used)
    sights = order + 1 + 16 * count + local * (count // 4 + 1)
    place = tl.where(seen_here, place, -64)
    sight = (place % 16 + 1) << (8 * (place % 64 // 16))
    for word in range(0, tl.cdiv(used, 64)):
        here = tl.where((place // 64 == word)[None, :], seen * sight[None, :], 0)
        tl.store(sights + word, tl.sum(here, 1), mask=inside)


def new_order(batch: int, count: int, tiles: Tiles, group: int, device: torch.device) -> torch.Tensor:
    """[B, blocks of rows, ...] int32 for `order_by_depth`."""
    blocks = triton.cdiv(count * group, tiles.block_m)
    size = 1 + 16 * count + _tokens(tiles, group) * (count // 4 + 1) + 1
    return torch.zeros(batch, blocks, size, dtype=torch.int32, device=device)


def _tokens(tiles: Tiles, group: int) -> int:
    """Room for the tokens of a block of rows; the first and the last may share theirs with the next block."""
    return triton.next_power_of_2(tiles.block_m // group + 2 * (tiles.block_m % group > 0))


def order_by_depth(
    positions: torch.Tensor, lengths: torch.Tensor, bits: torch.Tensor, order: torch.Tensor, tiles: Tiles, group: int
) -> torch.Tensor:
    """For each block of rows, the tree's nodes that it sees in sixteens of one depth, of which a row sees at most one.

    order, see `new_order`: how many places are used; the nodes, -1 where nobody stands, room for 16 K; and for each
    token of the block K / 4 + 1 words, a byte for every sixteen: 1 more than the place of the node there that it sees.
    """
    batch, count = positions.shape
    _order_by_depth[(batch, order.shape[1])](
        positions, lengths, bits, order, count, bits.shape[2], order.shape[2], GROUP=group, BLOCK_M=tiles.block_m,
        BLOCK=max(16, triton.next_power_of_2(count)), TOKENS=_tokens(tiles, group), num_warps=8,
    )  # fmt: skip
    return order
