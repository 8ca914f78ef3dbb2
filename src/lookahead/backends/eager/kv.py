"""The eager backend's K/V buffer, allocated in advance, and the transformers cache that a forward pass gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from lookahead.backends.batched import is_excess

BLOCK = 256
"""Buffers grow in blocks of this many tokens, and by at least half their size."""


class KVBuffer:
    """Keys and values of all layers, [layers, sequences, heads, capacity, dim].

    Layers of equal shape share a tensor, so that moving the accepted tokens next to the prefix is one indexed copy,
    not one per layer. Memory is zeroed, because NaN at a masked position would leak into the output as 0 * NaN.
    """

    def __init__(self, like: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`like` gives shape, dtype and device: per layer, keys and values [1, heads, any, dim] that the model made."""
        groups: dict[Any, list[int]] = {}
        for layer, (key, value) in enumerate(like):
            groups.setdefault((key.shape[1], key.shape[3], value.shape[1], value.shape[3], key.device), []).append(
                layer
            )
        self.sequences, self.capacity = 0, 0
        self.group_of: dict[int, tuple[int, int]] = {}  # layer -> its group, and its index there
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for group, layers in enumerate(groups.values()):
            for index, layer in enumerate(layers):
                self.group_of[layer] = group, index
            key, value = like[layers[0]]
            self.keys.append(key.new_zeros(len(layers), 0, key.shape[1], 0, key.shape[3]))
            self.values.append(value.new_zeros(len(layers), 0, value.shape[1], 0, value.shape[3]))

    def reserve(self, sequences: int, capacity: int) -> None:
        """Make room for this number of sequences of `capacity` tokens each. The content is preserved."""
        if sequences <= self.sequences and capacity <= self.capacity:
            return
        if capacity > self.capacity:
            capacity = max(capacity, self.capacity + self.capacity // 2)
            capacity = (capacity + BLOCK - 1) // BLOCK * BLOCK
        sequences, capacity = max(sequences, self.sequences), max(capacity, self.capacity)
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                # Tensors that grew before memory ran out stay larger.
                tensors[i] = _resized(old, max(sequences, old.shape[1]), max(capacity, old.shape[3]))
        self.sequences, self.capacity = sequences, capacity

    def shrink(self, sequences: int, tokens: int) -> None:
        """Free memory that this number of sequences of up to `tokens` tokens leaves unused, if it is much."""
        held = sum(tensor.nbytes for tensor in (*self.keys, *self.values))
        capacity = (tokens + BLOCK - 1) // BLOCK * BLOCK
        if not held or not is_excess(held, held // (self.sequences * self.capacity) * sequences * capacity):
            return
        self._resize(sequences, capacity)

    def fit(self, sequences: int, tokens: int, most_bytes: int) -> None:
        """If there is no room for this number of sequences of up to `tokens` tokens, and growing as usual would take
        more than `most_bytes`, have memory for exactly these."""
        kept = max(sequences, self.sequences), max(tokens, self.capacity)
        if kept != (self.sequences, self.capacity) and 3 * self.bytes_for(*kept) // 2 > most_bytes:
            self._resize(sequences, (tokens + BLOCK - 1) // BLOCK * BLOCK)

    def _resize(self, sequences: int, capacity: int) -> None:
        self.sequences, self.capacity = sequences, capacity
        for tensors in (self.keys, self.values):
            tensors[:] = [_resized(old, sequences, capacity) for old in tensors]

    def bytes_for(self, sequences: int, tokens: int) -> int:
        """The memory that this number of sequences of up to `tokens` tokens needs."""
        capacity = (tokens + BLOCK - 1) // BLOCK * BLOCK
        each = [len(one) * one.shape[2] * one.shape[4] * one.element_size() for one in (*self.keys, *self.values)]
        return sum(each) * sequences * capacity

    @property
    def layers(self) -> int:
        return len(self.group_of)

    def write(self, sequence: int, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's keys and values [heads, n, dim] of the sequence at this index, from `start` on."""
        group, index = self.group_of[layer]
        self.keys[group][index, sequence, :, start : start + keys.shape[1]] = keys
        self.values[group][index, sequence, :, start : start + values.shape[1]] = values

    def read(self, sequence: int, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a layer's first `length` keys and values of the sequence at this index, each [heads, length, dim]."""
        group, index = self.group_of[layer]
        keys, values = self.keys[group][index, sequence, :, :length], self.values[group][index, sequence, :, :length]
        return keys.clone(), values.clone()

    def move(self, moves: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Per (sequence, source, target): copy its tokens at `source` to `target`, `target` + 1, ..."""
        moves = [move for move in moves if list(move[1]) != list(range(move[2], move[2] + len(move[1])))]
        if not moves:
            return
        if len(moves) == 1:
            sequence, source, target = moves[0]
            for tensor in (*self.keys, *self.values):
                index = torch.tensor(source, device=tensor.device)
                tensor[:, sequence, :, target : target + len(source)] = tensor[:, sequence].index_select(2, index)
            return
        sequences = [sequence for sequence, source, _ in moves for _ in source]
        sources = [token for _, source, _ in moves for token in source]
        targets = [target + i for _, source, target in moves for i in range(len(source))]
        for device, tensors in self._by_device().items():
            sequence_at, source_at, target_at = torch.tensor([sequences, sources, targets], device=device)
            for tensor in tensors:
                tensor[:, sequence_at, :, target_at] = tensor[:, sequence_at, :, source_at]

    def _by_device(self) -> dict[torch.device, list[torch.Tensor]]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in (*self.keys, *self.values):
            by_device.setdefault(tensor.device, []).append(tensor)
        return by_device

    def copy_sequence(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens at index `source` to index `target`."""
        for tensor in (*self.keys, *self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]


def _resized(old: torch.Tensor, sequences: int, capacity: int) -> torch.Tensor:
    """[layers, sequences, heads, capacity, dim] with what fits of the old content, and zeros behind it."""
    new = old.new_zeros(old.shape[0], sequences, old.shape[2], capacity, old.shape[4])
    kept = old[:, :sequences, :, :capacity]
    new[:, : kept.shape[1], :, : kept.shape[3]] = kept
    return new


class StepCache(Cache):
    """The sequences from `first` to `first + count` as a transformers cache for one forward pass.

    New keys and values are written from `start` on, in every sequence; the mask says what each token may see.
    """

    def __init__(self, buffer: KVBuffer, first: int, count: int, start: int) -> None:
        super().__init__(layers=[])
        self.buffer, self.start = buffer, start
        self.span = slice(first, first + count)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, index = self.buffer.group_of[layer_idx]
        end = self.start + key_states.shape[2]
        keys = self.buffer.keys[group][index, self.span, :, :end]
        values = self.buffer.values[group][index, self.span, :, :end]
        keys[:, :, self.start :] = key_states
        values[:, :, self.start :] = value_states
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.start + int(query_length), 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True
