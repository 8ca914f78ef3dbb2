"""What transformers itself generates, remembered: many tests ask the same tiny model for the same text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

MOST_PARAMETERS = 1_000_000
"""A larger model is not looked up: to hash its weights would take long."""
_texts: dict[tuple[Any, ...], list[int]] = {}
"""The longest text known of a model and a prompt, the prompt left out."""


def greedy_text(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """At most `count` new ids of `model.generate`, greedy; the EOS included.

    A shorter text is the beginning of a longer one, so one long text answers for all shorter ones.
    """
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    mark = fingerprint(model)
    known = _texts.get((mark, *ids), []) if mark else []
    if len(known) < count and (not known or known[-1] not in ends):
        known = _generate(model, ids, count, pad=0 if ends[0] is None else ends[0])
        if mark:
            _texts[(mark, *ids)] = known
    return known[:count]


def _generate(model: Any, ids: Sequence[int], count: int, pad: int) -> list[int]:
    prompt = torch.tensor([list(ids)], device=model.device)
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=pad)
    return output[0, len(ids) :].tolist()


def fingerprint(model: Any) -> str:
    """A digest of all that decides a model's text: its class, its configs, its weights and its buffers.

    Empty for a model that is large, or whose weights are not all in memory.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if sum(tensor.numel() for _, tensor in tensors) > MOST_PARAMETERS or any(tensor.is_meta for _, tensor in tensors):
        return ""
    digest = hashlib.sha256(
        f"{type(model)} {model.config} {model.config._attn_implementation} {model.generation_config}".encode()
    )
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tensor.device} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
