"""Finds user code in a model's forward pass: forward hooks and replaced `forward` methods.

Other backends would not call it. The eager backend does, in passes of other lengths than `generate`'s, so `probe` tests
such a model more thoroughly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

OWN = ("torch", "transformers")
"""Packages that may define or wrap the `forward` of another package's class."""


def global_hooks() -> list[Callable[..., Any]]:
    """The forward hooks that torch calls around every module."""
    return [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]


def hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The forward hooks of this module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def patch_of(modules: Iterable[torch.nn.Module]) -> str | None:
    """The first hook or replaced `forward` of these modules, as messages name it; None if there is none.

    Hooks of transformers, a compiled `forward` and accelerate's weight offloading do not count.
    """
    if global_hooks():
        return "a forward hook on all modules"
    classes: dict[type, None] = {}
    for module in modules:
        classes[type(module)] = None
        if (found := _own_patch(module)) is not None:
            return found
    for kind in classes:
        if _is_foreign(kind):
            return f"the forward that was set on the class {kind.__name__}"
    return None


def patched(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, str]]:
    """All modules with such a hook or `forward`, and how messages name it."""
    everywhere = "a forward hook on all modules" if global_hooks() else None
    found = []
    for module in modules:
        patch = everywhere or _own_patch(module)
        if patch is None and _is_foreign(type(module)):
            patch = f"the forward that was set on the class {type(module).__name__}"
        if patch is not None:
            found.append((module, patch))
    return found


class Outputs:
    """Context manager that records the last output of modules: rows [n, width] of the first sequence."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.rows: dict[torch.nn.Module, torch.Tensor] = {}
        self._modules, self._handles = list(modules), list[Any]()

    def __enter__(self) -> Outputs:
        self._handles = [module.register_forward_hook(self._note) for module in self._modules]
        return self

    def __exit__(self, *reason: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        while isinstance(output, (tuple, list)) and output:
            output = output[0]
        output = getattr(output, "logits", getattr(output, "last_hidden_state", output))
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() > 2:
            self.rows[module] = output[0].flatten(1).float()


def _own_patch(module: torch.nn.Module) -> str | None:
    """The hook or `forward` that was set on this module itself."""
    name = type(module).__name__
    if not all(str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks_of(module)):
        return f"a forward hook on its {name}"
    return f"the forward that was set on its {name}" if _has_other_forward(module) else None


def _has_other_forward(module: torch.nn.Module) -> bool:
    """Whether `module.forward` differs from that of its class."""
    forward = module.__dict__.get("forward")
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hooks = [hook, *getattr(hook, "hooks", ())]
        if not all(type(hook).__module__.startswith("accelerate.") for hook in hooks):
            return True
        if getattr(getattr(forward, "func", None), "__module__", "") == "accelerate.hooks":
            forward = module.__dict__.get("_old_forward")
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    if forward is None:
        return False
    own = getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module
    return not own


def _is_foreign(kind: type) -> bool:
    """Whether a class has a `forward` that another package than the class's defines or wraps."""
    known = {*OWN, kind.__module__.partition(".")[0]}
    function = getattr(kind, "forward", None)
    while function is not None:
        package = str(getattr(function, "__globals__", {}).get("__name__", "torch")).partition(".")[0]
        if package not in known:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
