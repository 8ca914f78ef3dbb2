"""Cached facts about a model between calls of `generate`, and their invalidation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.support import input_device, why_no_trees
from lookahead.config import LookaheadConfig
from lookahead.models.patches import global_hooks, patch_of

logger = logging.getLogger("lookahead")


@dataclass
class ModelFacts:
    """Facts about a model, valid until its `state` changes.

    `code` are the hooks and forward methods that `state` knows by their ids; `patch` names one that is not the model's
    own. `probed` has the forms of calls whose probe went well (`prompt.Start.form`), and for each form the sizes of the
    trees that were tried because of the patch. `default` is the config of calls that give none, and
    `budget` decides how many draft tokens their steps take. `graph` is the model's graph backend, if a call could have
    one; its captured steps are kept for the next call. Only one call at a time may use it (`turn`).
    `addresses` are those of the model's weights when the backend was last synced with them, and `computed_weights` says
    whether it must be synced before every call: see `GraphBackend.has_computed_weights`.
    `broken` is why its kernels do not compile, if they do not: it is tried once. `graph_calls` is the number of calls
    that used it.
    `chains` is why trees cannot run, if that is known, and `chain_forms` are the forms of calls in which they cannot;
    `joins` is `ChainBackend.joins`.
    `logged` are the lines that its calls have logged, each once.
    """

    state: tuple[Any, ...]
    code: Sequence[Callable[[], Any]] = ()
    patch: str | None = None
    probed: dict[tuple[Any, ...], set[int]] = field(default_factory=dict)
    memory: SharedMemory = field(default_factory=SharedMemory)
    default: LookaheadConfig | None = None
    budget: DraftBudget = field(default_factory=DraftBudget)
    graph: GraphBackend | None = None
    addresses: Sequence[int] = ()
    computed_weights: bool = False
    broken: str | None = None
    graph_calls: int = 0
    turn: RLock = field(default_factory=RLock)
    chains: str = ""
    chain_forms: set[tuple[Any, ...]] = field(default_factory=set)
    joins: bool = False
    logged: set[str] = field(default_factory=set)

    def runs_trees(self, model: Any) -> bool:
        """Whether trees can run, by what is known until now."""
        self.chains = self.chains or why_no_trees(model)
        return not self.chains

    def log_once(self, line: str) -> None:
        """Log a line, once per model."""
        if line not in self.logged:
            self.logged.add(line)
            logger.warning(line)


known: WeakKeyDictionary[Any, ModelFacts] = WeakKeyDictionary()
"""Stored per model: `decoding()` is often created for every call, and probing a model takes a few passes."""
probing = RLock()
"""Held while a model is probed: other threads wait, and share the result."""


def of(model: Any, modules: Sequence[torch.nn.Module]) -> ModelFacts:
    """The model's facts; new ones if its state has changed."""
    with probing:  # while another thread probes, modules have an extra hook
        code, named = code_of(modules)
        state = (*state_of(model, modules), *named)
        facts = known.get(model)
        # Ids are reused after an object is freed.
        if facts is None or facts.state != state or any(reference() is None for reference in facts.code):
            facts = known[model] = ModelFacts(state, list(map(_weak, code)), patch_of(modules))
    return facts


def _weak(function: Any) -> Callable[[], Any]:
    """A weak reference, since a hook may hold the model. Returns None if unsupported, so that no facts are cached."""
    try:
        return ref(function)
    except TypeError:
        return lambda: None


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules, each once. `model.modules()` takes five times as long, and this runs in every call of `generate`."""
    found: dict[torch.nn.Module, None] = {model: None}
    waiting = [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                waiting.append(module)
    return list(found)


def state_of(model: Any, modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """Everything but code that affects a model's forward pass: if it changes, the model is probed again.

    Besides the weights' device and dtype these are its modules (an adapter replaces some), the active adapters, and
    autocast.
    """
    device, weight = input_device(model), model.get_input_embeddings().weight
    kinds = tuple(map(type, modules))
    # A PEFT layer has a property of this name, and a transformers model a method. Only classes are checked: there
    # are hundreds of modules, but about ten classes.
    adapted = {kind for kind in set(kinds) if isinstance(getattr(kind, "active_adapters", None), property)}
    adapters = tuple([adapters_of(module) for module in modules if type(module) in adapted]) if adapted else ()
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return (
        device, weight.dtype, weight.shape, model.config._attn_implementation, model.training, autocast, kinds,
        adapters,
    )  # fmt: skip


def code_of(modules: Sequence[torch.nn.Module]) -> tuple[list[Any], list[Any]]:
    """The replaceable code of a forward pass, and its locations and ids.

    These are the forward hooks, the `forward` of every class, and of every module on which one was set.
    """
    code = [*global_hooks(), *(getattr(kind, "forward", kind) for kind in set(map(type, modules)))]
    named: list[Any] = list(map(id, code))
    for index, module in enumerate(modules):
        after, before, own = module._forward_hooks, module._forward_pre_hooks, module.__dict__
        if after or before or "forward" in own:
            called = [*after.values(), *before.values(), *([own["forward"]] if "forward" in own else [])]
            code += called
            named.append((index, *after, None, *before, None, *map(id, called)))
    return code, named


def weight_addresses(modules: Iterable[torch.nn.Module]) -> list[int]:
    """The addresses of all parameters and buffers: Gemma 4 scales a layer's result by a buffer."""
    return [
        tensor.data_ptr()
        for module in modules
        for tensors in (module._parameters, module._buffers)
        for tensor in tensors.values()
        if tensor is not None
    ]


def adapters_of(module: Any) -> tuple[Any, ...]:
    """The adapters that a PEFT layer applies."""
    active: Any = module.active_adapters
    return (*active, module.disable_adapters) if isinstance(active, list) else ()


def adapter_hooks(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, int, dict[str, Any]]]:
    """The hooks that PEFT adds for one call with `adapter_names` or for an activated LoRA: module, id and arguments."""
    for module in modules:
        for id, hook in list(module._forward_pre_hooks.items()):
            given = getattr(hook, "keywords", {})
            if given.get("alora_offsets") is not None or given.get("adapter_names") is not None:
                yield module, id, given


def remove_adapter_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Remove the hooks of a call that fails. PEFT does so only after calls that go well, and the next call would run
    with this call's adapters."""
    for module, id, _ in adapter_hooks(modules):
        module._forward_pre_hooks.pop(id, None)
        module._forward_pre_hooks_with_kwargs.pop(id, None)


def check_adapters(modules: Iterable[torch.nn.Module], batch_size: int) -> None:
    """Refuse adapters that PEFT applies to certain rows or tokens of a pass: our passes have other rows."""
    for _, _, given in adapter_hooks(modules):
        if given.get("alora_offsets") is not None:
            raise ValueError(
                "an activated LoRA adapter counts the tokens of a pass to know where it begins, and a tree of "
                "tokens cannot be counted; merge the adapter, or leave out custom_generate"
            )
        if given.get("adapter_names") is not None and batch_size > 1:
            raise ValueError(
                f"adapter_names={list(given['adapter_names'])} gives every row an adapter, and rows leave the "
                "batch as they end; call generate once per adapter"
            )
