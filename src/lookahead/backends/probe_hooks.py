"""The part of the probe for models with a forward hook, which may depend on the length of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend
from lookahead.backends.own_passes import closeness, inputs_of, relative, run_one_by_one
from lookahead.backends.support import FAILURES
from lookahead.config import LookaheadConfig
from lookahead.models.facts import UnsupportedModelError, refusal
from lookahead.models.patches import Outputs, patch_of, patched

CHANGED, ADDED, ALIKE = 0.15, 0.02, 0.9
"""A forward hook changes one token alone if its module's outputs differ by more than CHANGED times their size for each
of two tokens, or by more than ADDED and alike (the cosine between the two differences). On 12 layers of the embedded
model in bf16, modules with hooks that change nothing differed by up to 0.015, and hooks that add 0.03 were found."""


LENGTHS = (2, LookaheadConfig().budget)
"""Sizes of the trees on which a model with a forward hook is tested: besides the probe's own size the smallest and the
largest, to detect a hook that distinguishes one token, a few and many."""


def fans_of(tree: TokenTree, lengths: Iterable[int]) -> list[TokenTree]:
    """Trees of these sizes with the root of the probe's tree, and its child in all other nodes."""
    root, child = tree.tokens[0], tree.tokens[2]
    return [
        TokenTree([root, *[child] * n], [-1, *[0] * n], [0, *[1] * n], range(n + 1))
        for n in (length - 1 for length in sorted(lengths))
    ]


def check_length(backend: Backend, ours: torch.Tensor, fan: torch.Tensor) -> None:
    """Refuse a model whose logits depend on the length of a pass, as a forward hook can make them.

    `ours` are the logits [..., 4, V] of the probe's tree, and `fan` those [..., n, V] of one of `fans_of` it.
    """
    length, nodes = fan.shape[-2], ours.shape[-2]
    for node in range(length):
        distance = relative(fan[..., node, :], ours[..., 2 if node else 0, :])
        if not distance <= closeness(backend):
            patch = patch_of(backend.model.modules()) or "its forward pass"
            reason = f"a tree of {length} tokens gives other logits than a tree of {nodes}"
            cause = f"{patch} depends on the length of a pass"
            raise refusal(backend.model, f"{reason} (relative error {distance:.2g}); {cause}")


@torch.inference_mode()
def check_patches(
    model: Any, prefix: list[int], tokens: Sequence[int], lengths: Iterable[int], device: torch.device
) -> None:
    """Refuse a model with a forward hook that gives a token other outputs alone than as the first of a longer pass.

    In half precision, logits may differ by more between kernels than by what such a hook does. So its module's own
    outputs are compared, for each of the two `tokens` after the prefix. A hook that adds the same to both may add
    little: rounding errors of kernels differ from token to token.
    """
    names = dict(patched(model.modules()))

    def outputs(run: Sequence[int]) -> dict[torch.nn.Module, torch.Tensor]:
        cache = run_one_by_one(model, prefix, [], device)[1]
        with Outputs(names) as seen:
            model(**inputs_of(model, list(run), len(prefix), device), past_key_values=cache, use_cache=True)
        return {module: rows[0] for module, rows in seen.rows.items()}

    try:
        alone = [outputs([token]) for token in tokens]
        for length in lengths:
            longer = [outputs([token] * length) for token in tokens]
            for module in alone[0].keys() & longer[0].keys():
                changes = [one[module] - more[module] for one, more in zip(alone, longer, strict=True)]
                distance = min(relative(more[module], one[module]) for one, more in zip(alone, longer, strict=True))
                alike = float(torch.cosine_similarity(changes[0], changes[1], dim=0))
                if distance > CHANGED or (distance > ADDED and alike > ALIKE):
                    reason = f"{names[module]} gives a token other outputs alone than in a pass of {length}"
                    raise refusal(
                        model, f"{reason} (relative error {distance:.2g}): it depends on the length of a pass"
                    )
    except UnsupportedModelError:
        raise
    except FAILURES:  # a model that needs more than token ids; the logits have been compared
        return
