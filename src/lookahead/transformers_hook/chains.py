"""Models that run chains, in a call of `generate`: their backend, its probe, and the cache that the call returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticLayer

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.eager.cache_rows import changed
from lookahead.backends.eager.chain_probe import check_chains, check_close, probe_chains
from lookahead.backends.eager.chains import ChainBackend
from lookahead.backends.own_passes import check_training, probe_tokens
from lookahead.backends.prompts import prompt_chunk
from lookahead.backends.support import FAILURES
from lookahead.config import SamplingParams
from lookahead.models.facts import UnsupportedModelError, first_line, refusal
from lookahead.transformers_hook import facts
from lookahead.transformers_hook.facts import ModelFacts
from lookahead.transformers_hook.probe import own_logits
from lookahead.transformers_hook.prompt import Start


def check_given_cache(cache: Any, batch_size: int, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse a given cache that cannot be copied, has other rows, or does not say how many tokens it holds."""
    states = model_kwargs.get("cache_params")
    if states is not None and getattr(states, "_is_user_defined", False):
        raise ValueError("cache_params cannot be given: states do not say which tokens they hold; leave it out")
    if cache is None:
        return
    layers: list[Any] = getattr(cache, "layers", [])
    static = [layer for layer in layers if isinstance(layer, StaticLayer)]
    if static or not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        kind = type(static[0] if static else cache).__name__
        raise ValueError(
            f"past_key_values with a {kind} cannot be used with lookahead decoding of this model; use a DynamicCache "
            "without offloading"
        )
    for layer in layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and keys.shape[0] != batch_size:
            raise ValueError(
                f"past_key_values holds {keys.shape[0]} rows and the prompt {batch_size}; pass its own cache"
            )


def check_outputs(names: Sequence[str]) -> None:
    """Refuse outputs that chains do not give."""
    if "attentions" in names:
        raise ValueError(
            "output_attentions=True cannot be given for a model whose steps are chains; leave it out, or leave out "
            "custom_generate"
        )


def chain_backend(model: Any, known: ModelFacts, start: Start) -> ChainBackend:
    """A chain backend for this call. The model is probed unless an earlier call had the same form."""
    backend = ChainBackend(model, probed=False, arguments=start.arguments)
    usual = start.plain and start.has_positions
    form = ("chains", *start.form)
    with facts.probing:
        if usual and ("chains",) not in known.probed:
            probed = ChainBackend(model, probed=False)
            probe_chains(probed)
            known.joins = probed.joins
            known.probed["chains",] = set()
        if form not in known.probed and not (usual and start.batch.mask.all()):
            probe_start(backend, start)
            known.probed[form] = set()
    backend.joins = usual and known.joins
    return backend


@torch.no_grad()
def probe_start(backend: ChainBackend, start: Start) -> None:
    """Run chains after the prompt, and compare their logits with those of `generate`'s own passes.

    This is `probe_chains` for models with custom input preparation.
    """
    model = backend.model
    check_chains(model)
    root, decoy, child, grandchild = probe_tokens(model, backend.vocab_size)[:4]
    try:
        check_training(model, lambda: own_logits(model, start, [root])[0])
        own = own_logits(model, start, [root, child, grandchild])
    except UnsupportedModelError:
        raise
    except FAILURES as error:
        raise refusal(model, f"its own pass over a new token fails ({first_line(error)})") from error
    slots = adopted(backend, start)
    try:
        refused = _step(backend, slots, [root, decoy], 0)
        again = _step(backend, slots, [root, child], 1)
        last = _step(backend, slots, [grandchild], 0)
    except FAILURES as error:
        raise refusal(model, f"its pass over several tokens after others fails ({first_line(error)})") from error
    finally:
        for slot in slots:
            backend.close(slot)
    reason = "its pass over several tokens gives other logits than generate's own passes"
    check_close(backend, [refused[:, 0], again[:, 0], again[:, 1], last[:, 0]], [own[0], *own], reason)


def _step(backend: ChainBackend, slots: Sequence[int], tokens: Sequence[int], accepted: int) -> torch.Tensor:
    """[B, nodes, V] logits of a chain, of which these draft tokens are accepted, after every prompt."""
    size = len(tokens)
    tree = TokenTree(tokens, range(-1, size - 1), range(size), range(size))
    outputs = backend.step([StepInput(slot, (), tree, SamplingParams(), (), logits=True) for slot in slots])
    backend.commit([(slot, range(1, accepted + 1)) for slot in slots])
    return torch.stack([output.logits.float() for output in outputs if output.logits is not None])


def adopted(backend: ChainBackend, start: Start, slots: Sequence[int] = ()) -> Sequence[int]:
    """Slots with the texts of the prompts."""
    slots = slots or [backend.open() for _ in start.offsets]
    backend.adopt_cache(slots, start.cache, start.batch.mask, start.offsets)
    return slots


@torch.no_grad()
def extend(cache: Any, backend: ChainBackend, start: Start, ids: torch.Tensor, left: Any) -> None:
    """Let the cache hold every position of a call. `start` is the state after the prompt.

    `ids` [B, L] are prompt and output up to the last position to cache. `left`, for a single sequence, is its number of
    cached tokens after decoding, and its cache. The rows of a batch have ended at different positions, and its cache is
    to hold the padding after them, too, so all new positions run again in a pass.
    """
    if len(ids) > 1 or left is None:
        left = int(start.batch.mask.sum(dim=-1)[0]), start.cache
        mask = start.batch.mask
    else:
        missing = left[0] - int(start.batch.mask.sum())
        mask = torch.nn.functional.pad(start.batch.mask, (0, missing), value=True)
    total = start.batch.mask.shape[1] + ids.shape[1] - start.ids.shape[1]
    slots = [backend.open() for _ in ids]
    try:
        backend.adopt_cache(slots, left[1], mask, start.offsets)
        for part in ids[:, ids.shape[1] - (total - mask.shape[1]) :].split(prompt_chunk(backend), dim=1):
            if part.shape[1]:
                backend.append(slots, part.cpu().numpy(), [part.shape[1] - 1])
        replace(cache, backend.cache_of_rows(slots))
    finally:
        for slot in slots:
            backend.close(slot)


def replace(cache: Any, other: Any) -> None:
    """Let a cache, which the caller of `generate` may know, hold what another one holds. It gets tensors of its own:
    those of a backend can only be used in inference mode."""
    other = changed(other, lambda tensor, name: tensor.clone())
    if isinstance(cache, list):
        cache[:] = other
        return
    vars(cache).clear()
    vars(cache).update(vars(other))
