"""Quantise a model while it is loaded: `dtype='fp8'`, 'fp8_dynamic', 'int8', 'int4' or 'mxfp4'.

Weights are rounded to the nearest values of a format, without any calibration: those of the linear layers and the
experts of the decoder blocks; embeddings, norms, the LM head and routers of experts keep the dtype of 'auto'. Each
matrix goes to the device, is quantised there and replaces its module, one after the other, so that the device never
holds the whole model as it was. 'fp8_dynamic' also rounds what the linear layers read, each row with its own scale, but
not what the experts do. On a CPU int8 rounds all activations and quantises the head: then the CPU backend multiplies
integers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from lookahead.backends.support import input_device
from lookahead.models.facts import UnsupportedModelError, kind_of, tensor_parallel_ranks
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import MXFP4, Codes, Format
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import NAMES, QuantisedExperts, is_experts, quantised_experts
from lookahead.models.rounding import quantise

FORMATS = {
    "fp8": Format(Codes.E4M3, 0),
    "fp8_dynamic": Format(Codes.E4M3, 0, activations=Codes.E4M3),
    "int8": Format(Codes.INT8, 0),
    "int4": Format(Codes.INT4, 128, zeros=True),
    "mxfp4": MXFP4,
}
"""A `dtype` that quantises -> its format: a scale per row, or with four bits per 128 or 32 columns of a row. int4 has
zero points, too: without them the perplexity of the embedded model grows by 78% instead of 33%."""
CPU_INT8 = Format(Codes.INT8, 0, activations=Codes.INT8)
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""What modules that choose experts are called. They are small, and their rounding would change which experts run."""

Log = Callable[[str], None]


def quantised_copy(model: Any, dtype: str, log: Log | None = None) -> Any:
    """A quantised model beside one that is already loaded, which is unchanged. They share what is not quantised."""
    tensors = [*model.parameters(), *model.buffers()]
    made = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    quantise_model(made, dtype, input_device(model), log)
    return made


@torch.no_grad()
def quantise_model(model: Any, dtype: str, device: torch.device, log: Log | None = None) -> None:
    """Replace the linear layers that this `dtype` quantises. Their codes are on `device`, the rest stays where it is.

    Raises ValueError for a model that cannot be quantised.
    """
    format = CPU_INT8 if dtype == "int8" and device.type == "cpu" else FORMATS[dtype]
    check_unquantised(model.config, dtype)
    _check_whole(model, dtype)
    made: dict[torch.nn.Module, QuantisedLinear] = {}
    for parent, name, layer in linear_layers(model, head=format == CPU_INT8):
        if layer not in made:
            matrix = Matrix((layer,), transposed=type(layer).__name__ == "Conv1D")
            if format.codes.bits == 4 and matrix.shape[1] % 2:  # two codes are one byte
                continue
            made[layer] = quantise(matrix.weight().to(device), format, matrix.bias())
            layer.register_parameter("weight", None)  # what it took makes room for the next one
        setattr(parent, name, made[layer].train(layer.training))
    matrices = len(made) + _quantise_experts(model, format_of_experts(format), device)
    if not matrices:
        raise ValueError(
            f"dtype={dtype!r}: {kind_of(model)} has no linear layers that can be quantised; leave dtype out"
        )
    if log is not None:
        own = str(model.dtype).removeprefix("torch.")
        log(f"note: dtype={dtype!r} rounds the weights of {matrices} matrices: texts differ from those in {own}")


def format_of_experts(format: Format) -> Format:
    """What a model's experts are rounded to if its linear layers are to `format`: no kernel rounds rows of experts to
    FP8."""
    return replace(format, activations=None) if format.codes is Codes.E4M3 else format


def _quantise_experts(model: Any, format: Format, device: torch.device) -> int:
    """Replace the experts of the decoder's layers that can be quantised. Returns how many matrices they had."""
    made: dict[torch.nn.Module, QuantisedExperts | None] = {}
    for parent in list(decoder_layers(model).modules()):
        for name, module in list(parent.named_children()):
            if module not in made and is_experts(module):
                made[module] = quantised_experts(module, format, device)
            if (replacing := made.get(module)) is not None:
                setattr(parent, name, replacing)
    return sum(len(NAMES) * experts.num_experts for experts in made.values() if experts is not None)


def linear_layers(model: Any, *, head: bool) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """The linear modules of the decoder's layers, and with `head` the LM head: parent, name in it, and module.

    Those of routers and in routers are left out.
    """
    layers = decoder_layers(model).named_modules()
    inside = [parent for path, parent in layers if ROUTERS.isdisjoint(path.split("."))]
    found = [(parent, *child) for parent in inside for child in parent.named_children()]
    if head:
        last = model.get_output_embeddings()
        found += [
            (parent, *child) for parent in model.modules() for child in parent.named_children() if child[1] is last
        ]
    for parent, name, module in found:
        linear = type(module) is torch.nn.Linear or type(module).__name__ in ("Conv1D", "FalconLinear")
        if linear and name not in ROUTERS:
            yield parent, name, module


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The decoder's layers: the list of modules beside its input embedding. It is empty if there is none."""
    embedding = model.get_input_embeddings()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for parent in model.modules():
        if any(child is embedding for child in parent.children()):
            lists = [child for child in parent.children() if isinstance(child, torch.nn.ModuleList)]
            return next((layers for layers in lists if len(layers) == count), torch.nn.ModuleList())
    return torch.nn.ModuleList()


def check_unquantised(config: Any, dtype: str) -> None:
    """Raise ValueError for the config of a checkpoint that is quantised already."""
    given = getattr(config, "quantization_config", None)
    if given is not None:
        method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
        name = getattr(method, "value", method)
        raise ValueError(f"dtype={dtype!r}: the model is quantised already ({name}); leave dtype out")


def _check_whole(model: Any, dtype: str) -> None:
    """Raise ValueError for a model whose matrices are not all there, as plain tensors of its own modules."""
    reason = None
    if any(isinstance(module, QuantisedLinear) for module in model.modules()):
        reason = "the model is quantised already"
    elif any(type(module).__module__.startswith("peft.") for module in model.modules()):
        reason = "adapters are not quantised; merge them into the model first"
    elif tensor_parallel_ranks(model) > 1:
        reason = "its weights are split between processes"
    elif any(getattr(module, "_hf_hook", None) is not None for module in model.modules()):
        reason = "the model is spread over devices"
    elif not all(type(parameter.data) is torch.Tensor for parameter in model.parameters()):
        reason = "the model is quantised already"
    if reason is not None:
        raise UnsupportedModelError(f"dtype={dtype!r}: {reason}; leave dtype out")
