"""Copies, rows and batches of transformers' caches, whatever their layers hold.

A pass changes a cache in two ways. Keys and values are replaced by longer tensors, so that the shorter ones are still
good. Convolution and recurrent states are overwritten, so that going back needs a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, StaticLayer

GROWING = frozenset({"keys", "values", "indexer_keys", "indexer_position_ids"})
"""Names of tensors that a pass replaces by longer ones, except in static layers."""
JOINED_LAYERS = frozenset({
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
})  # fmt: skip
"""Layers of which the caches of several sequences can be joined to one."""
KEYS_AND_VALUES, STATES = ("keys", "values"), ("conv_states", "recurrent_states")

Change = Callable[[torch.Tensor, str], torch.Tensor]
"""From a tensor of a cache, and its name in GROWING if a pass replaces it by a longer one, to that of another cache."""


def changed(held: Any, change: Change, name: str = "") -> Any:
    """A cache like this one, whose tensors are `change` of its tensors. `name`: see `Change`."""
    if isinstance(held, torch.Tensor):
        return change(held, name)
    if isinstance(held, dict):
        return {key: changed(value, change, name) for key, value in held.items()}
    if isinstance(held, list | tuple):
        return type(held)([changed(value, change, name) for value in held])
    if isinstance(held, PreTrainedConfig | type) or callable(held) or not hasattr(held, "__dict__"):
        return held
    made = object.__new__(type(held))
    static = isinstance(held, StaticLayer)
    for own, value in vars(held).items():
        vars(made)[own] = changed(value, change, own if own in GROWING and not static else "")
    return made


def copied(cache: Any) -> Any:
    """A cache that further passes over the other one do not change."""
    return changed(cache, lambda tensor, name: tensor if name else tensor.clone())


def row_of(cache: Any, rows: int, index: int) -> Any:
    """The cache of one of its `rows` sequences. Tensors without a row for each sequence are common to all."""

    def row(tensor: torch.Tensor, name: str) -> torch.Tensor:
        dim = 1 if name == "indexer_position_ids" else 0  # which are [axes, B, T]
        own = tensor.narrow(dim, index, 1) if tensor.dim() > 1 and tensor.shape[dim] == rows else tensor
        return own if name else own.clone()

    return copied(cache) if rows == 1 else changed(cache, row)


def can_join(cache: Any) -> bool:
    """Whether `joined` knows what the cache holds."""
    return type(cache) is DynamicCache and all(type(layer).__name__ in JOINED_LAYERS for layer in cache.layers)


def has_keys(cache: Any) -> bool:
    """Whether one of its layers holds keys of tokens, not only states."""
    return any(getattr(layer, "keys", None) is not None for layer in cache.layers)


def joined(caches: Sequence[Any], masks: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """One cache of these sequences, and its mask [B, T].

    `masks[i]` [T_i] is True for the positions of cache i that hold a token. The hidden positions before its first token
    are dropped, and shorter texts get such positions, as in a left-padded batch of `generate`.
    """
    firsts = [int(mask.int().argmax()) for mask in masks]
    lengths = [len(mask) - first for mask, first in zip(masks, firsts, strict=True)]
    longest = max(lengths)
    mask = torch.stack([padded(one[first:], longest, 0) for one, first in zip(masks, firsts, strict=True)])
    made = copied(caches[0])
    for index, layer in enumerate(made.layers):
        others = [cache.layers[index] for cache in caches]
        if getattr(layer, "keys", None) is not None:
            held = longest
            if hasattr(layer, "sliding_window"):
                held, layer.cumulative_length = min(longest, layer.sliding_window - 1), longest
            for name in KEYS_AND_VALUES:
                rows = zip((getattr(other, name) for other in others), lengths, strict=True)
                setattr(layer, name, torch.cat([padded(last(row, length), held, 2) for row, length in rows]))
        for name in STATES:
            states = getattr(layer, name, {})
            for number, state in states.items():
                if state is not None:
                    states[number] = torch.cat([getattr(other, name)[number] for other in others])
    return made, mask


def last(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """The last `length` tokens of keys or values [B, heads, n, dim], or all if there are fewer."""
    return tensor[:, :, max(0, tensor.shape[2] - length) :]


def padded(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """The last `length` positions of this dimension, with zeros (or False) before the first one if there are fewer."""
    if tensor.shape[dim] >= length:
        return tensor.narrow(dim, tensor.shape[dim] - length, length)
    missing = list(tensor.shape)
    missing[dim] = length - tensor.shape[dim]
    return torch.cat([tensor.new_zeros(missing), tensor], dim=dim)
