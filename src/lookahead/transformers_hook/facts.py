"""What is known about a model between calls of `generate`, and how long it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.support import input_device
from lookahead.config import LookaheadConfig
from lookahead.engine.pace import Pace


@dataclass
class ModelFacts:
    """What was found out about a model. It holds as long as the model's `state` does.

    `probed` has the forms of calls whose probe went well (`prompt.Start.form`). `paces` are kept by batch size. `graph`
    is the model's graph backend, if a call could have one; its captured steps are kept for the next call. Only one call
    at a time may use it (`turn`). `places` are where the model's weights lay when it was last up to date with them.
    `logged` are the lines that its calls have logged, each once.
    """

    state: tuple[Any, ...]
    probed: set[tuple[Any, ...]] = field(default_factory=set)
    memory: SharedMemory = field(default_factory=SharedMemory)
    default: LookaheadConfig | None = None
    paces: dict[int, Pace] = field(default_factory=dict)
    graph: GraphBackend | None = None
    places: Sequence[int] = ()
    turn: RLock = field(default_factory=RLock)
    logged: set[str] = field(default_factory=set)


known: WeakKeyDictionary[Any, ModelFacts] = WeakKeyDictionary()
"""Kept beside the model: `decoding()` is often made anew for every call, and probing a model takes a few passes."""
finding_out = RLock()
"""Threads that use a model for the first time at once wait here, and share what one of them finds out."""


def of(model: Any, modules: Sequence[torch.nn.Module]) -> ModelFacts:
    """The model's facts; new ones where its state has changed."""
    state = state_of(model, modules)
    with finding_out:
        facts = known.get(model)
        if facts is None or facts.state != state:
            facts = known[model] = ModelFacts(state)
    return facts


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules, each once. `model.modules()` takes five times as long, and every call of `generate` asks."""
    found: dict[torch.nn.Module, None] = {model: None}
    waiting = [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                waiting.append(module)
    return list(found)


def state_of(model: Any, modules: Iterable[torch.nn.Module]) -> tuple[Any, ...]:
    """What decides how a model's forward pass computes: where one of these has changed, the model is probed again.

    Besides the weights' device and dtype these are its modules (an adapter replaces some), their hooks, the active
    adapters, and autocast.
    """
    device, weight = input_device(model), model.get_input_embeddings().weight
    kinds = tuple(
        [
            (type(module), *module._forward_hooks, None, *module._forward_pre_hooks, None, *adapters_of(module))
            for module in modules
        ]
    )
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return (
        device, weight.dtype, weight.shape, model.config._attn_implementation, model.training, autocast, hash(kinds),
    )  # fmt: skip


def places_of(modules: Iterable[torch.nn.Module]) -> list[int]:
    """The addresses of all weights."""
    return [weight.data_ptr() for module in modules for weight in module._parameters.values() if weight is not None]


def adapters_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """The adapters that a PEFT layer applies; nothing for any other module."""
    if not isinstance(getattr(type(module), "active_adapters", None), property):  # on a transformers model, a method
        return ()
    active: Any = module.active_adapters
    return (*active, module.disable_adapters) if isinstance(active, list) else ()


def check_adapters(modules: Iterable[torch.nn.Module], entries: int) -> None:
    """Refuse adapters that PEFT applies to some rows or tokens of a pass alone: our passes have other rows."""
    for hook in [hook for module in modules for hook in module._forward_pre_hooks.values()]:
        given = getattr(hook, "keywords", {})
        if given.get("alora_offsets") is not None:
            raise ValueError(
                "an activated LoRA adapter counts the tokens of a pass to know where it begins, and a tree of "
                "tokens cannot be counted; merge the adapter, or leave out custom_generate"
            )
        if given.get("adapter_names") is not None and entries > 1:
            raise ValueError(
                f"adapter_names={list(given['adapter_names'])} gives every row an adapter, and rows leave the "
                "batch as they end; call generate once per adapter"
            )
