"""The state of a transformers cache: restored after an error, and copied for passes that must not change it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticLayer

from lookahead.backends.eager.cache_rows import copied
from lookahead.transformers_hook.caches import of_decoder


@contextmanager
def restored_on_error(cache: Any) -> Iterator[None]:
    """Leave a given cache as it was if the call is refused or fails: the caller may pass it again."""
    layers = getattr(of_decoder(cache), "layers", [])
    states = [_state_of(layer) for layer in layers]
    try:
        yield
    except BaseException:
        del layers[len(states) :]  # a cache without a config adds layers as it is filled
        for layer, state in zip(layers, states, strict=True):
            _restore(layer, state)
        raise


def _state_of(layer: Any) -> dict[str, Any]:
    """A layer's attributes. Most layers replace keys and values, but recurrent states are overwritten, and so are
    copied. A static layer writes into its length, behind its length, and a full sliding one over its oldest tokens, so
    that these are copied."""
    state = dict(vars(layer if isinstance(layer, StaticLayer) else copied(layer)))
    if isinstance(layer, StaticLayer):
        written = ("cumulative_length", "keys", "values") if layer.is_sliding else ("cumulative_length",)
        state |= {name: state[name].clone() for name in written if state[name] is not None}
    return state


@torch.no_grad()
def _restore(layer: Any, state: dict[str, Any]) -> None:
    """Set a layer's attributes to this state. A static layer keeps its tensors: compiled passes know the addresses."""
    now = dict(vars(layer))
    vars(layer).clear()
    vars(layer).update(state)
    if not (isinstance(layer, StaticLayer) and layer.is_initialized):
        return
    for name in ("cumulative_length", "keys", "values"):
        setattr(layer, name, now[name].copy_(state[name]))
    if not layer.is_sliding:
        for part in (now["keys"], now["values"]):
            part[:, :, int(layer.cumulative_length) :] = 0


def growing_copy(cache: Any, model: Any) -> Any:
    """A copy of the cache that further passes of the model can append to. A static cache may have no room for them, so
    that its copy is a DynamicCache."""
    layers = getattr(of_decoder(cache), "layers", ())
    if not layers or not all(isinstance(layer, StaticLayer) for layer in layers):
        return copy.deepcopy(cache)
    dynamic: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer, grown in zip(layers, dynamic.layers, strict=True):
        length = int(layer.get_seq_length())
        if length:
            grown.update(*(part[:, :, : min(length, part.shape[2])].clone() for part in (layer.keys, layer.values)))
        if layer.is_sliding:
            grown.cumulative_length = length
    return dynamic
