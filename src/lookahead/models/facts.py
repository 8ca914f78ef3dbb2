"""Facts in a model's config: position limits, and sliding windows of its layers.

`UnsupportedModelError` is raised for every unsupported model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UnsupportedModelError(ValueError):
    """A model that cannot be decoded exactly; the message names its type and the reason."""


MAX_STEP_TOKENS = 512
"""The most tokens of a step, for models whose result depends on a token's index in the pass."""


def attention_scale_start(config: Any) -> int:
    """The position at which a model with `attn_temperature_tuning` starts to scale attention, less the widest tree."""
    return int(getattr(config, "floor_scale", 0)) - 1 - MAX_STEP_TOKENS


@dataclass(frozen=True)
class PositionLimit:
    """How many positions a model can be decoded on exactly, and the reason. None means no limit.

    Beyond a `hard` limit tokens would be wrong without any error, so a request that may reach it must be refused
    before its first token.
    """

    positions: int | None
    reason: str = ""
    hard: bool = False


def config_positions(config: Any) -> int | None:
    """The number of positions in the config. XLNet has -1 for no limit."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit if limit is None or limit > 0 else None


def position_limit(config: Any, *, own_masks: bool = False) -> PositionLimit:
    """The limit of this config. A table of positions has an end; rotary positions have none, with two exceptions.

    Longrope and dynamic rotary factors depend on the furthest position of a pass, so one far draft token would change
    all of its tokens. Within the original context the factors are constant, so that is the limit of such models.
    `own_masks`: the model makes its masks itself, as in its own `generate`, so that nobody has to know
    its windows, and indices in the cache are positions.
    """
    limit = config_positions(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "attn_temperature_tuning", False) and not own_masks:
        return PositionLimit(
            attention_scale_start(config), "from there on attention is scaled by index in the cache", hard=True
        )
    window = getattr(config, "sliding_window", None)
    ambiguous = bool(window) and not own_masks and has_ambiguous_window(config)
    if window and ambiguous:
        limit = min(window, limit or window)
    for parameters in [rope, *(nested for nested in rope.values() if isinstance(nested, dict))]:
        kind = parameters.get("rope_type")
        if kind in ("longrope", "dynamic"):
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            known = [x for x in (limit, original) if x is not None]
            return PositionLimit(min(known) if known else None, f"{kind} {ROTARY_FACTORS}", hard=True)
    if window and ambiguous:
        return PositionLimit(window if rope else limit, "beyond them its config does not define the mask", hard=True)
    return PositionLimit(None) if rope else PositionLimit(limit, "a table of positions")


ROTARY_FACTORS = "rotary factors"


def rope_limit(config: Any) -> int | None:
    """The positions up to which rotary factors do not depend on the furthest one; None if they never do."""
    limit = position_limit(config)
    return limit.positions if limit.reason.endswith(ROTARY_FACTORS) else None


def context_length(config: Any, *, own_masks: bool = False) -> int | None:
    """The context length: the config's positions, within those that can be decoded exactly; None if unknown."""
    limit = config_positions(config)
    exact = position_limit(config, own_masks=own_masks).positions
    return limit if exact is None else exact


def sliding_windows(config: Any) -> dict[str, int | None]:
    """Kind of attention layer -> its sliding window, or None. In a model with one kind of layer the kind is ''."""
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        return {"global": None, "local": config.window_size}
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds & {"sliding_attention", "chunked_attention"}:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    # Mistral's class does not read `use_sliding_window`, which configs of other classes have.
    uses = getattr(config, "use_sliding_window", True) or getattr(config, "model_type", "") == "mistral"
    return {"": window if uses and not has_ambiguous_window(config) else None}


def chunks(config: Any) -> dict[str, int]:
    """Kind of attention layer -> its chunk: a token sees only those whose position is in the same chunk as its own."""
    kinds = set(getattr(config, "layer_types", None) or ())
    chunk = getattr(config, "attention_chunk_size", None)
    return {"chunked_attention": chunk} if chunk and "chunked_attention" in kinds else {}


def cached_copies(config: Any) -> int:
    """How often the cache of a model's own forward pass holds each K/V head: Falcon's holds one per query head."""
    grouped = getattr(config, "model_type", "") == "falcon" and config.new_decoder_architecture
    return int(config.num_attention_heads // config.num_kv_heads) if grouped else 1


WINDOWLESS = frozenset({
    "moshi", "llama", "gemma", "granite", "olmo", "olmo2", "glm", "glm4", "cohere", "seed_oss", "helium",
    "hunyuan_v1_dense", "ernie4_5", "arcee", "apertus", "nanochat", "jais2", "hyperclovax", "phi", "nemotron",
    "stablelm", "gpt_neox", "gpt_neox_japanese", "persimmon", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj",
    "codegen", "opt", "xglm", "biogpt", "ctrl", "emu3_text_model", "olmoe", "flex_olmo", "granitemoe",
    "granitemoeshared", "granitemoehybrid", "glm4_moe", "glm4v_moe_text", "solar_open", "hy_v3", "ernie4_5_moe",
    "hunyuan_v1_moe", "minimax_m2", "qwen3_vl_moe_text",
})  # fmt: skip
"""Types of models whose attention has no window, whatever their config says."""


def has_ambiguous_window(config: Any) -> bool:
    """Whether the config has a sliding window, but does not say whether the model uses it.

    That is so if the config also lists layer types without a sliding one: some models then use the window, some do
    not. Moshi names a window that its decoder does not use. Llama and its like do not use one either, but the cache of
    their `generate` drops the tokens outside of it. Below the window's length it makes no difference.
    """
    kinds = getattr(config, "layer_types", None) or ()
    return (bool(kinds) and "sliding_attention" not in kinds) or getattr(config, "model_type", "") in WINDOWLESS


def tensor_parallel_ranks(model: Any) -> int:
    """The number of tensor-parallel processes, as with `tp_plan="auto"`."""
    return getattr(model, "_tp_size", None) or 1


def kind_of(model: Any) -> str:
    """The model type, as messages name it."""
    return getattr(model.config, "model_type", None) or type(model).__name__


def refusal(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model type {kind_of(model)!r} cannot be decoded exactly: {reason}")


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
