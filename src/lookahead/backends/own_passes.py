"""A model's own passes over a few tokens, which probes compare a backend with, and how close is close."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from lookahead.backends.base import Backend
from lookahead.models.facts import UnsupportedModelError, kind_of
from lookahead.models.quantised import activations_name

PREFIX = 3
"""Tokens of the probe's prefix."""


def probe_tokens(model: Any, vocab: int) -> list[int]:
    """The probe's tokens, across the vocabulary, none of them named in the config: an image placeholder is not text."""
    named = {value for key, value in _flat(model.config.to_dict()) if key.endswith(("_id", "_ids", "_index"))}
    tokens = []
    for i in range(PREFIX + 4):
        token = (i + 1) * vocab // 9
        while token in named or token in tokens:
            token = (token + 1) % vocab
        tokens.append(token)
    return tokens


def _flat(tree: Any, name: str = "") -> list[tuple[str, int]]:
    """Every integer of a nested config, with the name of the field that holds it."""
    if isinstance(tree, dict):
        return [pair for key, value in tree.items() for pair in _flat(value, str(key))]
    if isinstance(tree, list):
        return [pair for value in tree for pair in _flat(value, name)]
    return [(name, tree)] if isinstance(tree, int) else []


def check_training(model: Any, logits: Callable[[], torch.Tensor]) -> None:
    """Refuse a model whose dropout is on: its own logits differ from one pass to the next."""
    if model.training and not torch.equal(logits(), logits()):
        raise UnsupportedModelError(
            f"model type {kind_of(model)!r} is in training mode, with dropout; call model.eval()"
        )


def check_finite(model: Any, logits: torch.Tensor) -> None:
    """Refuse a model whose own logits cannot be compared."""
    if not logits.isfinite().all():
        raise UnsupportedModelError(
            f"model type {kind_of(model)!r} cannot be probed: its own logits are not finite, as with a forward hook "
            "that sets some of them to -inf; give such a rule to generate as a logits processor"
        )


def closeness(backend: Backend) -> float:
    """The relative error that the probe allows.

    Under autocast a model in fp32 computes in half precision. Where activations are rounded to 8 bits, two sets of
    kernels differ by steps of a code.
    """
    exact = backend.dtype == torch.float32 and not torch.is_autocast_enabled(backend.device.type)
    return TOLERANCE if exact and activations_name(backend.model) is None else TOLERANCE_HALF


TOLERANCE, TOLERANCE_HALF, NEAR = 1e-3, 0.1, 0.3
"""The relative errors that the probe allows: in fp32, in half precision, and in half precision between two sets of
kernels. On the embedded model in bf16, with random tokens, the graph backend and transformers differed by up to 0.2."""


def plain_logits(model: Any, ids: list[int], device: torch.device) -> torch.Tensor:
    """[V] logits after `ids` by the model alone, in one pass without a cache."""
    logits: torch.Tensor = model(**inputs_of(model, ids, 0, device), use_cache=False).logits
    return logits[0, -1].float()


def inputs_of(model: Any, ids: list[int], first: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A batch of one, with its positions if the model takes them, as `generate` passes them."""
    inputs = {"input_ids": torch.tensor([ids], device=device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(first, first + len(ids), device=device)[None]
    return inputs


def relative(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed - expected).norm() / expected.norm().clamp_min(1e-6))


def run_one_by_one(
    model: Any, prefix: list[int], tokens: list[int], device: torch.device
) -> tuple[list[torch.Tensor], Any]:
    """The logits [V] of one pass over the prefix, and then of one pass per token, as in `generate`; and the cache after
    them."""
    output = model(**inputs_of(model, prefix, 0, device), use_cache=True)
    name = "cache_params" if hasattr(output, "cache_params") else "past_key_values"
    if getattr(output, name) is None:  # some models take a cache but create none
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        output = model(**inputs_of(model, prefix, 0, device), **{name: cache}, use_cache=True)
    logits = [output.logits[0, -1].float()]
    for index, token in enumerate(tokens, len(prefix)):
        given = {name: getattr(output, name)}
        output = model(**inputs_of(model, [token], index, device), **given, use_cache=True)
        logits.append(output.logits[0, -1].float())
    return logits, getattr(output, name)
