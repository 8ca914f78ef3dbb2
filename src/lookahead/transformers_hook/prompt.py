"""The prefill, run as `generate` runs it, and the arguments of the passes that follow.

Models differ in what they do around their forward pass. A vision-language model takes images with the prompt and
counts positions along several axes; a prompt-tuning adapter puts virtual tokens before the prompt. All of that happens
in two methods of the model: `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation`. So the prompt
runs through them, and so does a first new token, whose pass is only prepared. Its arguments determine those of passes
over trees: where positions continue, what the mask hides, and the arguments common to all passes. Arguments that we
cannot support are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin

from lookahead.backends.base import Layers
from lookahead.backends.eager.chains import CACHE_NAMES
from lookahead.models.facts import chunks, kind_of, refusal, sliding_windows
from lookahead.transformers_hook import caches
from lookahead.transformers_hook.arguments import Batch, is_ids_only

OURS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", *CACHE_NAMES}
"""Arguments of a pass that a backend computes from the tree."""
OF_PICTURES = {"image_grid_thw", "video_grid_thw", "batch_num_images"}
"""Sizes and numbers of images, which matter only in the prompt's pass. Later passes use them only to compute positions,
which a backend passes. transformers 5.17 forwards them."""
HARMLESS = {"use_cache", "logits_to_keep", "return_dict", *OF_PICTURES}
"""Arguments of a pass that do not affect what we read."""

TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Arguments that tell images from text, which is 0."""

PREFIX_TYPES = {"paligemma"}
"""Model types whose token types tell the prefix, which is 0 and is attended bidirectionally, from what follows. Only
the prompt's pass reads them."""

UNCUT = {"mm_token_type_ids"}
"""Per-token values that some versions of transformers pass for the entire text, not only for the pass's tokens."""


@dataclass(frozen=True)
class Start:
    """The state after the prompt has run.

    `logits` [B, V] select the first token. `batch` has all positions in the cache. `offsets` has, per sequence and axis
    of positions, the difference between a token's position and its index in the sequence; `has_positions` says whether
    the model's preparation set them, or left them to the model. `arguments` are those of every further pass (see
    `EagerBackend`). `generate` would continue with `ids` and `kwargs`, and `output` is that of the prompt's pass.
    `cache_name` is the name of the cache among the arguments of a pass.
    """

    logits: torch.Tensor
    batch: Batch
    cache: Any
    offsets: list[tuple[int, ...]]
    has_positions: bool
    arguments: dict[str, Any]
    ids: torch.Tensor
    kwargs: dict[str, Any]
    output: Any
    cache_name: str = CACHE_NAMES[0]

    @property
    def plain(self) -> bool:
        """Whether further passes need only tokens, default positions and the cache."""
        return not self.arguments and not any(map(any, self.offsets)) and len(self.offsets[0]) == 1

    @property
    def shifts(self) -> list[tuple[int]] | None:
        """Per sequence the shift of its positions, if a backend that runs the model's description can continue from
        here: further passes need only tokens, the cache, and positions that differ from indices by one number.

        Of four axes the first one is a token's index, which the mask is made of.
        """
        if not all(name in TOKEN_TYPES and not value.any() for name, value in self.arguments.items()):
            return None
        rotary = [offset[1:] if len(offset) == 4 and offset[0] == 0 else offset for offset in self.offsets]
        return [(offset[0],) for offset in rotary] if all(len(set(offset)) == 1 for offset in rotary) else None

    @property
    def form(self) -> tuple[Any, ...]:
        """Key of a probe's result: calls of the same form need one probe."""
        given = (name for name, value in self.kwargs.items() if not is_empty(value))
        padded = not self.batch.mask.all()
        moved = any(map(any, self.offsets))
        axes = len(self.offsets[0])
        return (*sorted(given), axes, self.has_positions, moved, padded, type(self.cache), *sorted(self.arguments))

    def layers(self, batch_index: int) -> Layers:
        """One sequence's K/V in the cache."""
        return caches.layers_of(self.cache, batch_index, self.batch.mask[batch_index])


PREPARATION = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_position_ids_for_generation",
)
"""The methods of a model that prepare the inputs of its passes. Prompt adapters replace them on the model itself."""


def is_usual(model: Any) -> bool:
    """Whether the model uses transformers' default input preparation, as most language models do."""
    return all(
        getattr(getattr(model, name), "__func__", None) is getattr(GenerationMixin, name) for name in PREPARATION
    )


def is_of_library(model: Any) -> bool:
    """Whether transformers itself defines how the model's inputs are prepared. If so, positions grow by one per token,
    whatever their shift; code from elsewhere may do anything, and only a probe finds out."""
    return type(model).__module__.startswith("transformers.") and vars(model).keys().isdisjoint(PREPARATION)


def is_empty(value: Any) -> bool:
    """Whether an argument is empty. `mm_encoder_outputs` is an empty mapping without images."""
    return value is None or (isinstance(value, Mapping) and not value)


@torch.no_grad()
def run_prompt(
    model: Any, input_ids: torch.Tensor, config: Any, model_kwargs: Mapping[str, Any], *, trees: bool = True
) -> Start:
    """Run the prompt [B, L] through the model's own preparation. `config` is the call's GenerationConfig.

    A given cache gets the prompt's K/V. Trees need a cache of plain keys and values, chains any.
    """
    if config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
        config = copy.copy(config)
        config.prefill_chunk_size = None  # `generate` can chunk only ids
    outputs = model._prefill(input_ids, config, kwargs := dict(model_kwargs))
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
    return _start(model, input_ids, logits, kwargs, outputs, trees)


def _start(
    model: Any, input_ids: torch.Tensor, logits: torch.Tensor, kwargs: dict[str, Any], output: Any, trees: bool
) -> Start:
    # 1. The cache after the prompt.
    name = next((name for name in CACHE_NAMES if kwargs.get(name) is not None), CACHE_NAMES[0])
    cache = kwargs.get(name)
    if cache is not None and trees:
        caches.check_cache(cache, len(input_ids))
    length = 0 if cache is None else _length_of(cache, kwargs, input_ids)
    if not length:
        raise refusal(model, "it returns no K/V cache" if trees else "it returns no cache to continue from")
    # 2. The arguments of a pass over the first new token.
    ids = torch.cat([input_ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
    given = inputs.get("input_ids")
    if given is None or given.shape != (len(ids), 1) or not torch.equal(given.to(ids.device), ids[:, -1:]):
        raise refusal(model, "a pass over a new token gets something else than its id")
    if inputs.get(name) is not cache:
        raise refusal(model, "a pass over a new token gets another cache than the prompt's")
    # 3. The positions that hold tokens, and the next position.
    mask = _mask_of(model, inputs, kwargs, len(ids), length)
    batch = Batch(input_ids, mask, length)
    positions, has_positions = inputs.get("position_ids"), inputs.get("position_ids") is not None
    if positions is None:
        positions = torch.tensor([[length]])  # most models count cached positions; the probe checks that
    positions = positions.cpu().reshape(-1 if positions.dim() == 3 else 1, positions.shape[-2])
    indices = mask.sum(dim=-1).cpu()
    offsets = [tuple(column) for column in (positions.expand(-1, len(ids)) - indices).T.tolist()]
    arguments = _arguments_of(model, inputs)
    return Start(logits, batch, cache, offsets, has_positions, arguments, input_ids, kwargs, output, name)


def _length_of(cache: Any, kwargs: Mapping[str, Any], input_ids: torch.Tensor) -> int:
    """The number of positions in a cache. One that has only states does not know it, but the mask does."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        mask = kwargs.get("attention_mask")
        return input_ids.shape[1] if mask is None else mask.shape[1] - 1


def _mask_of(model: Any, inputs: Mapping[str, Any], kwargs: Mapping[str, Any], batch_size: int, length: int) -> Any:
    """[B, length], True for cached tokens that the next pass may see."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:  # derived for a static cache from this one:
        mask = kwargs.get("attention_mask")
    if mask is None:
        return torch.ones(batch_size, length, dtype=torch.bool)
    if mask.shape != (batch_size, length + 1):
        raise refusal(model, f"its mask has {mask.shape[-1] - 1} positions and its cache {length}")
    return mask[:, :-1].bool().cpu()


def _arguments_of(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments common to all further passes. Per-token values must be the same for all tokens."""
    arguments: dict[str, Any] = {}
    unread = OURS | HARMLESS | (TOKEN_TYPES if kind_of(model) in PREFIX_TYPES else set())
    for name, value in inputs.items():
        if name in unread or is_empty(value):
            continue
        per_token = isinstance(value, torch.Tensor) and value.dim() == 2 and (value.shape[1] == 1 or name in UNCUT)
        values = value[:, -1].unique().tolist() if per_token else []
        if len(values) == 1:
            arguments[name] = value[0, -1]
        elif values:
            raise ValueError(
                f"{name} ends in different values for the rows of the batch ({values}), which go on with the new "
                "tokens; call generate once for the rows of each value"
            )
        elif isinstance(value, bool | int | float | str):
            arguments[name] = value
        else:
            raise ValueError(
                f"the model argument {name!r} goes into every pass, and lookahead decoding cannot tell what it means "
                "for a tree of tokens; leave it out"
            )
    return arguments


def check_hidden(model: Any, start: Start, given: torch.Tensor) -> None:
    """Refuse masked positions after a token if a layer has a sliding window, which counts them. `given` [B, T] is the
    call's mask, before the model put virtual tokens in front of it."""
    config = model.config.get_text_config(decoder=True)
    if not hides_behind(start.batch.mask) or not (any(sliding_windows(config).values()) or chunks(config)):
        return
    window = f"model type {kind_of(model)!r} has a sliding window, which counts the positions that attention_mask hides"
    if hides_behind(given):
        raise ValueError(f"{window} after a token; set the tokenizer's padding_side='left'")
    raise ValueError(
        f"{window}, and the adapter's virtual tokens are in front of the padding; call generate for prompts of equal "
        "length, which need no padding"
    )


def hides_behind(mask: torch.Tensor) -> bool:
    """Whether a mask [B, T] hides a position after a token."""
    return bool((mask.long().diff(dim=1) < 0).any())


def why_not_on_graph(
    model: Any, batch: Batch, model_kwargs: Mapping[str, Any], keeps_cache: bool, *, biased: bool
) -> tuple[str, str]:
    """Why the graph backend cannot run a prompt with recurrent states itself, and what to change; empty if it can.

    `keeps_cache`: the caller gets the cache. `biased`: the projections of recurrent layers have a bias.
    """
    if not is_of_library(model):  # known classes prepare caches of their own, at most
        return "the graph backend runs no prompt whose inputs other code prepares, such as an adapter", ""
    if keeps_cache or not is_ids_only(batch, model_kwargs, multimodal=True):
        reason = "the graph backend neither begins from a cache with recurrent states nor leaves one behind"
        return reason, "leave past_key_values, images and return_dict_in_generate out, or "
    if hides_behind(batch.mask):
        reason = "attention_mask hides a position after a token, and the graph backend's recurrent states skip none"
        return reason, "set the tokenizer's padding_side='left', or "
    if biased and not batch.mask.all():
        reason = "attention_mask hides padding, which the model's own pass folds into its recurrent states"
        return f"{reason} (their projections have a bias)", "call generate for prompts of equal length, or "
    return "", ""
