"""The arguments of one `generate` call: checks for unsupported ones, and the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from lookahead.models.facts import PositionLimit, position_limit
from lookahead.transformers_hook.dropped import Dropped

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
"""Mode -> its name in messages, and the GenerationConfig fields that select it."""
CACHES = (None, "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked")
"""Supported values of `cache_implementation`: they choose the cache that is returned. While decoding, K/V are in our
own buffer. The last three are old names of transformers for "static"."""
PLAIN = {"attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep", "labels"}
"""Model arguments of prompts that any backend can run. `generate` never forwards `labels`."""


def refuse_unsupported(config: Any, dropped: Dropped) -> None:
    """Raise a one-line ValueError for unsupported arguments. `config` is the call's GenerationConfig."""
    mode = config.get_generation_mode(dropped.assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        name, fields = REFUSED_MODES.get(mode, (str(mode), ()))
        given = {field: getattr(config, field, None) for field in fields}
        used = [f"{field}={value!s:.40}" for field, value in given.items() if value not in (None, False)]
        used += ["assistant_model"] if dropped.assistant_model is not None else []
        raise ValueError(
            f"lookahead decoding is greedy or sampled, and does not do {name}; leave out {', '.join(used) or 'it'}"
        )
    if not config.use_cache:
        raise ValueError(
            "lookahead decoding needs the K/V cache, and use_cache=False was given or is in the config; "
            "pass use_cache=True"
        )
    if config.cache_implementation not in CACHES:
        name = config.cache_implementation
        why = "is not a cache that lookahead decoding knows"
        if "offloaded" in name:
            why = "keeps K/V in the memory of the CPU, and lookahead decoding keeps them all on the model's device"
        elif name == "quantized":
            why = "rounds K/V, and lookahead decoding keeps them as they are, which changes the text"
        raise ValueError(f"cache_implementation={name!r} {why}; leave it out, or leave out custom_generate")
    if dropped.synced_gpus:
        raise ValueError("synced_gpus=True: ranks that take different numbers of steps cannot be kept in step")


@dataclass(frozen=True)
class Batch:
    """The input batch: B sequences, each with T positions before its output.

    `mask` [B, T] is True for tokens and False for padding. The first `past` positions are in the given cache.
    `input_ids` [B, L] are the ids of the last L positions; L is smaller than T if `generate` was given only the part of
    the prompt that the cache lacks.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor
    past: int

    def tokens(self, batch_index: int) -> list[int]:
        """A sequence's token ids without padding. Tokens that are only in the cache have unknown ids, given as 0."""
        without_id = self.mask.shape[1] - self.input_ids.shape[1]
        ids = torch.nn.functional.pad(self.input_ids[batch_index], (without_id, 0))
        return ids[self.mask[batch_index]].tolist()

    def cached(self, batch_index: int) -> int:
        """The number of a sequence's tokens in the cache."""
        return int(self.mask[batch_index, : self.past].sum())


def check_prompt(input_ids: torch.Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> Batch:
    """The batch of a call, after checking its mask against its cache.

    `input_ids` [B, L]; `config` is the call's GenerationConfig.
    """
    if input_ids.dim() != 2:
        raise ValueError(
            f"the prompt has {input_ids.dim()} dimensions, as for a model of audio codes; lookahead decoding takes "
            "token ids [rows, tokens]"
        )
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    embeds = model_kwargs.get("inputs_embeds")
    past = int(cache.get_seq_length()) if cache is not None else 0
    batch_size, length = input_ids.shape
    if embeds is not None:
        length = embeds.shape[1]
    if mask is None:
        mask = input_ids.new_ones(batch_size, getattr(config, "_mask_length", length))
    mask = mask.bool()
    if mask.shape[1] not in (length, past + input_ids.shape[1]):
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens, and the prompt has {length}"
            + (f" after {past} in past_key_values" if past else "")
            + "; it must be as long as the prompt, or as the cache and the prompt together (token_healing changes that)"
        )
    if past and mask.shape[1] <= past:
        raise ValueError(
            f"past_key_values holds {past} tokens and the prompt {mask.shape[1]}; pass the full text, at least one "
            "token longer than the cache"
        )
    for batch_index, tokens in enumerate(mask.sum(dim=-1).tolist()):
        if not tokens:
            raise ValueError(f"attention_mask hides all of row {batch_index}; leave the row out, or give it a token")
    return Batch(input_ids, mask, past)


def is_ids_only(batch: Batch, model_kwargs: Mapping[str, Any], *, multimodal: bool = False) -> bool:
    """Whether the prompt is only token ids, left-padded, with positions counted from each first token. With
    `multimodal` also what a multimodal class prepares for such a prompt: no encoder's output, and several equal
    positions of a token."""
    for name, value in model_kwargs.items():
        nothing = value is None or (multimodal and name == "mm_encoder_outputs" and not value)
        if name not in PLAIN and not nothing:
            return False
    if not bool(batch.mask[:, -1].all()):
        return False
    positions = model_kwargs.get("position_ids")
    if positions is None:
        return bool(batch.mask.all())
    if positions.dim() == 3 and multimodal:
        return all(_are_usual(one, batch.mask) for one in positions)
    return positions.dim() == 2 and _are_usual(positions, batch.mask)


def _are_usual(positions: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether positions [B or 1, L] are counted from each row's first token."""
    usual = mask.long().cumsum(dim=-1) - 1
    given = positions.expand(len(usual), -1)
    width = min(given.shape[1], usual.shape[1])
    mask = mask[:, -width:]
    return torch.equal(given[:, -width:][mask], usual[:, -width:][mask])


def limit_of(config: Any, lengths: Sequence[int], room: int, further: int, *, own_masks: bool = False) -> PositionLimit:
    """The position limit of a call. Raises ValueError if the call certainly exceeds it, or may exceed a hard one.

    `config` is the model's; `lengths` are those of the prompts, `room` is the most tokens that may follow, and
    `further` the most by which a token's position exceeds its index. `own_masks`: see `position_limit`.
    """
    limit = position_limit(config.get_text_config(decoder=True), own_masks=own_masks)
    if limit.positions is None:
        return limit
    most, longest = limit.positions - further, max(lengths)
    if limit.hard and longest + room - 1 > most:
        raise ValueError(
            f"model type {config.model_type!r} can be decoded exactly up to {most} "
            f"positions ({limit.reason}), and {longest + room - 1} are requested; lower max_new_tokens"
        )
    if longest > most:
        raise ValueError(f"the prompt has {longest} tokens and the model's context holds {most}; shorten the prompt")
    return replace(limit, positions=most)
