"""Refuse models that cannot be decoded exactly, and find out what the others need: positions, windows, shapes of K/V.

`probe` then checks a model on a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin


class UnsupportedModelError(ValueError):
    """A model that cannot be decoded exactly; the message names its type and the reason."""


FAILURES = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError)
"""What a model's forward pass may raise on inputs that it does not take."""

KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def check_supported(model: Any) -> None:
    """Raise UnsupportedModelError for models known not to fit: no K/V cache, recurrent state, no 4-D mask."""
    kind = kind_of(model)
    config = model.config.get_text_config(decoder=True)

    def refuse(reason: str) -> None:
        raise UnsupportedModelError(f"model type {kind!r} cannot be decoded exactly: {reason}")

    if getattr(model.config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder; lookahead decodes causal language models")
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) and not (kinds and kinds <= KNOWN_LAYERS):
        refuse("it keeps a recurrent state (state-space or linear attention), which cannot step back")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        refuse("its local attention counts places in the cache, not positions")
    if getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        refuse("its attention is biased by place in the cache (ALiBi), not by position")
    if getattr(config, "attn_temperature_tuning", False) and scaled_from(config) < 1:
        refuse("its attention is scaled by place in the cache, not by position")
    if getattr(config, "attention_type", None) == "block_sparse":
        refuse("its block-sparse attention is not causal; load it with attention_type='original_full'")
    own_loop = getattr(type(model), "_sample", None) is not getattr(GenerationMixin, "_sample", None)
    if isinstance(model, GenerationMixin) and own_loop:
        refuse("it has a decoding loop of its own, as models of audio codes do")
    if kind == "git":
        refuse("its cache holds image tokens that stand nowhere in the prompt")
    others = sorted(kinds - KNOWN_LAYERS)
    if others:
        refuse(f"its {others[0]} layers do not read a K/V cache by position")
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        refuse(f"attention {attention!r} takes no 4-D mask; load it with attn_implementation='sdpa'")


WIDEST = 512
"""The most tokens of a step, for a model that minds at which place of a pass a token stands."""


def scaled_from(config: Any) -> int:
    """The place from which on a model with `attn_temperature_tuning` scales attention, as far as no tree reaches it."""
    return int(getattr(config, "floor_scale", 0)) - 1 - WIDEST


@dataclass(frozen=True)
class PositionLimit:
    """Up to how many positions a model can be decoded exactly, and the reason. None means that there is no limit.

    Beyond a `hard` limit tokens would be wrong without any error, so a request that may reach it must be refused
    before its first token.
    """

    positions: int | None
    reason: str = ""
    hard: bool = False


def named_positions(config: Any) -> int | None:
    """How many positions the config says that the model was made for. XLNet says -1, and means that there is no end."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit if limit is None or limit > 0 else None


def position_limit(config: Any) -> PositionLimit:
    """The limit of this config. A table of positions has an end; rotary positions have none, with two exceptions.

    Longrope and dynamic rotary factors depend on the furthest position of a pass, so one far guess would change all of
    its tokens. Within the original context the factors are constant, so that is the limit of such models.
    """
    limit = named_positions(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "attn_temperature_tuning", False):
        return PositionLimit(scaled_from(config), "from there on attention is scaled by place in the cache", hard=True)
    window = getattr(config, "sliding_window", None)
    if window and doubtful_window(config):
        return PositionLimit(window, "beyond them its config does not tell who sees whom", hard=True)
    for part in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        kind = part.get("rope_type")
        if kind in ("longrope", "dynamic"):
            original = part.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            known = [x for x in (limit, original) if x is not None]
            return PositionLimit(min(known) if known else None, f"{kind} rotary factors", hard=True)
    return PositionLimit(None) if rope else PositionLimit(limit, "a table of positions")


def context_length(config: Any) -> int | None:
    """The context: as many positions as the model was made for and can be decoded exactly on, if its config says."""
    limit = named_positions(config)
    exact = position_limit(config).positions
    return limit if exact is None else exact


def sliding_windows(config: Any) -> dict[str, int | None]:
    """Kind of attention layer -> its sliding window, or None. In a model with one kind of layer the kind is ''."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds & {"sliding_attention", "chunked_attention"}:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    uses = getattr(config, "use_sliding_window", True)
    return {"": window if uses and not doubtful_window(config) else None}


def chunks(config: Any) -> dict[str, int]:
    """Kind of attention layer -> its chunk: a token sees only those whose position is in the same chunk as its own."""
    kinds = set(getattr(config, "layer_types", None) or ())
    chunk = getattr(config, "attention_chunk_size", None)
    return {"chunked_attention": chunk} if chunk and "chunked_attention" in kinds else {}


def doubtful_window(config: Any) -> bool:
    """True when the config names a sliding window, but does not tell whether the model uses it.

    That is so when the config also lists layer types without a sliding one: some models then use the window, some do
    not. Moshi names a window that its decoder does not use. Below the window's length it makes no difference.
    """
    kinds = getattr(config, "layer_types", None) or ()
    return (bool(kinds) and "sliding_attention" not in kinds) or getattr(config, "model_type", "") == "moshi"


def input_device(model: Any) -> torch.device:
    """The device of the model's input. An offloaded embedding is on no device between passes, but its hook knows."""
    embedding = model.get_input_embeddings()
    place = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return embedding.weight.device if place is None else torch.device(place)


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
        holds_all = length == 1 or type(layer).__name__ == "DynamicLayer"
        if keys is None or values is None or keys.dim() != 4 or (holds_all and keys.shape[2] != length):
            reason = f"a {type(layer).__name__} holds no keys and values per token"
            raise UnsupportedModelError(f"model type {kind!r} cannot be decoded exactly: {reason}")
        shapes.append((keys, values))
    return shapes


def kind_of(model: Any) -> str:
    """The model type, as messages name it."""
    return getattr(model.config, "model_type", None) or type(model).__name__


def refusal(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model type {kind_of(model)!r} cannot be decoded exactly: {reason}")


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
