"""Before the first step, check that all ranks have the same model and settings."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

import lookahead
from lookahead.backends.base import Backend
from lookahead.models.quantised import weights_name
from lookahead.parallel.group import START, Group

FOLD = 4096
"""`checksum` reshapes a tensor's words into rows of this length, and sums over rows and columns."""
MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as int64. Each sum is weighted by a multiple of it, so that the order matters."""


def compare(group: Group, facts: dict[str, Any]) -> None:
    """Raise ValueError if the ranks differ in a fact. Every rank sees all facts, so all raise the same error."""
    texts = group.agree("the comparison of models", json.dumps(facts).encode(), START)
    everyone = [json.loads(text) for text in texts]
    for rank, theirs in enumerate(everyone):
        for name in facts:
            # The ranks of a tensor-parallel group hold different shards of the weights. Each is compared with the rank
            # of the first group that holds the same shard.
            other = rank % group.copies if name == "weights" else 0
            expected = everyone[other][name]
            if theirs.get(name) != expected:
                what, ours, found = _difference(name, expected, theirs.get(name))
                raise ValueError(
                    f"rank {rank} differs from rank {other} in {what}: {found} and {ours}; start every rank with the "
                    "same model and settings"
                )


def facts_of(model: Any, tokenizer: Any, backend: Backend, group: Group) -> dict[str, Any]:
    """The facts that must be equal on every rank. Weights have one checksum per tensor, computed on their device."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    return {
        "lookahead's version": lookahead.__version__,
        "torch's version": torch.__version__.split("+")[0],
        "the number of ranks": group.size,
        "the tensor-parallel size": group.copies,
        "the rank timeout": group.timeout,
        "the per-step check": group.check,
        "the model's config": json.loads(json.dumps(config, default=str)),
        "the dtype": str(backend.dtype),
        "the weights' format": weights_name(model, backend.dtype),
        "the backend": backend.capabilities.name,
        "the tokenizer": _vocabulary(tokenizer),
        "weights": {name: checksum(weight) for name, weight in model.state_dict().items()},
    }


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's shape and exact bits. It reads the tensor twice and allocates no copy of it."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.device.type == "meta":  # offloaded: there are no values to read
        return f"{tuple(local.shape)} offloaded"
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        inside = [getattr(local, name).contiguous().flatten() for name in local.__tensor_flatten__()[0]]
        local = torch.cat([one.view(torch.uint8) for one in inside])
    words = local.detach().contiguous().flatten()
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(words.element_size(), torch.uint8)
    words = words.view(wide)
    full = len(words) // FOLD * FOLD
    folded = words[:full].view(-1, FOLD)
    sums = [folded.sum(0, dtype=torch.int64), folded.sum(1, dtype=torch.int64), words[full:].to(torch.int64)]
    total = 0
    for one in sums:
        positions = torch.arange(1, len(one) + 1, device=one.device, dtype=torch.int64)
        total = (total * 31 + int(((one ^ (one >> 17)) * (positions * MIX | 1)).sum())) % (1 << 64)
    return f"{tuple(local.shape)} {total:016x}"


def _vocabulary(tokenizer: Any) -> str:
    """A hash of the vocabulary and the chat template."""
    words = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    facts = [sorted(words.items(), key=lambda word: word[1]), getattr(tokenizer, "chat_template", None)]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _difference(name: str, expected: Any, found: Any) -> tuple[str, str, str]:
    """The name of what differs, the expected value and the found one; for dictionaries, of the first differing key."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *[key for key in found if key not in expected]]:
            if expected.get(key) != found.get(key):
                return f"{name} ({key})", f"{expected.get(key)!r:.60}", f"{found.get(key)!r:.60}"
    return name, f"{expected!r:.60}", f"{found!r:.60}"
