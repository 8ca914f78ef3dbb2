"""The probe of the chain backend: chains, refused and accepted, against the model's own passes over single tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.eager.chains import ChainBackend
from lookahead.backends.own_passes import (
    TOLERANCE_HALF,
    check_finite,
    check_training,
    closeness,
    probe_tokens,
    relative,
)
from lookahead.backends.support import FAILURES
from lookahead.config import SamplingParams
from lookahead.models.facts import UnsupportedModelError, first_line, refusal
from lookahead.models.patches import patch_of

TOLERANCE = 1e-4
"""The relative error of logits in fp32 between a pass over several tokens and passes over one. Of the classes of
transformers 5.22 all that compute the same in both are below 6e-6, with wide random weights, and the others above
9e-4."""


@torch.inference_mode()
def probe_chains(backend: ChainBackend) -> None:
    """Run chains on the backend, which are refused at some depth or accepted, and compare their logits with the model's
    own: of one pass over all tokens, and of passes over single tokens, as in `generate`."""
    model = backend.model
    check_chains(model)
    tokens = probe_tokens(model, backend.vocab_size)
    *prefix, root, decoy, child, grandchild = tokens
    text = [*prefix, root, child, grandchild]
    # 1. The model's own logits after each of the last tokens.
    try:
        check_training(model, lambda: _own(backend, [text])[-1])
        in_a_row = _own(backend, [text])[-3:]
        one_by_one = _own(backend, [prefix, *([token] for token in (root, child, grandchild))])[-3:]
    except UnsupportedModelError:
        raise
    except FAILURES as error:
        raise refusal(model, f"its forward pass fails on token ids alone ({first_line(error)})") from error
    for own in (*in_a_row, *one_by_one):
        check_finite(model, own)
    check_close(
        backend, in_a_row, one_by_one,
        "its passes over single tokens give other logits than one pass over all of them",
    )  # fmt: skip
    # 2. The backend's, of chains that are refused at every depth.
    try:
        path = [root, child, grandchild]
        chains = [([root, decoy], 1), ([root, child, decoy], 2), ([root, decoy, child], 1), ([root, child], 2)]
        ours = [_logits_after(backend, prefix, path, *chain) for chain in chains]
    except UnsupportedModelError:
        raise
    except FAILURES as error:
        reason = f"its pass over several tokens after others fails ({first_line(error)})"
        raise refusal(model, reason) from error
    cause = why_not(model) or "it does not continue from the state that its cache holds"
    for found in ours:
        check_close(
            backend, found, one_by_one, f"its pass over several tokens gives other logits than single tokens: {cause}"
        )
    # 3. Rows of a batch, one of them padded.
    backend.joins = backend.joins and _joins(backend, prefix, [root, child])


def check_chains(model: Any) -> None:
    """Raise UnsupportedModelError for models known to compute several tokens in another way than single ones."""
    if (cause := why_not(model)) is not None:
        raise refusal(model, cause)
    if (patch := patch_of(model.modules())) is not None:
        raise refusal(model, f"{patch} may depend on the length of a pass, and only chains of tokens run here")


def why_not(model: Any) -> str | None:
    """Why passes over several tokens are known to differ from passes over one; None where nothing is known."""
    config = model.config.get_text_config(decoder=True)
    if "reference_sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention depends on where its first pass ended"
    for module in model.modules():
        limit = getattr(module, "time_step_limit", None)
        if limit is not None and tuple(limit) != (0.0, float("inf")):
            return "its pass over several tokens bounds the time steps of its recurrence, and that over one does not"
        if hasattr(module, "dt_proj") and hasattr(module, "x_proj"):
            return "its recurrence (Mamba-1) takes no state with several tokens, and begins anew"
        if hasattr(module, "index_topk"):  # the indexer of DeepSeek's sparse attention
            return "its indexed attention has many equal scores, and which of them it keeps depends on the pass"
    return None


def check_close(
    backend: ChainBackend, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], reason: str
) -> None:
    """Refuse the model for this reason if its logits are not those that are expected."""
    close = closeness(backend)
    allowed = close if close == TOLERANCE_HALF else TOLERANCE
    distance = max(relative(own, other) for own, other in zip(found, expected, strict=True))
    if not distance <= allowed:
        raise refusal(backend.model, f"{reason} (relative error {distance:.2g})")


def _own(backend: ChainBackend, passes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits [V] after each token, by the model's own passes over these tokens."""
    model, cache, rows, done = backend.model, None, list[torch.Tensor](), 0
    positions = "position_ids" in inspect.signature(model.forward).parameters
    for tokens in passes:
        kwargs: dict[str, Any] = {} if cache is None else {backend.cache_name: cache}
        if positions:
            kwargs["position_ids"] = torch.arange(done, done + len(tokens), device=backend.device)[None]
        output = backend.run(torch.tensor([tokens], device=backend.device), kwargs)
        cache, done = backend.cache_of(output), done + len(tokens)
        rows += output.logits[0].float()
    return rows


def _logits_after(
    backend: ChainBackend, prefix: Sequence[int], path: Sequence[int], first: Sequence[int], right: int
) -> list[torch.Tensor]:
    """The logits [V] after each token of `path`, in two steps after the prefix. The `first` chain agrees with the path
    for `right` tokens, and the second is the rest of the path."""
    slot, text = backend.open(), [*prefix, *path]
    try:
        _step(backend, slot, prefix[:-1], prefix[-1:])
        backend.commit([(slot, ())])
        rows = list(_step(backend, slot, (), first))[:right]
        backend.commit([(slot, range(1, right))])
        known = len(prefix) + right
        rows += _step(backend, slot, text[backend.length(slot) : known], text[known:])
        backend.commit([(slot, range(1, len(path) - right))])
        return rows
    finally:
        backend.close(slot)


def _step(backend: ChainBackend, slot: int, chunk: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[nodes, V] logits of a chain."""
    size = len(tokens)
    tree = TokenTree(tokens, range(-1, size - 1), range(size), range(size))
    logits = backend.step([StepInput(slot, chunk, tree, SamplingParams(), (), logits=True)])[0].logits
    assert logits is not None
    return logits.float()


def _joins(backend: ChainBackend, prefix: Sequence[int], path: Sequence[int]) -> bool:
    """Whether two sequences of unequal length have the same logits in one pass as each alone."""
    texts = [prefix, prefix[1:]]
    close = closeness(backend)

    def logits(together: bool) -> list[torch.Tensor]:
        slots = [backend.open() for _ in texts]
        try:
            for slot, text in zip(slots, texts, strict=True):
                _step(backend, slot, text[:-1], text[-1:])
                backend.commit([(slot, ())])
            tree = TokenTree(path[:1], [-1], [0], [0])
            inputs = [StepInput(slot, (), tree, SamplingParams(), (), logits=True) for slot in slots]
            rows = []
            for batch in [inputs] if together else [[one] for one in inputs]:
                rows += [output.logits.float() for output in backend.step(batch) if output.logits is not None]
                backend.commit([(one.slot, ()) for one in batch])
            return rows
        finally:
            for slot in slots:
                backend.close(slot)

    try:
        pairs = zip(logits(True), logits(False), strict=True)
        return max(relative(*pair) for pair in pairs) <= (close if close == TOLERANCE_HALF else TOLERANCE)
    except FAILURES:
        return False
