"""The probe: compares a backend's logits of a small tree with the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.backends.support import FAILURES
from lookahead.config import LookaheadConfig, SamplingParams
from lookahead.models.facts import UnsupportedModelError, first_line, kind_of, refusal
from lookahead.models.patches import Outputs, patch_of, patched
from lookahead.models.quantised import activations_name


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
    check_training(model, lambda: _plain_logits(model, prefix, backend.device))
    try:
        ours, *others = _tree_logits(backend, prefix, tree, *fans)
    except FAILURES as error:
        raise refusal(model, f"its forward pass fails on a tree of tokens ({first_line(error)})") from error
    paths = ([root], [root, decoy], [root, child], straight)
    prompt = [*prefix, root] if backend.capabilities.runs_prompts else prefix
    if backend.capabilities.runs_prompts:
        in_a_row = [_plain_logits(model, prefix + path, backend.device) for path in paths[1:]]
    else:
        in_a_row = [_one_by_one(model, prefix, path, backend.device)[0][-1] for path in paths[1:]]
    try:
        own_logits, _ = _one_by_one(model, prompt, [*prefix, *straight][len(prompt) :], backend.device)
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
        cache = _one_by_one(model, prefix, [], device)[1]
        with Outputs(names) as seen:
            model(**_inputs(model, list(run), len(prefix), device), past_key_values=cache, use_cache=True)
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


def distance_of(backend: Backend, ours: torch.Tensor, own: torch.Tensor, alone: Callable[[], torch.Tensor]) -> float:
    """The relative error of a tree's logits, if the model's `own` are right.

    In half precision the backend's kernels and the model's own may differ by more than a broken mask does. So where
    their logits are only near, the tree is compared with the backend's own logits of the same token `alone`.
    """
    distance, close = relative(ours, own), closeness(backend)
    if close == TOLERANCE_HALF and close < distance <= NEAR:
        return relative(ours, alone())
    return distance


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


def forked(tokens: list[int]) -> TokenTree:
    """The probe's tree: root, decoy, and a child and grandchild on another branch than the decoy."""
    return TokenTree(tokens, [-1, 0, 0, 2], [0, 1, 1, 2], [0, 1, 2, 3])


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


CHANGED, ADDED, ALIKE = 0.15, 0.02, 0.9
"""A forward hook changes one token alone if its module's outputs differ by more than CHANGED times their size for each
of two tokens, or by more than ADDED and alike (the cosine between the two differences). On 12 layers of the embedded
model in bf16, modules with hooks that change nothing differed by up to 0.015, and hooks that add 0.03 were found."""


LENGTHS = (2, LookaheadConfig().budget)
"""Sizes of the trees on which a model with a forward hook is tested: besides the probe's own size the smallest and the
largest, to detect a hook that distinguishes one token, a few and many."""


def _plain_logits(model: Any, ids: list[int], device: torch.device) -> torch.Tensor:
    """[V] logits after `ids` by the model alone, in one pass without a cache."""
    logits: torch.Tensor = model(**_inputs(model, ids, 0, device), use_cache=False).logits
    return logits[0, -1].float()


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
        _, cache = _one_by_one(backend.model, tokens[:PREFIX], [], backend.device)
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


def _inputs(model: Any, ids: list[int], first: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A batch of one, with its positions if the model takes them, as `generate` passes them."""
    inputs = {"input_ids": torch.tensor([ids], device=device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(first, first + len(ids), device=device)[None]
    return inputs


def relative(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed - expected).norm() / expected.norm().clamp_min(1e-6))


def _one_by_one(
    model: Any, prefix: list[int], tokens: list[int], device: torch.device
) -> tuple[list[torch.Tensor], Any]:
    """The logits [V] of one pass over the prefix, and then of one pass per token, as in `generate`; and the cache after
    them."""
    output = model(**_inputs(model, prefix, 0, device), use_cache=True)
    name = "cache_params" if hasattr(output, "cache_params") else "past_key_values"
    if getattr(output, name) is None:  # some models take a cache but create none
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        output = model(**_inputs(model, prefix, 0, device), **{name: cache}, use_cache=True)
    logits = [output.logits[0, -1].float()]
    for index, token in enumerate(tokens, len(prefix)):
        given = {name: getattr(output, name)}
        output = model(**_inputs(model, [token], index, device), **given, use_cache=True)
        logits.append(output.logits[0, -1].float())
    return logits, getattr(output, name)
