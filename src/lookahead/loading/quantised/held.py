"""Layers that a model of transformers holds in codes of compressed-tensors, read from its modules.

compressed-tensors keeps a layer's tensors as its checkpoint has them until the model's first forward pass, which
expands all layers for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from lookahead.loading.quantised.compressed_tensors import KNOWN, MARKS, scheme_of, weights_of
from lookahead.loading.quantised.weights import Reader, Tensors, Weights, naming, read_layer
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.quantised import QuantisedLinear

EXPANDING_HOOK = "ct_decompress_hook"
"""The attribute under which a model has the handle of the hook that expands its layers."""


def packed_view(model: Any) -> Any:
    """The model with a `QuantisedLinear` in place of each layer that it holds in codes, or itself if it has none.

    Nothing in the model changes: modules are copied, but for these layers, and the copies share all other tensors
    with it. Raises UnsupportedModelError for a layer that rounds activations, or has a format that is not read.
    """
    layers = {name: module for name, module in model.named_modules() if _is_packed(module)}
    if not layers:
        return model
    dtype = model.get_input_embeddings().weight.dtype
    try:
        read = {module: _read(name, module, dtype) for name, module in layers.items()}
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    view = _copied(model, dict(read))
    handle = vars(view).pop(EXPANDING_HOOK, None)
    if handle is not None:
        view._forward_pre_hooks.pop(handle.id, None)
    return view


def _is_packed(module: torch.nn.Module) -> bool:
    status = getattr(module, "quantization_status", None)
    return type(module) is torch.nn.Linear and getattr(status, "value", None) == "compressed"


@torch.no_grad()
def _read(name: str, module: Any, dtype: torch.dtype) -> QuantisedLinear:
    group = module.quantization_scheme.model_dump(mode="json")
    if group.get("input_activations") or group.get("output_activations"):
        raise UnsupportedModelError(f"its {name} rounds activations")
    scheme = scheme_of(group, str(group.get("format")))
    own = {key: tensor.detach() for key, tensor in _tensors(module).items() if tensor is not None}
    device = str(next(iter(own.values())).device)

    def read(name: str, tensors: Tensors, shape: tuple[int, int]) -> Weights:
        return weights_of(scheme, tensors, shape)

    with naming(name):
        shape, biased = (module.out_features, module.in_features), own.get("bias") is not None
        weights, bias = read_layer(Reader(MARKS, KNOWN, read), name, own, shape, biased=biased, device=device)
        return weights.linear(bias, dtype)


def _tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


def _copied(module: torch.nn.Module, made: dict[torch.nn.Module, torch.nn.Module]) -> Any:
    """A copy of a module and those in it, which shares their tensors; `made` has what is copied already."""
    if module in made:
        return made[module]
    copy = made[module] = type(module).__new__(type(module))
    vars(copy).update(vars(module))
    copy._modules = {name: None if child is None else _copied(child, made) for name, child in module._modules.items()}
    copy._forward_pre_hooks = OrderedDict(module._forward_pre_hooks)
    return copy
