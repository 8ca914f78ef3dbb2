"""What `generate` was asked for: the arguments it does not hand on, the ones that cannot be honoured, the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode


@dataclass(frozen=True)
class Dropped:
    """Arguments of `generate` that it keeps from a callable `custom_generate`."""

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool = False


def dropped_arguments(hook: Any, frame: FrameType | None) -> None:
    """Hand on what `generate` takes from its caller and does not pass to a callable.

    transformers 5.17 to 5.22 take `streamer`, `tokenizer`, `assistant_model` and `synced_gpus` out of the arguments,
    and give a callable only those further ones that its signature names. They ask for the signature at that very
    moment, so the arguments are found in the asking frame, and put back under names that the signature has. A version
    that passes them on by itself asks from another place, and nothing is done.
    """
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name == "_extract_generation_mode_kwargs" and names.get("custom_generate") is hook:
            taken, kwargs = names["generation_mode_kwargs"], names["kwargs"]
            if taken.get("tokenizer") is not None:
                kwargs["tokenizer"] = taken["tokenizer"]
            kwargs["dropped"] = Dropped(
                taken.get("streamer"), taken.get("assistant_model"), bool(taken.get("synced_gpus"))
            )
            return
        frame = frame.f_back


REFUSED_MODES = {
    GenerationMode.BEAM_SEARCH: ("beam search", ("num_beams",)),
    GenerationMode.BEAM_SAMPLE: ("beam sampling", ("num_beams",)),
    GenerationMode.GROUP_BEAM_SEARCH: ("group beam search", ("num_beam_groups",)),
    GenerationMode.CONSTRAINED_BEAM_SEARCH: ("constrained beam search", ("constraints", "force_words_ids")),
    GenerationMode.CONTRASTIVE_SEARCH: ("contrastive search", ("penalty_alpha",)),
    GenerationMode.DOLA_GENERATION: ("DoLa", ("dola_layers",)),
    GenerationMode.ASSISTED_GENERATION: (
        "assisted generation", ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit"),
    ),
}  # fmt: skip
"""What each is called, and the fields that ask for it."""
CACHES = (None, "dynamic", "static")
PASSED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "inputs_embeds"}
"""Model arguments that the decoding loop heeds; a forward pass with any other would need it at every step."""


def refuse_unsupported(config: Any, dropped: Dropped, model_kwargs: Mapping[str, Any]) -> None:
    """One clear message for what lookahead decoding cannot honour. `config` is the call's GenerationConfig."""
    mode = config.get_generation_mode(dropped.assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        name, fields = REFUSED_MODES.get(mode, (str(mode), ()))
        given = {field: getattr(config, field, None) for field in fields}
        asked = [f"{field}={value!s:.40}" for field, value in given.items() if value not in (None, False)]
        asked += ["assistant_model"] if dropped.assistant_model is not None else []
        raise ValueError(
            f"lookahead decoding is greedy or sampled, and does not do {name}; leave out {', '.join(asked) or 'it'}"
        )
    if not config.use_cache:
        raise ValueError("lookahead decoding needs the K/V cache; leave out use_cache=False")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(f"{name}=True: a step of many tokens has no such output per token; leave it out")
    if config.cache_implementation not in CACHES:
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} is not supported with lookahead decoding, which "
            "keeps K/V in a buffer of its own; leave it out"
        )
    if dropped.synced_gpus:
        raise ValueError("synced_gpus=True: ranks that take different numbers of steps cannot be kept in step")
    for name, value in model_kwargs.items():
        empty = value is None or (isinstance(value, Mapping) and not value)  # `mm_encoder_outputs` without an image
        if name not in PASSED and not empty:
            raise ValueError(f"the model argument {name!r} is not supported with lookahead decoding; leave it out")


@dataclass(frozen=True)
class Rows:
    """The batch as given. `mask` [B, T] says which of the T slots before the output hold a token; `past` of them are
    in the cache that came along, and `input_ids` [B, L] are the last L."""

    input_ids: torch.Tensor
    mask: torch.Tensor
    past: int

    def tokens(self, row: int) -> list[int]:
        """A row's tokens without padding. Those that are only in the cache have no known id, and are 0 here."""
        hidden = self.mask.shape[1] - self.input_ids.shape[1]
        ids = torch.nn.functional.pad(self.input_ids[row], (hidden, 0))
        return ids[self.mask[row]].tolist()

    def cached(self, row: int) -> int:
        """How many of a row's tokens the cache holds."""
        return int(self.mask[row, : self.past].sum())


def rows_of(input_ids: torch.Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> Rows:
    """Mask, positions and cache of the call, checked against each other."""
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    embeds = model_kwargs.get("inputs_embeds")
    past = int(cache.get_seq_length()) if cache is not None else 0
    batch, length = input_ids.shape
    if embeds is not None:
        length = embeds.shape[1]
    if mask is None:
        mask = input_ids.new_ones(batch, getattr(config, "_mask_length", length))
    mask = mask.bool()
    fits = (length, past + input_ids.shape[1])
    if mask.shape[1] not in fits:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens, and the prompt has {length}"
            + (f" after {past} in past_key_values" if past else "")
            + "; it must be as long as the prompt, or as the cache and the prompt together (token_healing changes that)"
        )
    if past and mask.shape[1] <= past:
        raise ValueError(
            f"past_key_values holds {past} tokens and the prompt {mask.shape[1]}; pass the whole text, at least one "
            "token longer than the cache"
        )
    for row in range(batch):
        if not mask[row, -1]:
            raise ValueError(
                f"row {row} of the batch ends in padding, and its last token's answer cannot be known; "
                "set the tokenizer's padding_side='left'"
            )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        usual = mask.long().cumsum(dim=-1) - 1
        given = positions.expand(batch, -1) if positions.dim() == 2 else None
        width = 0 if given is None else min(given.shape[1], usual.shape[1])
        if given is None or not torch.equal(given[:, -width:][mask[:, -width:]], usual[:, -width:][mask[:, -width:]]):
            raise ValueError("position_ids other than each token's place in its row are not supported; leave them out")
    return Rows(input_ids, mask, past)


def check_padding(model: Any, rows: Rows, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse a padded batch where `generate` hands the model no positions: the padding would count as some."""
    config = model.config.get_text_config(decoder=True)
    if (
        not rows.mask.all()
        and model_kwargs.get("position_ids") is None
        and not getattr(config, "rope_parameters", None)
    ):
        raise ValueError(
            f"model type {model.config.model_type!r} counts padding as positions; pass one prompt at a time, or "
            "prompts of one length"
        )
