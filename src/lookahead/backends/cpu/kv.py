"""The K/V of all sequences. ONNX Runtime reads and writes this memory in place, so a step copies none of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lookahead.backends.cpu.cells import BLOCK, Integers, blocks_for

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class KVBuffer:
    """Keys [n, lanes, blocks, kv_heads, BLOCK, D] and values [..., D + 1] of the n layers with the same kv_heads and D;
    one such pair for each of the shapes (kv_heads, D) that layers have. A lane holds one sequence.

    The last column of the values is 1: the product of the exponentials with it is the sum that softmax divides by.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        """`shapes` are (kv_heads, D) of each layer."""
        self._shapes = list(shapes)
        self._index = [self._shapes[:layer].count(shape) for layer, shape in enumerate(shapes)]  # among its like
        self.lanes, self.blocks = 0, 0
        self._pairs = self._empty(0, 0)

    def _empty(self, lanes: int, blocks: int) -> dict[tuple[int, int], KeysAndValues]:
        """Zeroed memory, because NaN at a masked cell would become 0 * NaN in a sum."""
        pairs = {}
        for heads, dim in dict.fromkeys(self._shapes):
            shape = self._shapes.count((heads, dim)), lanes, blocks, heads, BLOCK
            pairs[heads, dim] = torch.zeros(*shape, dim), torch.zeros(*shape, dim + 1)
            pairs[heads, dim][1][..., dim] = 1
        return pairs

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory: [n, lanes, blocks, ...]."""
        for pair in self._pairs.values():
            yield from pair

    def layer(self, layer: int) -> KeysAndValues:
        """A layer's own keys [lanes, blocks, kv_heads, BLOCK, D] and values [..., D + 1], not copies."""
        keys, values = self._pairs[self._shapes[layer]]
        return keys[self._index[layer]], values[self._index[layer]]

    def reserve(self, lanes: int, blocks: int) -> None:
        """Make room for so many lanes of so many blocks. The content is kept."""
        if lanes <= self.lanes and blocks <= self.blocks:
            return
        if blocks > self.blocks:
            blocks = max(blocks, self.blocks + self.blocks // 4)
        old = list(self.tensors())
        keep_lanes, keep_blocks = self.lanes, self.blocks
        self.lanes, self.blocks = max(lanes, keep_lanes), max(blocks, keep_blocks)
        self._pairs = self._empty(self.lanes, self.blocks)
        for new, kept in zip(self.tensors(), old, strict=True):
            new[:, :keep_lanes, :keep_blocks] = kept

    def move(self, lane: int, source: Integers, target: Integers) -> None:
        """Copy the tokens in the cells `source` to the cells `target` of the same lane, if they are not there yet."""
        away = source != target
        if not away.any():
            return
        start, end = torch.from_numpy(source[away]), torch.from_numpy(target[away])
        for tensor in self.tensors():
            lines = tensor[:, lane]
            moved = lines[:, start // BLOCK, :, start % BLOCK]  # a copy, so both may have cells in common
            lines[:, end // BLOCK, :, end % BLOCK] = moved

    def move_lane(self, source: int, target: int, length: int) -> None:
        """Copy a lane's first `length` tokens over another lane."""
        used = blocks_for(length)
        for tensor in self.tensors():
            tensor[:, target, :used] = tensor[:, source, :used]

    def write(self, lane: int, layer: int, cells: Integers, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's keys and values [kv_heads, n, D] into these n cells."""
        where, (own_keys, own_values) = torch.from_numpy(cells), self.layer(layer)
        own_keys[lane, where // BLOCK, :, where % BLOCK] = keys.transpose(0, 1)
        own_values[lane, where // BLOCK, :, where % BLOCK, :-1] = values.transpose(0, 1)

    def read(self, lane: int, layer: int, cells: Integers) -> KeysAndValues:
        """Copy a layer's keys and values of these cells, each [kv_heads, n, D]."""
        where, (own_keys, own_values) = torch.from_numpy(cells), self.layer(layer)
        keys = own_keys[lane, where // BLOCK, :, where % BLOCK]
        values = own_values[lane, where // BLOCK, :, where % BLOCK, :-1]
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
