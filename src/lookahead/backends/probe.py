"""The probe: compares a backend's logits of a small tree with the model's own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.backends.own_passes import (
    NEAR,
    PREFIX,
    TOLERANCE_HALF,
    check_finite,
    check_training,
    closeness,
    plain_logits,
    probe_tokens,
    relative,
    run_one_by_one,
)
from lookahead.backends.probe_hooks import LENGTHS, check_length, check_patches, fans_of
from lookahead.backends.support import FAILURES
from lookahead.config import SamplingParams
from lookahead.models.facts import first_line, refusal
from lookahead.models.patches import patch_of


@torch.inference_mode()
def probe(backend: Backend, lengths: Collection[int] | None = None) -> None:
    """Run a small tree on the backend and compare its logits with the model's own on each path.

    A model that ignores the mask, the positions or the cache gives other logits, and is refused. The prefix has 3
    tokens. Node 1 is a decoy: nodes 2 and 3 see it only if the mask is broken. The model's own logits are computed
    twice: in one pass over the full path, and in one pass per token, as in `generate`, since a forward hook may depend
    on the length of a pass. A model with such a hook is also tested on trees of these `lengths`. Where only the model
    runs prompts, it runs the prefix, and the rest one by one.
    """
    model, patch = backend.model, patch_of(backend.model.modules())
    *prefix, root, decoy, child, grandchild = probe_tokens(model, backend.vocab_size)
    tree, straight = forked([root, decoy, child, grandchild]), [root, child, grandchild]
    fans = [] if patch is None else fans_of(tree, LENGTHS if lengths is None else lengths)
    # 1. The logits of the trees, and the model's own.
    check_training(model, lambda: plain_logits(model, prefix, backend.device))
    try:
        ours, *others = _tree_logits(backend, prefix, tree, *fans)
    except FAILURES as error:
        raise refusal(model, f"its forward pass fails on a tree of tokens ({first_line(error)})") from error
    paths = ([root], [root, decoy], [root, child], straight)
    prompt = [*prefix, root] if backend.capabilities.runs_prompts else prefix
    if backend.capabilities.runs_prompts:
        in_a_row = [plain_logits(model, prefix + path, backend.device) for path in paths[1:]]
    else:
        in_a_row = [run_one_by_one(model, prefix, path, backend.device)[0][-1] for path in paths[1:]]
    try:
        own_logits, _ = run_one_by_one(model, prompt, [*prefix, *straight][len(prompt) :], backend.device)
        first, *one_by_one = own_logits[-3:]
    except FAILURES as error:
        raise refusal(model, f"its own pass over a new token fails ({first_line(error)})") from error
    # 2. Compare them. In half precision the model's kernels for one token round differently from those for several.
    close = closeness(backend)
    near = NEAR if patch is None and close == TOLERANCE_HALF else close
    # Recurrent states are folded in another form where tokens are in a row, and may have other limits there.
    rows = [first, *in_a_row] if backend.capabilities.adopts else [first]
    pairs = [(node, own, "in a row", close) for node, own in enumerate(rows)]
    pairs += [(node, own, "one by one", near) for node, own in zip((2, 3), one_by_one, strict=True)]
    for node, own, order, allowed in pairs:
        *before, last = prefix + paths[node]
        distance = distance_of(backend, ours[node], own, partial(_only_logits, backend, before, last))
        if not distance <= allowed:
            check_finite(model, own)
            steady = relative(one_by_one[-1], in_a_row[-1]) <= close
            reason = f"a tree of tokens gives other logits than the tokens {order} (relative error {distance:.2g})"
            raise refusal(model, f"{reason}; {_cause(patch, steady)}")
    for other in others:
        check_length(backend, ours, other)
    if patch is not None and close == TOLERANCE_HALF:
        check_patches(model, [*prefix, root], (child, decoy), [len(tree), *map(len, fans)], backend.device)


def _cause(patch: str | None, steady: bool) -> str:
    """Why a tree has other logits. `steady`: the model's own passes over one token and over several have the same."""
    if not steady:
        known = "as with quantised activations or attention that is not causal"
        cause = "so do the model's own passes over one token and over several"
        return f"{cause}, {known}" if patch is None else f"{cause}: {patch} depends on the length of a pass"
    cause = "its attention does not follow the mask or the positions"
    return cause if patch is None else f"{cause}, or {patch} does not treat every token alike"


def distance_of(backend: Backend, ours: torch.Tensor, own: torch.Tensor, alone: Callable[[], torch.Tensor]) -> float:
    """The relative error of a tree's logits, if the model's `own` are right.

    In half precision the backend's kernels and the model's own may differ by more than a broken mask does. So where
    their logits are only near, the tree is compared with the backend's own logits of the same token `alone`.
    """
    distance, close = relative(ours, own), closeness(backend)
    if close == TOLERANCE_HALF and close < distance <= NEAR:
        return relative(ours, alone())
    return distance


def forked(tokens: list[int]) -> TokenTree:
    """The probe's tree: root, decoy, and a child and grandchild on another branch than the decoy."""
    return TokenTree(tokens, [-1, 0, 0, 2], [0, 1, 1, 2], [0, 1, 2, 3])


def _alone(token: int) -> TokenTree:
    return TokenTree([token], [-1], [0], [0])


def _only_logits(backend: Backend, prefix: list[int], token: int) -> torch.Tensor:
    """[V] logits of a tree of one token after a prefix."""
    return _tree_logits(backend, prefix, _alone(token))[0][0]


def _tree_logits(backend: Backend, prefix: list[int], first: TokenTree, *others: TokenTree) -> list[torch.Tensor]:
    """Logits of each tree after a prefix. The prefix runs in a separate step, so that the tree reads it from the cache.

    The other trees adopt the prefix's K/V without another step.
    """
    slot = backend.open()
    try:
        _cache_prefix(backend, slot, prefix)
        layers = backend.cached(slot) if others else ()
        logits = [_logits(backend, slot, first, len(prefix) + 1)]
    finally:
        backend.close(slot)
    for tree in others:
        slot = backend.open()
        try:
            backend.adopt(slot, len(prefix), layers)
            logits.append(_logits(backend, slot, tree, len(prefix) + 1))
        finally:
            backend.close(slot)
    return logits


def _cache_prefix(backend: Backend, slot: int, tokens: list[int]) -> None:
    """Cache these tokens in a slot. Where only the model runs prompts, its own pass runs the first PREFIX of them."""
    if not backend.capabilities.runs_prompts:
        _, cache = run_one_by_one(backend.model, tokens[:PREFIX], [], backend.device)
        backend.adopt(slot, PREFIX, [(layer.keys[0], layer.values[0]) for layer in cache.layers])
        tokens = tokens[PREFIX:]
    if tokens:
        given = StepInput(slot, tokens[:-1], _alone(tokens[-1]), SamplingParams(), (), prompt_tokens=len(tokens))
        backend.step([given])
        backend.commit([(slot, ())])


def _logits(backend: Backend, slot: int, tree: TokenTree, prompt: int) -> torch.Tensor:
    """[nodes, V] logits of a tree in this slot, whose text begins with a prompt of this length."""
    given = StepInput(slot, (), tree, SamplingParams(), (), logits=True, prompt_tokens=prompt)
    logits: torch.Tensor = backend.step([given])[0].logits
    backend.commit([(slot, ())])
    return logits.float()
