"""The K/V of all sequences. ONNX Runtime reads and writes this memory in place, so a step copies none of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from lookahead.backends.batched import is_excess
from lookahead.backends.cpu.cells import BLOCK, Integers, blocks_for

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class KVBuffer:
    """Keys [n, sequences, blocks, kv_heads, BLOCK, D] and values [..., D + 1] of n layers with equal kv_heads and D;
    one such pair for each of the shapes (kv_heads, D) that layers have.

    The last column of the values is 1: the product of the exponentials with it is the sum that softmax divides by.
    """

    def __init__(self, shapes: Mapping[int, tuple[int, int]]) -> None:
        """`shapes` are (kv_heads, D) of each layer that has its own K/V, by the layer's index."""
        self._shapes = dict(shapes)
        alike = list(self._shapes.values())
        self._index = {layer: alike[:n].count(alike[n]) for n, layer in enumerate(shapes)}  # among its like
        self.sequences, self.blocks = 0, 0
        self._pairs = self._empty(0, 0)

    @property
    def layers(self) -> list[int]:
        """The layers that have their own K/V."""
        return list(self._shapes)

    def _empty(self, sequences: int, blocks: int) -> dict[tuple[int, int], KeysAndValues]:
        """Zeroed memory, because NaN at a masked cell would become 0 * NaN in a sum."""
        pairs, shapes = {}, list(self._shapes.values())
        for heads, dim in dict.fromkeys(shapes):
            shape = shapes.count((heads, dim)), sequences, blocks, heads, BLOCK
            pairs[heads, dim] = torch.zeros(*shape, dim), torch.zeros(*shape, dim + 1)
            pairs[heads, dim][1][..., dim] = 1
        return pairs

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory: [n, sequences, blocks, ...]."""
        for pair in self._pairs.values():
            yield from pair

    def layer(self, layer: int) -> KeysAndValues:
        """A layer's own keys [sequences, blocks, kv_heads, BLOCK, D] and values [..., D + 1], not copies."""
        keys, values = self._pairs[self._shapes[layer]]
        return keys[self._index[layer]], values[self._index[layer]]

    def reserve(self, sequences: int, blocks: int) -> None:
        """Make room for this number of sequences of `blocks` blocks each. The content is preserved."""
        if sequences <= self.sequences and blocks <= self.blocks:
            return
        if blocks > self.blocks:
            blocks = max(blocks, self.blocks + self.blocks // 4)
        self._resize(max(sequences, self.sequences), max(blocks, self.blocks))

    def shrink(self, sequences: int, tokens: int) -> None:
        """Free memory that this number of sequences of up to `tokens` tokens leaves unused, if it is much."""
        held, blocks = sum(tensor.nbytes for tensor in self.tensors()), blocks_for(tokens)
        if held and is_excess(held, held // (self.sequences * self.blocks) * sequences * blocks):
            self._resize(sequences, blocks)

    def fit(self, sequences: int, tokens: int, most_bytes: int) -> None:
        """If there is no room for this number of sequences of up to `tokens` tokens, and growing as usual would take
        more than `most_bytes`, have memory for exactly these."""
        kept = max(sequences, self.sequences), max(tokens, self.blocks * BLOCK)
        if kept != (self.sequences, self.blocks * BLOCK) and 3 * self.bytes_for(*kept) // 2 > most_bytes:
            self._resize(sequences, blocks_for(tokens))

    def bytes_for(self, sequences: int, tokens: int) -> int:
        """The memory that this number of sequences of up to `tokens` tokens needs."""
        cell = sum(heads * (2 * dim + 1) for heads, dim in self._shapes.values())
        return 4 * cell * sequences * blocks_for(tokens) * BLOCK

    def _resize(self, sequences: int, blocks: int) -> None:
        """Have memory of this size, with what fits of the content."""
        old, pairs = self._pairs, self._empty(sequences, blocks)
        kept = slice(min(sequences, self.sequences)), slice(min(blocks, self.blocks))
        for shape, pair in pairs.items():
            for new, before in zip(pair, old[shape], strict=True):
                new[:, kept[0], kept[1]] = before[:, kept[0], kept[1]]
        self._pairs, self.sequences, self.blocks = pairs, sequences, blocks

    def move(self, sequence: int, source: Integers, target: Integers) -> None:
        """Copy a sequence's tokens in the cells `source` to its cells `target`."""
        away = source != target
        if not away.any():
            return
        start, end = torch.from_numpy(source[away]), torch.from_numpy(target[away])
        for tensor in self.tensors():
            blocks = tensor[:, sequence]
            moved = blocks[:, start // BLOCK, :, start % BLOCK]  # a copy, so source and target may overlap
            blocks[:, end // BLOCK, :, end % BLOCK] = moved

    def copy_sequence(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens at index `source` to index `target`."""
        used = blocks_for(length)
        for tensor in self.tensors():
            tensor[:, target, :used] = tensor[:, source, :used]

    def write(self, sequence: int, layer: int, cells: Integers, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's keys and values [kv_heads, n, D] into these n cells of the sequence at this index."""
        where, (own_keys, own_values) = torch.from_numpy(cells), self.layer(layer)
        own_keys[sequence, where // BLOCK, :, where % BLOCK] = keys.transpose(0, 1)
        own_values[sequence, where // BLOCK, :, where % BLOCK, :-1] = values.transpose(0, 1)

    def read(self, sequence: int, layer: int, cells: Integers) -> KeysAndValues:
        """Copy a layer's keys and values of these cells, each [kv_heads, n, D]."""
        where, (own_keys, own_values) = torch.from_numpy(cells), self.layer(layer)
        keys = own_keys[sequence, where // BLOCK, :, where % BLOCK]
        values = own_values[sequence, where // BLOCK, :, where % BLOCK, :-1]
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
