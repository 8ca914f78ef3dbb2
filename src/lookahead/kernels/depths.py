"""The nodes of an invariant step's trees by depth, once for all layers: `attention` adds one depth after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.kernels.tiles import Tiles


@triton.jit
def _by_depth(
    positions, lengths, bits, slots, count, words,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (batch, blocks of rows as `_attend` has them). A node that some row of the block sees stands behind the
    fours of lesser depths and the nodes of its own depth before it."""
    batch, block = tl.program_id(0), tl.program_id(1)
    slots += (batch * tl.num_programs(1) + block) * (4 * count + 1)
    node = tl.arange(0, BLOCK)
    there = node < count
    token = block * BLOCK_M // GROUP + tl.arange(0, TOKENS)
    inside = (token < count) & (token <= (block * BLOCK_M + BLOCK_M - 1) // GROUP)
    at = (batch * count + token)[:, None] * words + (node // 32)[None, :]
    its_bits = tl.load(bits + at, mask=inside[:, None] & there[None, :], other=0)
    needed = tl.max((its_bits >> (node % 32)[None, :]) & 1, 0) != 0
    depth = tl.load(positions + batch * count + node, mask=there, other=0) - tl.load(lengths + batch)
    depth = tl.where(needed, tl.minimum(tl.maximum(depth, 0), count - 1), BLOCK)
    same = depth[:, None] == depth[None, :]
    rank = tl.sum((same & (node[None, :] < node[:, None])).to(tl.int32), 1)
    sizes = tl.sum((depth[None, :] == node[:, None]).to(tl.int32), 1)  # by depth, which is below BLOCK, too
    fours = (sizes + 3) // 4
    before = tl.cumsum(fours, 0) - fours
    start = tl.sum(tl.where(depth[:, None] == node[None, :], before[None, :], 0), 1)
    for i in range(0, 4):
        tl.store(slots + 1 + i * count + node, -1, mask=there)
    tl.debug_barrier()
    tl.store(slots + 1 + 4 * start + rank, node, mask=needed)
    tl.store(slots, 4 * tl.sum(fours, 0))


def new_slots(batch: int, count: int, tiles: Tiles, group: int, device: torch.device) -> torch.Tensor:
    """[B, blocks of rows, 1 + 4 K] int32 for `by_depth`."""
    blocks = triton.cdiv(count * group, tiles.block_m)
    return torch.zeros(batch, blocks, 1 + 4 * count, dtype=torch.int32, device=device)


def by_depth(
    positions: torch.Tensor, lengths: torch.Tensor, bits: torch.Tensor, slots: torch.Tensor, tiles: Tiles, group: int
) -> torch.Tensor:
    """For each block of rows, the tree's nodes that it sees in fours of one depth, of which a row sees at most one.

    slots, see `new_slots`: how many places are used, and then the nodes, -1 where nobody stands.
    """
    batch, count = positions.shape
    _by_depth[(batch, slots.shape[1])](
        positions, lengths, bits, slots, count, bits.shape[2], GROUP=group, BLOCK_M=tiles.block_m,
        BLOCK=max(16, triton.next_power_of_2(count)), TOKENS=triton.next_power_of_2(tiles.block_m // group + 2),
    )  # fmt: skip
    return slots
