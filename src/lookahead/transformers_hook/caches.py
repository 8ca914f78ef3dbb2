"""transformers' caches and ours: take over a conversation's K/V, and give back the longer one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, Layers, StepInput
from lookahead.config import SamplingParams
from lookahead.transformers_hook.arguments import Rows

KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")


def check(cache: Any, batch: int) -> None:
    """Refuse a cache whose layers do not hold plain keys and values of this many rows."""
    if cache is None:
        return
    known = {getattr(cache_utils, name) for name in KNOWN}
    layers: list[Any] = getattr(cache, "layers", [])
    odd = [layer for layer in layers if type(layer) not in known]
    if not isinstance(cache, cache_utils.Cache) or odd or getattr(cache, "offloading", False):
        kind = type(odd[0] if odd else cache).__name__
        raise ValueError(
            f"past_key_values with a {kind} cannot be used with lookahead decoding; use a DynamicCache or a StaticCache"
        )
    for layer in layers:
        if layer.is_initialized and layer.keys.shape[0] != batch:
            raise ValueError(f"past_key_values holds {layer.keys.shape[0]} rows and the prompt {batch}")


def row_of(cache: Any, row: int, mask: torch.Tensor) -> Layers:
    """One row of a cache. `mask` [T] says which of its T slots hold a token and not padding.

    A sliding layer keeps its last slots only.
    """
    layers = []
    for layer in cache.layers:
        held = min(mask.shape[0], layer.keys.shape[2])
        real = mask[-held:].to(layer.keys.device)
        layers.append((layer.keys[row, :, :held][:, real], layer.values[row, :, :held][:, real]))
    return layers


@torch.no_grad()
def extend(cache: Any, backend: Backend, rows: Rows, ids: torch.Tensor, left: Sequence[Layers]) -> None:
    """Append to the cache the K/V of all slots it lacks; `ids` [B, L] are the tokens up to the last slot.

    A row that ended early is followed by padding, which other decoders run through the model like any token. The
    cache holds it for them, so ours does, too. Padding before a row is never seen, and stays zero.
    """
    hidden = rows.mask.shape[1] - rows.input_ids.shape[1]
    total = hidden + ids.shape[1]
    for layer in cache.layers:
        if type(layer) is cache_utils.StaticLayer and total > layer.max_cache_len:
            raise ValueError(
                f"past_key_values has room for {layer.max_cache_len} tokens, and {total} have to be kept; make a "
                "larger StaticCache, or use a DynamicCache"
            )
    mask = torch.nn.functional.pad(rows.mask, (0, total - rows.mask.shape[1]), value=True)
    full = [
        complete(backend, layers, ids[row][mask[row, hidden:]].tolist(), int(mask[row].sum()))
        for row, layers in enumerate(left)
    ]
    for index in range(len(full[0])):
        like = full[0][index]
        keys, values = (part.new_zeros(len(full), part.shape[0], total - rows.past, part.shape[2]) for part in like)
        for row, layers in enumerate(full):
            new = mask[row, rows.past :].to(keys.device)
            count = int(new.sum())
            keys[row, :, new] = layers[index][0][:, -count:]
            values[row, :, new] = layers[index][1][:, -count:]
        cache.update(keys, values, index)


def complete(backend: Backend, layers: Layers, tokens: Sequence[int], length: int) -> Layers:
    """A row's K/V with the last tokens of the row that it lacks run through the model."""
    have = layers[0][0].shape[1]
    if have == length:
        return layers
    *trail, root = tokens[have - length :]
    slot = backend.open()
    try:
        backend.adopt(slot, have, layers)
        backend.step([StepInput(slot, trail, TokenTree([root], [-1], [0], [0]), SamplingParams(), ())])
        backend.commit([(slot, ())])
        return backend.cached(slot)
    finally:
        backend.close(slot)
