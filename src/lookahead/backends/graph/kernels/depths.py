"""The nodes of an invariant step's trees by depth, once for all layers: `attention` adds one depth after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.tiles import Tiles


@triton.jit
def _by_depth(
    positions, lengths, bits, slots, count, words, size,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (batch, blocks of rows as `_attend` has them). A node that some row of the block sees stands behind the
    sixteens of lesser depths and the nodes of its own depth before it."""
    batch, block = tl.program_id(0), tl.program_id(1)
    slots += (batch * tl.num_programs(1) + block) * size
    node = tl.arange(0, BLOCK)
    there = node < count
    local = tl.arange(0, TOKENS)
    token = block * BLOCK_M // GROUP + local
    inside = (token < count) & (token <= (block * BLOCK_M + BLOCK_M - 1) // GROUP)
    at = (batch * count + token)[:, None] * words + (node // 32)[None, :]
    its_bits = tl.load(bits + at, mask=inside[:, None] & there[None, :], other=0)
    seen = (its_bits >> (node % 32)[None, :]) & 1
    needed = tl.max(seen, 0) != 0
    depth = tl.load(positions + batch * count + node, mask=there, other=0) - tl.load(lengths + batch)
    depth = tl.where(needed, tl.minimum(tl.maximum(depth, 0), count - 1), BLOCK)
    same = depth[:, None] == depth[None, :]
    rank = tl.sum((same & (node[None, :] < node[:, None])).to(tl.int32), 1)
    sizes = tl.sum((depth[None, :] == node[:, None]).to(tl.int32), 1)  # by depth, which is below BLOCK, too
    sixteens = (sizes + 15) // 16
    before = tl.cumsum(sixteens, 0) - sixteens
    slot = 16 * tl.sum(tl.where(depth[:, None] == node[None, :], before[None, :], 0), 1) + rank
    used = 16 * tl.sum(sixteens, 0)
    for i in range(0, tl.cdiv(used, BLOCK)):
        tl.store(slots + 1 + i * BLOCK + node, -1, mask=i * BLOCK + node < used)
    tl.debug_barrier()
    tl.store(slots + 1 + slot, node, mask=needed)
    tl.store(slots, used)
    sights = slots + 1 + 16 * count + local * (count // 4 + 1)
    slot = tl.where(needed, slot, -64)
    sight = (slot % 16 + 1) << (8 * (slot % 64 // 16))
    for word in range(0, tl.cdiv(used, 64)):
        here = tl.where((slot // 64 == word)[None, :], seen * sight[None, :], 0)
        tl.store(sights + word, tl.sum(here, 1), mask=inside)


def new_slots(batch: int, count: int, tiles: Tiles, group: int, device: torch.device) -> torch.Tensor:
    """[B, blocks of rows, ...] int32 for `by_depth`."""
    blocks = triton.cdiv(count * group, tiles.block_m)
    size = 1 + 16 * count + _tokens(tiles, group) * (count // 4 + 1) + 1
    return torch.zeros(batch, blocks, size, dtype=torch.int32, device=device)


def _tokens(tiles: Tiles, group: int) -> int:
    """Room for the tokens of a block of rows; the first and the last may share theirs with the next block."""
    return triton.next_power_of_2(tiles.block_m // group + 2 * (tiles.block_m % group > 0))


def by_depth(
    positions: torch.Tensor, lengths: torch.Tensor, bits: torch.Tensor, slots: torch.Tensor, tiles: Tiles, group: int
) -> torch.Tensor:
    """For each block of rows, the tree's nodes that it sees in sixteens of one depth, of which a row sees at most one.

    slots, see `new_slots`: how many places are used; the nodes, -1 where nobody stands, room for 16 K; and for each
    token of the block K / 4 + 1 words, a byte for every sixteen: 1 more than the place of the node there that it sees.
    """
    batch, count = positions.shape
    _by_depth[(batch, slots.shape[1])](
        positions, lengths, bits, slots, count, bits.shape[2], slots.shape[2], GROUP=group, BLOCK_M=tiles.block_m,
        BLOCK=max(16, triton.next_power_of_2(count)), TOKENS=_tokens(tiles, group), num_warps=8,
    )  # fmt: skip
    return slots
