"""Refuses models that cannot be decoded exactly, and finds the K/V shapes of the others.

`probe` then tests a model on a few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import StaticLayer

from lookahead.models.facts import UnsupportedModelError, attention_scale_start, first_line, kind_of, refusal

FAILURES = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError)
"""What a model's forward pass may raise on inputs that it does not support."""

KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def check_supported(model: Any) -> None:
    """Raise UnsupportedModelError for models that no backend can decode exactly."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise refusal(model, "it is an encoder-decoder; lookahead decodes causal language models")
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        raise refusal(
            model,
            "it is in training mode with gradient checkpointing, which turns the K/V cache off; call model.eval() or "
            "model.gradient_checkpointing_disable()",
        )
    if getattr(config, "attention_type", None) == "block_sparse" and kind_of(model) == "big_bird":
        reason = "its block-sparse attention is not causal; load it with attention_type='original_full'"
        raise refusal(model, reason)
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise refusal(model, f"attention {attention!r} takes no 4-D mask; load it with attn_implementation='sdpa'")
    own_loop = getattr(type(model), "_sample", None) is not getattr(GenerationMixin, "_sample", None)
    if isinstance(model, GenerationMixin) and own_loop:
        raise refusal(model, "it has a decoding loop of its own, as models of audio codes do")


def no_trees(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model type {kind_of(model)!r} cannot run trees: {reason}")


def check_trees(model: Any, *, recurrent: bool = False) -> None:
    """Raise UnsupportedModelError for models known not to run trees: a recurrent state, no 4-D mask, no K/V cache.

    Most of these run chains (see `eager.chains`). `recurrent`: the caller runs described models, recurrent states
    included, so that their readers decide about these.
    """
    kind = kind_of(model)
    config = model.config.get_text_config(decoder=True)

    def refuse(reason: str) -> None:
        raise no_trees(model, reason)

    kinds = set(getattr(config, "layer_types", None) or ())
    stateful = getattr(model, "_is_stateful", False) and not (kinds and kinds <= KNOWN_LAYERS)
    if stateful and not recurrent:
        refuse("it keeps a recurrent state (state-space or linear attention), which cannot step back")
    if getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        refuse("its attention is biased by index in the cache (ALiBi), not by position")
    if getattr(config, "attn_temperature_tuning", False) and attention_scale_start(config) < 1:
        refuse("its attention is scaled by index in the cache, not by position")
    if getattr(config, "attention_type", None) == "block_sparse":
        refuse("its block-sparse attention takes no 4-D mask; load it with attention_type='original_full'")
    if kind == "git":
        refuse("its cache holds image tokens that are not in the prompt")
    others = sorted(kinds - KNOWN_LAYERS)
    if others and not recurrent:
        refuse(f"its {others[0]} layers do not read a K/V cache by position")


def why_no_trees(model: Any) -> str:
    """What `check_trees` or `check_own_forward` have against this model; nothing if it runs trees, as far as a probe
    does not find more."""
    try:
        check_trees(model)
        check_own_forward(model)
    except UnsupportedModelError as error:
        return first_line(error)
    return ""


def check_own_forward(model: Any) -> None:
    """As `check_supported`, for the eager backend, which runs trees in the model's own forward pass."""
    config = model.config.get_text_config(decoder=True)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise no_trees(model, "its local attention counts indices in the cache, not positions")


def input_device(model: Any) -> torch.device:
    """The device of the model's input. An offloaded embedding has no device between passes; its hook knows."""
    embedding = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return embedding.weight.device if device is None else torch.device(device)


@torch.inference_mode()
def layer_shapes(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, keys and values [1, heads, 1, dim] of one token as the model caches them."""
    kind = kind_of(model)
    ids = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    try:
        output = model(input_ids=ids, use_cache=True)
    except FAILURES as error:
        raise UnsupportedModelError(
            f"model type {kind!r} cannot be decoded exactly: its forward pass fails on token ids alone "
            f"({first_line(error)})"
        ) from error
    return cached_shapes(getattr(output, "past_key_values", None), kind, 1)


def cached_shapes(cache: Any, kind: str, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, the keys and values [B, heads, n, dim] that a pass left in its cache, which holds `length` tokens.

    Raises UnsupportedModelError for a cache that is not of this form. A sliding layer may hold fewer tokens, and a
    static one has room for more.
    """
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if not layers:
        raise UnsupportedModelError(f"model type {kind!r} cannot be decoded exactly: it returns no K/V cache")
    shapes = []
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        holds_all = type(layer).__name__ == "DynamicLayer" or (length == 1 and not isinstance(layer, StaticLayer))
        if keys is None or values is None or keys.dim() != 4 or (holds_all and keys.shape[2] != length):
            reason = f"a {type(layer).__name__} holds no keys and values per token"
            raise UnsupportedModelError(f"model type {kind!r} cannot be decoded exactly: {reason}")
        shapes.append((keys, values))
    return shapes
