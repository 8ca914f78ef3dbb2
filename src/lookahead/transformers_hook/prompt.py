"""The prompt's pass, run as `generate` runs it, and what the model itself would pass to the next one.

Models differ in what they do around their forward pass. A vision-language model takes pictures with the prompt and
counts positions along several axes; a prompt-tuning adapter puts virtual tokens before the prompt. All of that happens
in two methods of the model: `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation`. So the prompt
runs through them, and they are asked what they would pass to a pass over the first new token. From their answer we
learn how the passes over trees must look: where positions go on, what the mask hides, and what other arguments every
pass gets. An answer that we cannot honour is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin

from lookahead.backends.base import Layers
from lookahead.models.facts import chunks, kind_of, refusal, sliding_windows
from lookahead.transformers_hook import caches
from lookahead.transformers_hook.arguments import Batch

OURS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache_position"}
"""Arguments of a pass that a backend makes by itself, from the tree."""
OF_PICTURES = {"image_grid_thw", "video_grid_thw", "batch_num_images"}
"""Sizes and numbers of pictures, which matter where the pictures themselves are: in the prompt. Further passes use
them only to find positions, which a backend passes. transformers 5.17 hands them on."""
HARMLESS = {"use_cache", "logits_to_keep", "return_dict", *OF_PICTURES}
"""Arguments of a pass that change nothing that we read."""

UNCUT = {"mm_token_type_ids"}
"""Values per token that some versions of transformers pass for the whole text, not for the pass's tokens alone."""


@dataclass(frozen=True)
class Start:
    """Where decoding starts: the prompt has run.

    `logits` [B, V] choose the first token. `batch` has all positions that the cache holds. `offsets` has, per entry and
    axis of positions, how far a token's position is from its place among the entry's tokens; `told` says whether the
    model's preparation named them, or left it to the model to find them. `arguments` go into every further pass (see
    `EagerBackend`). `ids` and `kwargs` are what `generate` would go on with, and `output` is what the pass
    returned.
    """

    logits: torch.Tensor
    batch: Batch
    cache: Any
    offsets: list[tuple[int, ...]]
    told: bool
    arguments: dict[str, Any]
    ids: torch.Tensor
    kwargs: dict[str, Any]
    output: Any

    @property
    def plain(self) -> bool:
        """True when further passes need nothing but tokens, places and the cache."""
        return not self.arguments and not any(map(any, self.offsets)) and len(self.offsets[0]) == 1

    @property
    def form(self) -> tuple[Any, ...]:
        """What a probe of one call tells about another: calls of the same form need one probe."""
        given = (name for name, value in self.kwargs.items() if not is_empty(value))
        padded = not self.batch.mask.all()
        moved = any(map(any, self.offsets))
        axes = len(self.offsets[0])
        return (*sorted(given), axes, self.told, moved, padded, type(self.cache), *sorted(self.arguments))

    def layers(self, entry: int) -> Layers:
        """One entry's K/V in the cache."""
        return caches.entry_of(self.cache, entry, self.batch.mask[entry])


def is_usual(model: Any) -> bool:
    """True when the model prepares its passes as transformers does by default, as most language models do."""
    return all(
        getattr(getattr(model, name), "__func__", None) is getattr(GenerationMixin, name)
        for name in (
            "prepare_inputs_for_generation",
            "_update_model_kwargs_for_generation",
            "_prepare_position_ids_for_generation",
        )
    )


def is_empty(value: Any) -> bool:
    """True for an argument that says nothing. `mm_encoder_outputs` is an empty mapping where no picture was given."""
    return value is None or (isinstance(value, Mapping) and not value)


@torch.no_grad()
def run_prompt(model: Any, input_ids: torch.Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> Start:
    """Run the prompt [B, L] through the model's own preparation. `config` is the call's GenerationConfig.

    A cache that was given gets the prompt's K/V; they are taken back where the call is refused.
    """
    if config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
        config = copy.copy(config)
        config.prefill_chunk_size = None  # `generate` can cut ids only
    given = model_kwargs.get("past_key_values")
    past = 0 if given is None else int(given.get_seq_length())
    outputs = model._prefill(input_ids, config, kwargs := dict(model_kwargs))
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
    try:
        return _start(model, input_ids, logits, kwargs, outputs)
    except ValueError:
        take_back(given, past)
        raise


def take_back(cache: Any, length: int) -> None:
    """Cut a given cache to its first `length` tokens, where it can be cut: a refused call leaves it as it was."""
    if cache is not None and all(type(layer).__name__ == "DynamicLayer" for layer in caches.of_decoder(cache).layers):
        cache.crop(length - int(cache.get_seq_length()))


def _start(model: Any, input_ids: torch.Tensor, logits: torch.Tensor, kwargs: dict[str, Any], output: Any) -> Start:
    # 1. The cache that the prompt left.
    cache = kwargs.get("past_key_values")
    if cache is not None:
        caches.check(cache, len(input_ids))
    length = 0 if cache is None else int(cache.get_seq_length())
    if not length:
        raise refusal(model, "it returns no K/V cache")
    # 2. What the model would pass on with the first new token.
    ids = torch.cat([input_ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
    given = inputs.get("input_ids")
    if given is None or given.shape != (len(ids), 1) or not torch.equal(given.to(ids.device), ids[:, -1:]):
        raise refusal(model, "a pass over a new token gets something else than its id")
    if inputs.get("past_key_values") is not cache:
        raise refusal(model, "a pass over a new token gets another cache than the prompt's")
    # 3. Which positions hold tokens, and where the next position is.
    mask = _mask_of(model, inputs, kwargs, len(ids), length)
    batch = Batch(input_ids, mask, length)
    positions, told = inputs.get("position_ids"), inputs.get("position_ids") is not None
    if positions is None:
        positions = torch.tensor([[length]])  # most models then count the places of the cache; the probe will tell
    positions = positions.cpu().reshape(-1 if positions.dim() == 3 else 1, positions.shape[-2])
    places = mask.sum(dim=-1).cpu()
    offsets = [tuple(column) for column in (positions.expand(-1, len(ids)) - places).T.tolist()]
    return Start(logits, batch, cache, offsets, told, _arguments_of(inputs), input_ids, kwargs, output)


def _mask_of(model: Any, inputs: Mapping[str, Any], kwargs: Mapping[str, Any], entries: int, length: int) -> Any:
    """[B, length] True where the cache holds a token that the next pass may see."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:  # one made for a static cache, from this one:
        mask = kwargs.get("attention_mask")
    if mask is None:
        return torch.ones(entries, length, dtype=torch.bool)
    if mask.shape != (entries, length + 1):
        raise refusal(model, f"its mask has {mask.shape[-1] - 1} places and its cache {length}")
    return mask[:, :-1].bool().cpu()


def _arguments_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the pass that go into every further one. A value per token must be the same for all tokens."""
    arguments: dict[str, Any] = {}
    for name, value in inputs.items():
        if name in OURS or name in HARMLESS or is_empty(value):
            continue
        per_token = isinstance(value, torch.Tensor) and value.dim() == 2 and (value.shape[1] == 1 or name in UNCUT)
        if per_token and value[:, -1].unique().numel() == 1:
            arguments[name] = value[0, -1]
        elif isinstance(value, bool | int | float | str):
            arguments[name] = value
        else:
            raise ValueError(
                f"the model argument {name!r} goes into every pass, and lookahead decoding cannot tell what it means "
                "for a tree of tokens; leave it out"
            )
    return arguments


def check_hidden(model: Any, start: Start) -> None:
    """Refuse hidden places behind a token where a layer has a sliding window, which counts them."""
    mask, config = start.batch.mask.long(), model.config.get_text_config(decoder=True)
    behind = bool((mask.diff(dim=1) < 0).any())
    if behind and (any(sliding_windows(config).values()) or chunks(config)):
        raise ValueError(
            f"model type {kind_of(model)!r} has a sliding window, which counts the places that attention_mask hides "
            "behind a token; set the tokenizer's padding_side='left'"
        )
