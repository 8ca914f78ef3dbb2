"""Between a transformers cache and our K/V buffer: read the K/V it holds, and append those of the new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, Layers, StepInput
from lookahead.backends.prompts import run_prompt_chunks
from lookahead.config import SamplingParams
from lookahead.transformers_hook.arguments import Batch

PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
"""Layers of transformers' caches that hold keys and values as they are, neither quantised nor offloaded."""


def of_decoder(cache: Any) -> Any:
    """The cache of self-attention: a model that could also attend to an encoder has two caches in one."""
    return getattr(cache, "self_attention_cache", cache)


def check(cache: Any, entries: int) -> None:
    """Refuse a cache whose layers do not hold plain keys and values of this many batch entries."""
    cache = of_decoder(cache)
    if cache is None:
        return
    plain = {getattr(cache_utils, name) for name in PLAIN_LAYERS}
    layers: list[Any] = getattr(cache, "layers", [])
    others = [layer for layer in layers if type(layer) not in plain]
    if not isinstance(cache, cache_utils.Cache) or others or getattr(cache, "offloading", False):
        kind = type(others[0] if others else cache).__name__
        raise ValueError(
            f"past_key_values with a {kind} cannot be used with lookahead decoding; use a DynamicCache or a StaticCache"
        )
    for layer in layers:
        if layer.is_initialized and layer.keys.shape[0] != entries:
            raise ValueError(
                f"past_key_values holds {layer.keys.shape[0]} rows and the prompt {entries}; pass its own cache"
            )


def entry_of(cache: Any, entry: int, mask: torch.Tensor) -> Layers:
    """One batch entry's K/V in a cache. `mask` [T] is True where the cache holds a token and False for padding.

    A sliding layer holds its last positions only.
    """
    layers = []
    for layer in of_decoder(cache).layers:
        held = min(mask.shape[0], layer.keys.shape[2])
        real = mask[-held:].to(layer.keys.device)
        layers.append((layer.keys[entry, :, :held][:, real], layer.values[entry, :, :held][:, real]))
    return layers


@torch.no_grad()
def extend(
    cache: Any,
    backend: Backend,
    batch: Batch,
    ids: torch.Tensor,
    left: Sequence[Layers],
    offsets: Sequence[Sequence[int]],
) -> None:
    """Append to the cache the K/V of every position it lacks.

    `ids` [B, L] are prompt and output up to the last position to keep; `left` has, per entry, the K/V that decoding
    left, and `offsets` what `Backend.adopt` is to know of its positions. `generate` runs the padding behind an entry
    that ended early through the model, and its cache holds that padding's K/V; we do the same. Padding before an entry
    is never attended to, so its K/V stay zero.
    """
    # 1. How many positions the cache will hold.
    cache = of_decoder(cache)
    without_id = batch.mask.shape[1] - batch.input_ids.shape[1]
    total = without_id + ids.shape[1]
    for layer in cache.layers:
        if type(layer) is cache_utils.StaticLayer and total > layer.max_cache_len:
            raise ValueError(
                f"past_key_values has room for {layer.max_cache_len} tokens, and {total} have to be kept; make a "
                "larger StaticCache, or use a DynamicCache"
            )
    if total == batch.past:  # the first token after embeddings ended the text: nothing was decoded
        return
    # 2. The K/V of all tokens of every entry.
    mask = torch.nn.functional.pad(batch.mask, (0, total - batch.mask.shape[1]), value=True)
    full = [
        complete(backend, layers, ids[entry][mask[entry, without_id:]].tolist(), int(mask[entry].sum()), offset)
        for entry, (layers, offset) in enumerate(zip(left, offsets, strict=True))
    ]
    # 3. Those that the cache lacks, as one batch per layer.
    for index in range(len(full[0])):
        like = full[0][index]
        keys, values = (part.new_zeros(len(full), part.shape[0], total - batch.past, part.shape[2]) for part in like)
        for entry, layers in enumerate(full):
            new = mask[entry, batch.past :].to(keys.device)
            first = layers[index][0].shape[1] - int(new.sum())
            keys[entry, :, new] = layers[index][0][:, first:]
            values[entry, :, new] = layers[index][1][:, first:]
        cache.update(keys, values, index)


def complete(
    backend: Backend, layers: Layers, tokens: Sequence[int], length: int, offset: Sequence[int] = ()
) -> Layers:
    """The K/V of all `length` tokens of an entry: `layers`, and those of the last `tokens`, which steps compute."""
    have = layers[0][0].shape[1]
    if have == length:
        return layers
    *chunk, root = tokens[have - length :]
    slot = backend.open()
    try:
        backend.adopt(slot, have, layers, offset)
        item = StepInput(slot, chunk, TokenTree([root], [-1], [0], [0]), SamplingParams(), ())
        backend.step(run_prompt_chunks(backend, [item]))
        backend.commit([(slot, ())])
        return backend.cached(slot)
    finally:
        backend.close(slot)
