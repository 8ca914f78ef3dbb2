"""Describe a Hugging Face model: find the reader of its class, and refuse a model that is not what its class says.

A reader takes a model and returns a `Decoder`: a function in a module of `models.families`, or a `CausalLM` around one
that takes the text model, the head and the config. The module names the classes that it reads in `READERS`. See
"Add a model family" in docs/development.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from lookahead.models import families
from lookahead.models.facts import UnsupportedModelError, tensor_parallel_ranks
from lookahead.models.patches import OWN, patch_of
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import QuantisedExperts
from lookahead.models.spec import Decoder, fp32_tensors_in

Reader = Callable[[Any], Decoder]


@cache
def readers() -> Mapping[str, Reader]:
    """Model class -> its reader."""
    modules = [import_module(f"{families.__name__}.{found.name}") for found in iter_modules(families.__path__)]
    return {name: reader for module in modules for name, reader in module.READERS.items()}


def read(model: Any, backend: str) -> Decoder:
    """The model's description. Raises UnsupportedModelError, in the name of this backend, for a model without a reader,
    and for one whose modules are not what its class says: then the description would not be the model's."""
    name = type(model).__name__
    try:
        if name not in readers():
            raise UnsupportedModelError(f"there is no reader for {name}{_why_unread(model)}")
        _check_own(model)
        _check_unmodified(model)
        description = readers()[name](model)
        _check_dtypes(model, description)
        for module in model.modules():  # after the reader, whose errors about matrices are more precise
            _check_own(module)
        return description
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"the {backend} backend does not run this model: {error}") from None


def _why_unread(model: Any) -> str:
    """Why a class has no reader, if its config shows a reason."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_mem_blocks", None):
        return ", whose attention reads the embedding again, between layers that share it"
    if getattr(config, "kv_lora_rank", None):
        return ", which compresses its K/V (MLA)"
    if any(getattr(config, name, None) for name in EXPERTS):
        return ", a mixture of experts"
    return ", which attends to an encoder" if getattr(config, "add_cross_attention", False) else ""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
"""Fields of the configs of mixtures of experts."""


def _check_own(module: torch.nn.Module) -> None:
    """Refuse a module of another package: an adapter around the embedding, or remote code with a known class's name."""
    kind = type(module)
    if kind not in (QuantisedLinear, QuantisedExperts) and kind.__module__.partition(".")[0] not in OWN:
        raise UnsupportedModelError(f"its {kind.__name__} is one of {kind.__module__}, not of transformers")


def _check_unmodified(model: Any) -> None:
    """Refuse a model that is spread over devices or processes, or has user code in its forward pass."""
    for module in model.modules():
        if getattr(module, "_hf_hook", None) is not None:
            raise UnsupportedModelError("it is spread over devices")
    patch = patch_of(model.modules())
    if patch is not None:
        raise UnsupportedModelError(f"{patch} would not be called")
    plain = all(type(parameter.data) is torch.Tensor for parameter in model.parameters())
    if not plain or tensor_parallel_ranks(model) > 1:
        raise UnsupportedModelError("its weights are quantised or split between processes")


def _check_dtypes(model: Any, description: Decoder) -> None:
    """Refuse a model whose weights have several dtypes or devices. Those that compute in fp32 may be in fp32 in any
    model: some classes keep them so."""
    wide = {tensor.untyped_storage().data_ptr() for tensor in fp32_tensors_in(description)}
    kinds = set()
    for parameter in model.parameters():
        free = parameter.dtype is torch.float32 and parameter.untyped_storage().data_ptr() in wide
        kinds.add((None if free else parameter.dtype, parameter.device))
    if len({dtype for dtype, _ in kinds} - {None}) > 1 or len({device for _, device in kinds}) > 1:
        raise UnsupportedModelError("its weights have several dtypes or devices")
