"""Quantised checkpoints in transformers' loading: it reads the rest of the model, and leaves these layers to us.

`from_pretrained` knows names, shards, the hub, dtypes and tied weights. It asks a quantizer to prepare the model before
it loads weights, and to complete it afterwards. Ours puts an empty module where the files have a quantised layer, and
at the end reads these layers' tensors itself, as they are in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lookahead.loading.quantised.experts import AwaitedExperts, ExpertsReader, StoredExperts, grouped_experts
from lookahead.loading.quantised.methods import method_of, reader_of
from lookahead.loading.quantised.stored import StoredLayer, stored_layers
from lookahead.loading.quantised.weights import Reader, Tensors, naming, read_layer
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import is_experts

METHOD = "lookahead"
"""The name of our quantizer in transformers."""


def quantised_config(source: str, device: torch.device) -> Any:
    """The config for `from_pretrained` of a quantised checkpoint, which has it loaded by our quantizer; else None.

    The quantised layers will be on `device`, where their codes are put in order. Raises ValueError for a format that
    is not read.
    """
    config = AutoConfig.from_pretrained(source)
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        return None
    given = dict(found if isinstance(found, dict) else found.to_dict())
    reader_of(given)
    config.quantization_config = {"quant_method": METHOD, "given": given, "device": str(device)}
    return config


@register_quantization_config(METHOD)
class StoredConfig(QuantizationConfigMixin):
    """The checkpoint's own `quantization_config`, and the device of its quantised layers."""

    def __init__(self, quant_method: Any, given: dict[str, Any], device: str) -> None:
        self.quant_method, self.given, self.device = quant_method, given, device


@register_quantizer(METHOD)
class StoredQuantizer(HfQuantizer):
    """Makes what is quantised in the files `QuantisedLinear` and `QuantisedExperts`. Other modules stay as they are."""

    requires_calibration = True

    def __init__(self, quantization_config: StoredConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.given, self.device = quantization_config.given, quantization_config.device
        self.layers: dict[str, StoredLayer] = {}
        self.experts: dict[str, StoredExperts] = {}

    @property
    def reader(self) -> Reader:
        return reader_of(self.given)

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """A config without a dtype gets that of the files' first tensor, which may be FP8."""
        return dtype if dtype is None or dtype.itemsize > 1 else torch.bfloat16

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        stored, name_of = stored_layers(list(checkpoint_files or []), self.reader), model_names(model)
        experts = self._await_experts(model, grouped_experts(stored), name_of)
        self._await_layers(model, [layer for layer in stored if layer.name not in experts], name_of)
        if not self.layers and not self.experts:
            raise ValueError(f"its config says that it is quantised ({method_of(self.given)}), but its files are not")
        pattern = "|".join(re.escape(name) for name in (*self.layers, *self.experts))
        ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(ignored or ()), rf"^(?:{pattern})\."}
        return model

    def _await_experts(self, model: Any, found: dict[str, StoredExperts], name_of: Callable[[str], str]) -> set[str]:
        """Replace the modules of these experts. Returns the names of all layers that are theirs."""
        modules, theirs = dict(model.named_modules()), set()
        for stored in found.values():
            name = name_of(f"{stored.name}.down_proj").removesuffix(".down_proj")
            module = modules.get(name)
            if module is None or isinstance(module, torch.nn.ModuleList):
                continue
            if not is_experts(module):
                raise ValueError(f"{stored.name} is quantised, and a {type(module).__name__} is not supported")
            self.experts[name] = stored
            model.set_submodule(name, AwaitedExperts(module))
            theirs |= {layer.name for layer in stored.layers.values()}
        return theirs

    def _await_layers(self, model: Any, stored: list[StoredLayer], name_of: Callable[[str], str]) -> None:
        """Replace the modules of these linear layers."""
        modules, weights = dict(model.named_modules()), model.state_dict()
        for layer in stored:
            key = name_of(f"{layer.name}.weight")
            name = key.removesuffix(".weight")
            module = modules.get(name)
            if module is None and key not in weights:
                continue  # as transformers does with tensors that the model has no use for
            if module is None or (type(module) is not torch.nn.Linear and type(module).__name__ != "FalconLinear"):
                kind = "one of several in a tensor" if module is None else f"a {type(module).__name__}"
                raise ValueError(f"{layer.name} is quantised, and no linear layer but {kind}")
            self.layers[name] = layer
            model.set_submodule(name, Awaited(module))
            if model.all_tied_weights_keys.pop(key, None) is not None:
                model.config.tie_word_embeddings = False  # the files have a head of its own

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        dtype: torch.dtype = model.config.dtype
        with ExitStack() as stack:
            opened: dict[str, Any] = {}

            def tensors_of(layer: StoredLayer) -> dict[str, torch.Tensor]:
                for file in {file for file, _ in layer.tensors.values()} - opened.keys():
                    opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                return {local: opened[file].get_tensor(key) for local, (file, key) in layer.tensors.items()}

            for name, layer in self.layers.items():
                linear = self._read(layer.name, tensors_of(layer), model.get_submodule(name), dtype)
                model.set_submodule(name, linear)
            reader = ExpertsReader(self.reader, tensors_of, self.device, dtype)
            for name, stored in self.experts.items():
                model.set_submodule(name, reader.read(stored, model.get_submodule(name).awaited[0]))
        # transformers 5.17 keeps the files' dtype of tensors whose names it changes.
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype not in (dtype, torch.float32):
                parameter.data = parameter.data.to(dtype)
        model.config.quantization_config = self.given
        return model

    def _read(self, name: str, tensors: Tensors, awaited: Any, dtype: torch.dtype) -> QuantisedLinear:
        """The layer of these tensors, which are mapped, not read. Its bias stays where the other parameters are."""
        biased = awaited.bias is not None
        with naming(name):
            weights, bias = read_layer(self.reader, name, tensors, awaited.shape, biased=biased, device=self.device)
            return weights.linear(bias, dtype)


class Awaited(torch.nn.Module):
    """A linear layer whose tensors will be read last.

    Its weight and bias have no numbers, and are no parameters: some classes initialise those of their layers by name.
    """

    def __init__(self, module: torch.nn.Linear) -> None:
        super().__init__()
        self.shape = module.out_features, module.in_features
        self.weight = initialised(torch.empty(self.shape, device="meta"))
        has_bias = module.bias is not None
        self.bias = initialised(torch.empty(module.out_features, device="meta")) if has_bias else None


def initialised(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that transformers does not initialise."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def model_names(model: Any) -> Callable[[str], str]:
    """Gives the name in the model of a tensor in the files, which for some classes is another one."""
    weights = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]

    def name_of(key: str) -> str:
        return str(rename_source_key(key, renamings, converters, model.base_model_prefix, weights)[0])

    return name_of
