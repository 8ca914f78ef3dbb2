"""The probe: a backend runs a small tree, and its logits are compared with the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.backends.support import FAILURES, UnsupportedModelError, first_line, kind_of
from lookahead.config import SamplingParams


@torch.inference_mode()
def probe(backend: Backend) -> None:
    """Run a small tree on the backend and compare its logits with the model's own on each path.

    A model that ignores the mask, the positions or the cache gives other logits, and is refused. The prefix has 3
    tokens. Node 1 is a decoy: nodes 2 and 3 see it only if the mask is broken. In half precision the backend's kernels
    and the model's own may differ by more than a broken mask does. So where their logits are only near, the tree is
    compared with the backend's own logits of the same tokens one after the other.
    """
    model = backend.model
    kind = kind_of(model)
    *prefix, root, decoy, child, grandchild = probe_tokens(model, backend.vocab_size)
    tree = forked([root, decoy, child, grandchild])
    check_training(model, lambda: _plain_logits(model, prefix, backend.device))
    try:
        ours = _tree_logits(backend, prefix, tree)
    except FAILURES as error:
        raise UnsupportedModelError(
            f"model type {kind!r} cannot be decoded exactly: its forward pass fails on a tree of tokens "
            f"({first_line(error)})"
        ) from error
    for node, path in enumerate(([root], [root, decoy], [root, child], [root, child, grandchild])):
        ids = prefix + path
        plain = _plain_logits(model, ids, backend.device)
        distance, close = relative(ours[node], plain), closeness(backend)
        if close == TOLERANCE_HALF and close < distance <= (NEAR_INT8 if backend.dtype == torch.int8 else NEAR):
            alone = _tree_logits(backend, [*prefix, *path[:-1]], _alone(path[-1]))[0]
            distance = relative(ours[node], alone)
        if not distance <= close:
            check_finite(model, plain)
            reason = "its attention does not follow the mask or the positions"
            if not relative(_one_by_one(model, ids, backend.device), plain) <= close:
                reason = (
                    "so do the model's own passes over one token and over several, as with quantised activations "
                    "or attention that is not causal"
                )
            raise UnsupportedModelError(
                f"model type {kind!r} cannot be decoded exactly: a tree of tokens gives other logits than the tokens "
                f"in a row (relative error {distance:.2g}); {reason}"
            )


def probe_tokens(model: Any, vocab: int) -> list[int]:
    """Seven tokens from all over the vocabulary, none of which the config names: a picture's placeholder is no text."""
    named = {value for key, value in _flat(model.config.to_dict()) if key.endswith(("_id", "_ids", "_index"))}
    tokens = []
    for i in range(7):
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
    """The relative error that the probe allows. Under autocast a model in fp32 computes in half precision."""
    exact = backend.dtype == torch.float32 and not torch.is_autocast_enabled(backend.device.type)
    return TOLERANCE if exact else TOLERANCE_HALF


TOLERANCE, TOLERANCE_HALF, NEAR = 1e-3, 0.1, 0.3
"""The relative errors that the probe allows: in fp32, in half precision, and in half precision between two sets of
kernels. On the embedded model in bf16, with random tokens, the graph backend and transformers differed by up to 0.2."""


NEAR_INT8 = 1.0
"""The same between a model in fp32 and what a backend made of it in int8."""


def _plain_logits(model: Any, ids: list[int], device: torch.device) -> torch.Tensor:
    """[V] logits after `ids` by the model alone, in one pass without a cache."""
    logits: torch.Tensor = model(**_inputs(model, ids, 0, device), use_cache=False).logits
    return logits[0, -1].float()


def _alone(token: int) -> TokenTree:
    return TokenTree([token], [-1], [0], [0])


def _tree_logits(backend: Backend, prefix: list[int], tree: TokenTree) -> torch.Tensor:
    """Logits of a tree behind a prefix. The prefix runs in a step before, so that the tree reads it from the cache."""
    slot = backend.open()
    try:
        backend.step([StepInput(slot, prefix[:-1], _alone(prefix[-1]), SamplingParams(), ())])
        backend.commit([(slot, ())])
        logits: torch.Tensor = backend.step([StepInput(slot, (), tree, SamplingParams(), (), logits=True)])[0].logits
        backend.commit([(slot, ())])
        return logits.float()
    finally:
        backend.close(slot)


def _inputs(model: Any, ids: list[int], first: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A batch of one, with its positions if the model takes them, as `generate` passes them."""
    inputs = {"input_ids": torch.tensor([ids], device=device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(first, first + len(ids), device=device)[None]
    return inputs


def relative(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed - expected).norm() / expected.norm().clamp_min(1e-6))


def _one_by_one(model: Any, ids: list[int], device: torch.device) -> torch.Tensor:
    """[V] logits after `ids`, one pass per token over the model's own cache, as `generate` does."""
    cache = None
    for place, token in enumerate(ids):
        output = model(**_inputs(model, [token], place, device), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
    return output.logits[0, -1].float()
