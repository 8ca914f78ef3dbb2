"""Probes a model with custom input preparation: a tree against `generate`'s own passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.own_passes import TOLERANCE_HALF, check_finite, check_training, closeness, probe_tokens
from lookahead.backends.probe import distance_of, forked
from lookahead.backends.probe_hooks import check_length, check_patches, fans_of
from lookahead.backends.support import FAILURES
from lookahead.config import SamplingParams
from lookahead.models.facts import UnsupportedModelError, first_line, refusal
from lookahead.models.patches import patch_of
from lookahead.transformers_hook.cache_state import growing_copy
from lookahead.transformers_hook.prompt import Start


@torch.no_grad()
def probe_start(backend: EagerBackend, start: Start) -> None:
    """Run a small tree after the prompt, and compare its logits with those of `generate`'s own passes.

    This is `backends.probe` for models with custom input preparation. The first pass of a call cannot be wrong: it was
    the model's own.
    """
    model, patch = backend.model, patch_of(backend.model.modules())
    root, decoy, child, grandchild = probe_tokens(model, backend.vocab_size)[:4]
    try:
        check_training(model, lambda: own_logits(model, start, [root])[0])
        straight = own_logits(model, start, [root, child, grandchild])
        own = [straight[0], own_logits(model, start, [root, decoy])[1], *straight[1:]]
    except UnsupportedModelError:
        raise
    except FAILURES as error:
        raise refusal(model, f"its own pass over a new token fails ({first_line(error)})") from error
    try:
        ours = _tree_logits(backend, start, (), forked([root, decoy, child, grandchild]))
    except FAILURES as error:
        raise refusal(model, f"its forward pass fails on a tree of tokens ({first_line(error)})") from error
    for node, path in enumerate(([root], [root, decoy], [root, child], [root, child, grandchild])):
        distance = distance_of(backend, ours[:, node], own[node], partial(_only_logits, backend, start, path))
        if not distance <= closeness(backend):
            check_finite(model, own[node])
            reason = f"a tree of tokens gives other logits than generate's own passes (relative error {distance:.2g})"
            cause = "it computes positions in its own way, or does not follow the mask"
            if patch is not None:
                cause += f", or {patch} does not treat every token alike"
            raise refusal(model, f"{reason}; {cause}")


def lengths_of(widest: int, prompt: int) -> set[int]:
    """Tree sizes to test on a model with a forward hook: the smallest, the largest, and the length of the prompt's
    pass, by which a hook may recognise the prompt. Every probe has passes of 1 and 4 tokens."""
    return {min(length, widest) for length in (2, widest, prompt)} - {1, 4}


@torch.no_grad()
def probe_lengths(backend: EagerBackend, start: Start, lengths: Iterable[int]) -> None:
    """Run trees of these sizes after the first sequence's prompt, on a model that has passed the probe."""
    model, lengths = backend.model, list(lengths)
    *prefix, token, other_token = probe_tokens(model, backend.vocab_size)[:5]
    tree = forked(probe_tokens(model, backend.vocab_size)[:4])
    ours = _tree_logits(backend, start, (), tree, batch_size=1)
    for fan in fans_of(tree, lengths):
        try:
            other = _tree_logits(backend, start, (), fan, batch_size=1)
        except FAILURES as error:
            reason = f"its forward pass fails on a tree of {len(fan)} tokens ({first_line(error)})"
            raise refusal(model, reason) from error
        check_length(backend, ours, other)
    if closeness(backend) == TOLERANCE_HALF:
        check_patches(model, prefix, (token, other_token), lengths, backend.device)


def own_logits(model: Any, start: Start, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Per token, the logits [B, V] of `generate`'s own single-token passes, on a copy of the cache."""
    ids, kwargs = start.ids, {**start.kwargs, start.cache_name: growing_copy(start.cache, model)}
    logits = []
    for token in tokens:
        ids = torch.cat([ids, ids.new_full((len(ids), 1), token)], dim=1)
        outputs = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs), return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
        logits.append(outputs.logits[:, -1].float())
    return logits


def _only_logits(backend: EagerBackend, start: Start, path: Sequence[int]) -> torch.Tensor:
    """[B, V] logits after a path of which only the last token is the tree."""
    return _tree_logits(backend, start, path[:-1], TokenTree(path[-1:], [-1], [0], [0]))[:, 0]


def _tree_logits(
    backend: EagerBackend, start: Start, chunk: Sequence[int], tree: TokenTree, batch_size: int | None = None
) -> torch.Tensor:
    """[B, nodes, V] logits of this tree after a chunk of tokens, for the first `batch_size` or all prompts."""
    slots = [backend.open() for _ in start.offsets[:batch_size]]
    try:
        for batch_index, slot in enumerate(slots):
            backend.adopt(slot, start.batch.cached(batch_index), start.layers(batch_index), start.offsets[batch_index])
        inputs = [StepInput(slot, chunk, tree, SamplingParams(), (), logits=True) for slot in slots]
        outputs = backend.step(inputs)
        backend.commit([(slot, ()) for slot in slots])
        return torch.stack([output.logits.float() for output in outputs if output.logits is not None])
    finally:
        for slot in slots:
            backend.close(slot)
