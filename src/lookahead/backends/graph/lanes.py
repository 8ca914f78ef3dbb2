"""The graph backend's K/V buffer: one lane per sequence, all lanes of one capacity, and the rotary tables to match."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lookahead.backends.graph.weights import Weights

LEAST_CAPACITY = 2048
"""The smallest number of tokens per lane. When it grows, it grows by a quarter at least."""


class KVLanes:
    """Keys and values of all layers: `cache` [layers, 2, lanes, Hkv, capacity, D], index 0 keys and index 1 values.

    `cosine` and `sine` [capacity, D / 2] are the rotary tables for every position of a lane. Growing replaces all three
    tensors, so whoever holds their addresses (a captured step) must be dropped then.
    """

    def __init__(self, weights: Weights) -> None:
        w, self._weights = weights, weights
        # Kept as plain numbers, because asking a tensor for its shape takes microseconds of every step.
        self.lanes, self.capacity = 1, 0
        dtype, device = w.embedding.dtype, w.embedding.device
        self.cache = torch.zeros(len(w.layers), 2, 1, w.kv_heads, 0, w.dim, dtype=dtype, device=device)
        self.cosine, self.sine = w.tables(1)

    def has_room(self, lanes: int, tokens: int) -> bool:
        """Whether there are this many lanes, each with room for this many tokens."""
        return lanes <= self.lanes and tokens <= self.capacity

    def bytes_of(self, lanes: int, tokens: int) -> int:
        """The size of the buffer that `grow` would make."""
        lanes, capacity = self._grown(lanes, tokens)
        w = self._weights
        return 2 * len(w.layers) * lanes * w.kv_heads * capacity * w.dim * self.cache.element_size()

    def _grown(self, lanes: int, tokens: int) -> tuple[int, int]:
        """How many lanes, of which capacity, the buffer has once it was grown."""
        capacity = max(self.capacity, LEAST_CAPACITY)
        if tokens > capacity:
            capacity = -(-max(tokens, capacity + capacity // 4) // 512) * 512
        return max(lanes, 2 * self.lanes) if lanes > self.lanes else self.lanes, capacity

    def grow(self, lanes: int, tokens: int) -> None:
        """Make room for this many lanes and tokens per lane. What is cached is copied over."""
        old, w = self.cache, self._weights
        lanes, capacity = self._grown(lanes, tokens)
        self.cache = old.new_zeros(len(w.layers), 2, lanes, w.kv_heads, capacity, w.dim)
        self.cache[:, :, : self.lanes, :, : self.capacity] = old
        self.cosine, self.sine = w.tables(capacity)
        self.lanes, self.capacity = lanes, capacity

    def write(self, lane: int, length: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put each layer's keys and values [Hkv, n, D] of the last n of `length` tokens into a lane."""
        for layer, pair in enumerate(layers):
            for i, part in enumerate(pair):
                self.cache[layer, i, lane, :, length - part.shape[1] : length] = part

    def read(self, lane: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a lane's first `length` tokens: per layer, keys and values [Hkv, length, D]."""
        return [(keys.clone(), values.clone()) for keys, values in self.cache[:, :, lane, :, :length]]
