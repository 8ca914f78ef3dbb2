"""Sorts the nodes of an invariant step's trees by depth, once for all layers.

`attention` then adds one depth after the other. Nodes of one depth stand in groups of 16, which is how many keys the
matrix units add at once. A token sees at most one node of each depth, so at most one of a group.
"""

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
    """Grid: (batch, blocks of queries as in `attention._attend`). See `order_by_depth` for the tensors.

    Only nodes that some token of the block sees get a place: behind all groups of lesser depths, and behind the earlier
    nodes of the same depth.
    """
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
    # Nodes per depth. `node` counts depths here: like nodes, they are below BLOCK.
    sizes = tl.sum((depth[None, :] == node[:, None]).to(tl.int32), 1)
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
    """Memory for `order_by_depth`: int32 [B, blocks of queries, 1 + 16 K + tokens per block x (K / 4 + 1) + 1]."""
    blocks = triton.cdiv(count * group, tiles.block_m)
    size = 1 + 16 * count + _tokens(tiles, group) * (count // 4 + 1) + 1
    return torch.zeros(batch, blocks, size, dtype=torch.int32, device=device)


def _tokens(tiles: Tiles, group: int) -> int:
    """Room for the tokens of a block of queries, a power of two. Its first and last token may be only partly in it."""
    return triton.next_power_of_2(tiles.block_m // group + 2 * (tiles.block_m % group > 0))


def order_by_depth(
    positions: torch.Tensor, lengths: torch.Tensor, bits: torch.Tensor, order: torch.Tensor, tiles: Tiles, group: int
) -> torch.Tensor:
    """For each block of queries, sort the nodes that it sees into groups of 16 nodes of one depth.

    positions [B, K], lengths [B], bits [B, K, ceil(K/32)], all int32, as for `attention.attend`. `group`: how many
    query heads share a K/V head. order, made by `new_order`, gets for each block:

    - one number: how many places are used, a multiple of 16
    - 16 K places: a node, or -1 where a group is not full
    - for each token of the block K / 4 + 1 words, one byte per group: the place within the group of the node that the
      token sees, plus 1, or 0 if it sees none
    """
    batch, count = positions.shape
    _order_by_depth[(batch, order.shape[1])](
        positions, lengths, bits, order, count, bits.shape[2], order.shape[2], GROUP=group, BLOCK_M=tiles.block_m,
        BLOCK=max(16, triton.next_power_of_2(count)), TOKENS=_tokens(tiles, group), num_warps=8,
    )  # fmt: skip
    return order
