"""The probe of a model that prepares its passes in its own way: a tree against `generate`'s own passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.probe import (
    NEAR,
    TOLERANCE_HALF,
    check_finite,
    check_training,
    closeness,
    forked,
    probe_tokens,
    relative,
)
from lookahead.backends.support import FAILURES, UnsupportedModelError, first_line
from lookahead.config import SamplingParams
from lookahead.transformers_hook.prompt import Start, refusal


@torch.no_grad()
def probe_start(backend: EagerBackend, start: Start) -> None:
    """Run a small tree after the prompt, and compare its logits with those of `generate`'s own passes.

    This is `backends.probe` for a model that prepares its passes in its own way. The first pass of a call cannot be
    wrong: it was the model's own.
    """
    model = backend.model
    root, decoy, child, grandchild = probe_tokens(model, backend.vocab_size)[:4]
    try:
        check_training(model, lambda: _own_logits(model, start, [root])[0])
        straight = _own_logits(model, start, [root, child, grandchild])
        own = [straight[0], _own_logits(model, start, [root, decoy])[1], *straight[1:]]
    except UnsupportedModelError:
        raise
    except FAILURES as error:
        raise refusal(model, f"its own pass over a new token fails ({first_line(error)})") from error
    try:
        ours = _tree_logits(backend, start, (), forked([root, decoy, child, grandchild]))
    except FAILURES as error:
        raise refusal(model, f"its forward pass fails on a tree of tokens ({first_line(error)})") from error
    for node, path in enumerate(([root], [root, decoy], [root, child], [root, child, grandchild])):
        distance, close = relative(ours[:, node], own[node]), closeness(backend)
        if close == TOLERANCE_HALF and close < distance <= NEAR:
            alone = TokenTree(path[-1:], [-1], [0], [0])
            distance = relative(ours[:, node], _tree_logits(backend, start, path[:-1], alone)[:, 0])
        if not distance <= close:
            check_finite(model, own[node])
            reason = f"a tree of tokens gives other logits than generate's own passes (relative error {distance:.2g})"
            raise refusal(model, f"{reason}; it finds positions in a way of its own, or does not follow the mask")


def _own_logits(model: Any, start: Start, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Per token, the logits [B, V] of `generate`'s own pass over it, one after the other, on a copy of the cache."""
    ids, kwargs = start.ids, {**start.kwargs, "past_key_values": copy.deepcopy(start.cache)}
    logits = []
    for token in tokens:
        ids = torch.cat([ids, ids.new_full((len(ids), 1), token)], dim=1)
        outputs = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs), return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
        logits.append(outputs.logits[:, -1].float())
    return logits


def _tree_logits(backend: EagerBackend, start: Start, trail: Sequence[int], tree: TokenTree) -> torch.Tensor:
    """[B, nodes, V] logits of this tree behind every entry's prompt and a trail."""
    slots = [backend.open() for _ in start.offsets]
    try:
        for entry, slot in enumerate(slots):
            backend.adopt(slot, start.batch.cached(entry), start.layers(entry), start.offsets[entry])
        inputs = [StepInput(slot, trail, tree, SamplingParams(), (), logits=True) for slot in slots]
        outputs = backend.step(inputs)
        backend.commit([(slot, ()) for slot in slots])
        return torch.stack([output.logits.float() for output in outputs if output.logits is not None])
    finally:
        for slot in slots:
            backend.close(slot)
