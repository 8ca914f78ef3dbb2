"""The K/V of all sequences. ONNX Runtime reads and writes this memory in place, so a step copies none of it."""

from __future__ import annotations

import torch

from lookahead.backends.cpu.cells import BLOCK, Integers, blocks_for


class KVBuffer:
    """Keys [layers, lanes, blocks, heads, BLOCK, D] and values [..., D + 1]. A lane holds one sequence.

    The last column of the values is 1: the product of the exponentials with it is the sum that softmax divides by.
    """

    def __init__(self, layers: int, heads: int, dim: int) -> None:
        self._shape = layers, heads, dim
        self.lanes, self.blocks = 0, 0
        self.keys, self.values = self._empty(0, 0)

    def _empty(self, lanes: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed memory, because NaN at a masked cell would become 0 * NaN in a sum."""
        layers, heads, dim = self._shape
        keys = torch.zeros(layers, lanes, blocks, heads, BLOCK, dim)
        values = torch.zeros(layers, lanes, blocks, heads, BLOCK, dim + 1)
        values[..., dim] = 1
        return keys, values

    def reserve(self, lanes: int, blocks: int) -> None:
        """Make room for so many lanes of so many blocks. The content is kept."""
        if lanes <= self.lanes and blocks <= self.blocks:
            return
        if blocks > self.blocks:
            blocks = max(blocks, self.blocks + self.blocks // 4)
        old = self.keys, self.values
        keep_lanes, keep_blocks = self.lanes, self.blocks
        self.lanes, self.blocks = max(lanes, keep_lanes), max(blocks, keep_blocks)
        self.keys, self.values = self._empty(self.lanes, self.blocks)
        for new, kept in zip((self.keys, self.values), old, strict=True):
            new[:, :keep_lanes, :keep_blocks] = kept

    def move(self, lane: int, source: Integers, target: Integers) -> None:
        """Copy the tokens in the cells `source` to the cells `target` of the same lane, if they are not there yet."""
        away = source != target
        if not away.any():
            return
        start, end = torch.from_numpy(source[away]), torch.from_numpy(target[away])
        for tensor in (self.keys, self.values):
            lines = tensor[:, lane]
            moved = lines[:, start // BLOCK, :, start % BLOCK]  # a copy, so both may have cells in common
            lines[:, end // BLOCK, :, end % BLOCK] = moved

    def move_lane(self, source: int, target: int, length: int) -> None:
        """Copy a lane's first `length` tokens over another lane."""
        used = blocks_for(length)
        for tensor in (self.keys, self.values):
            tensor[:, target, :used] = tensor[:, source, :used]

    def write(self, lane: int, layer: int, cells: Integers, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's keys and values [heads, n, D] into these n cells."""
        where = torch.from_numpy(cells)
        self.keys[layer, lane, where // BLOCK, :, where % BLOCK] = keys.transpose(0, 1)
        self.values[layer, lane, where // BLOCK, :, where % BLOCK, :-1] = values.transpose(0, 1)

    def read(self, lane: int, layer: int, cells: Integers) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a layer's keys and values of these cells, each [heads, n, D]."""
        where = torch.from_numpy(cells)
        keys = self.keys[layer, lane, where // BLOCK, :, where % BLOCK]
        values = self.values[layer, lane, where // BLOCK, :, where % BLOCK, :-1]
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
