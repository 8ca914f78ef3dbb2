"""Copy K/V between a transformers cache and our buffer: read its K/V, and append those of new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, Layers, StepInput
from lookahead.backends.prompts import run_prompt_chunks
from lookahead.config import SamplingParams
from lookahead.models.facts import chunks, sliding_windows
from lookahead.transformers_hook.arguments import Batch

PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
"""Cache layers of transformers with plain keys and values, neither quantised nor offloaded."""


def of_decoder(cache: Any) -> Any:
    """The self-attention cache: an encoder-decoder cache contains two."""
    return getattr(cache, "self_attention_cache", cache)


def check_cache(cache: Any, batch_size: int) -> None:
    """Refuse a cache whose layers do not hold plain keys and values for this batch size."""
    cache = of_decoder(cache)
    if cache is None:
        return
    plain = {getattr(cache_utils, name) for name in PLAIN_LAYERS}
    layers: list[Any] = getattr(cache, "layers", [])
    others = [layer for layer in layers if type(layer) not in plain]
    if getattr(cache, "offloading", False):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} with offloading=True, which keeps K/V in the memory of the "
            "CPU, and lookahead decoding keeps them all on the model's device; make it without offloading, or leave "
            "out custom_generate"
        )
    if not isinstance(cache, cache_utils.Cache) or others:
        kind = type(others[0] if others else cache).__name__
        raise ValueError(
            f"past_key_values with a {kind} cannot be used with lookahead decoding; use a DynamicCache or a StaticCache"
        )
    for layer in layers:
        if layer.is_initialized and layer.keys.shape[0] != batch_size:
            raise ValueError(
                f"past_key_values holds {layer.keys.shape[0]} rows and the prompt {batch_size}; pass its own cache"
            )


def layers_of(cache: Any, batch_index: int, mask: torch.Tensor, copies: int = 1) -> Layers:
    """One sequence's K/V in a cache. `mask` [T] is True for tokens and False for padding.

    A sliding-window layer holds only its last positions. `copies`: the cache holds each head this many times.
    """
    layers = []
    for layer in of_decoder(cache).layers:
        held = min(mask.shape[0], layer.keys.shape[2])
        real = mask[-held:].to(layer.keys.device)
        keys, values = (part[batch_index, ::copies, :held][:, real] for part in (layer.keys, layer.values))
        layers.append((keys, values))
    return layers


@torch.no_grad()
def extend(
    cache: Any,
    backend: Backend,
    batch: Batch,
    ids: torch.Tensor,
    left: Sequence[Layers],
    offsets: Sequence[Sequence[int]],
    copies: int = 1,
) -> None:
    """Append to the cache the K/V of every position it lacks, each head `copies` times.

    `ids` [B, L] are prompt and output up to the last position to cache; `left` has each sequence's K/V after decoding,
    and `offsets` its position offsets for `Backend.adopt`. `generate` also runs the padding after a sequence that ended
    early, and its cache holds that padding's K/V; so does ours. Left padding is never attended to, so its K/V stay
    zero.
    """
    # 1. The number of positions that the cache will hold.
    cache = of_decoder(cache)
    without_id = batch.mask.shape[1] - batch.input_ids.shape[1]
    total = without_id + ids.shape[1]
    _check_room(cache, total, backend.model.config.get_text_config(decoder=True))
    if total == batch.past:  # the first token after embeddings ended the text: nothing was decoded
        return
    # 2. The K/V of all tokens of every sequence.
    mask = torch.nn.functional.pad(batch.mask, (0, total - batch.mask.shape[1]), value=True)
    full = [
        complete(
            backend,
            layers,
            ids[batch_index][mask[batch_index, without_id:]].tolist(),
            int(mask[batch_index].sum()),
            offset,
        )
        for batch_index, (layers, offset) in enumerate(zip(left, offsets, strict=True))
    ]
    # 3. Those that the cache lacks, batched per layer.
    for index in range(len(full[0])):
        like = full[0][index]
        keys, values = (one.new_zeros(len(full), one.shape[0], total - batch.past, one.shape[2]) for one in like)
        for batch_index, layers in enumerate(full):
            new = mask[batch_index, batch.past :].to(keys.device)
            first = layers[index][0].shape[1] - int(new.sum())
            keys[batch_index, :, new] = layers[index][0][:, first:]
            values[batch_index, :, new] = layers[index][1][:, first:]
        if copies > 1:
            keys, values = (part.repeat_interleave(copies, dim=1) for part in (keys, values))
        cache.update(keys, values, index)


def _check_room(cache: Any, total: int, config: Any) -> None:
    """Refuse a static cache that cannot hold `total` tokens, or the last ones that a sliding window or chunk sees: one
    made for fewer tokens than the window holds fewer."""
    seen = {*sliding_windows(config).values(), *chunks(config).values()}
    for layer in cache.layers:
        static = isinstance(layer, cache_utils.StaticLayer)
        slides = static and layer.is_sliding and layer.max_cache_len in seen
        if static and not slides and total > layer.max_cache_len:
            raise ValueError(
                f"past_key_values has room for {layer.max_cache_len} tokens, and {total} are needed; make a "
                "larger StaticCache, or use a DynamicCache"
            )


def complete(
    backend: Backend, layers: Layers, tokens: Sequence[int], length: int, offset: Sequence[int] = ()
) -> Layers:
    """The K/V of all `length` tokens of a sequence: `layers`, plus those of the last `tokens`, computed in steps."""
    have = layers[0][0].shape[1]
    if have == length:
        return layers
    *chunk, root = tokens[have - length :]
    slot = backend.open()
    try:
        backend.adopt(slot, have, layers, offset)
        step_input = StepInput(slot, chunk, TokenTree([root], [-1], [0], [0]), SamplingParams(), ())
        backend.step(run_prompt_chunks(backend, [step_input]))
        backend.commit([(slot, ())])
        return backend.cached(slot)
    finally:
        backend.close(slot)
