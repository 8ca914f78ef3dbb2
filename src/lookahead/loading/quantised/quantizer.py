"""Quantised checkpoints in transformers' loading: it reads the rest of the model, and leaves these layers to us.

`from_pretrained` knows names, shards, the hub, dtypes and tied weights. It asks a quantizer to prepare the model before
it loads weights, and to complete it afterwards. Ours puts an empty module where the files have a quantised layer, and
at the end reads these layers' tensors itself, as they are in the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lookahead.loading.quantised.methods import method_of, reader_of
from lookahead.loading.quantised.weights import UNUSED, Reader
from lookahead.models.quantised import QuantisedLinear

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


@dataclass
class StoredLayer:
    """A linear layer in the files: its name there, and the file of each of its tensors, by the tensor's last name."""

    name: str
    files: dict[str, str] = field(default_factory=dict)


@register_quantizer(METHOD)
class StoredQuantizer(HfQuantizer):
    """Makes the linear layers that are quantised in the files `QuantisedLinear`. Others stay as they are."""

    requires_calibration = True

    def __init__(self, quantization_config: StoredConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.given, self.device = quantization_config.given, quantization_config.device
        self.layers: dict[str, StoredLayer] = {}

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
        reader, modules = self.reader, dict(model.named_modules())
        for name, layer in model_names(model, stored_layers(list(checkpoint_files or []), reader)):
            module = modules.get(name)
            if module is None:
                continue  # as transformers does with tensors that the model has no use for
            if type(module) is not torch.nn.Linear and type(module).__name__ != "FalconLinear":
                raise ValueError(f"{layer.name} is quantised, and no linear layer but a {type(module).__name__}")
            self.layers[name] = layer
            model.set_submodule(name, Awaited(module))
            if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
                model.config.tie_word_embeddings = False  # the files have a head of its own
        if not self.layers:
            raise ValueError(f"its config says that it is quantised ({method_of(self.given)}), but its files are not")
        pattern = "|".join(re.escape(name) for name in self.layers)
        ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(ignored or ()), rf"^(?:{pattern})\."}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        dtype: torch.dtype = model.config.dtype
        reader = self.reader
        with ExitStack() as stack:
            names = {file for layer in self.layers.values() for file in layer.files.values()}
            files = {file: stack.enter_context(safe_open(file, framework="pt")) for file in names}
            for name, layer in self.layers.items():
                tensors = {one: files[file].get_tensor(f"{layer.name}.{one}") for one, file in layer.files.items()}
                try:
                    linear = self._read(reader, layer.name, tensors, model.get_submodule(name), dtype)
                except ValueError as error:
                    raise ValueError(f"{layer.name} cannot be read: {error}") from error
                model.set_submodule(name, linear)
        # transformers 5.17 keeps the files' dtype of tensors whose names it changes.
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype not in (dtype, torch.float32):
                parameter.data = parameter.data.to(dtype)
        model.config.quantization_config = self.given
        return model

    def _read(
        self, reader: Reader, name: str, tensors: dict[str, torch.Tensor], awaited: Any, dtype: torch.dtype
    ) -> QuantisedLinear:
        """The layer of these tensors, which are mapped, not read. Its bias stays where the other parameters are."""
        bias = tensors.pop("bias", None)
        strange = sorted(tensors.keys() - reader.known - UNUSED)
        if strange:
            raise ValueError(f"it has a {strange[0]}, whose meaning is not known")
        if bias is None and awaited.bias is not None:
            raise ValueError("it has no bias")
        if bias is not None and awaited.bias is None and not bias.any():
            bias = None  # GPTQ's files have a bias for every layer
        own = {local: tensor.to(self.device) for local, tensor in tensors.items()}
        linear = reader.read(name, own, awaited.shape).linear(bias, dtype)
        if (linear.out_features, linear.in_features) != awaited.shape:
            raise ValueError(f"it is {linear.out_features} x {linear.in_features}, and the model's {awaited.shape}")
        return linear


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


def stored_layers(files: list[str], reader: Reader) -> list[StoredLayer]:
    """The layers in these files that are quantised, by the names of their tensors."""
    found: dict[str, StoredLayer] = {}
    narrow = set()
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"its weights are in {Path(file).name}; quantised ones are read from safetensors only")
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (it is no dict)
                name, _, local = key.rpartition(".")
                found.setdefault(name, StoredLayer(name)).files[local] = file
                if opened.get_slice(key).get_dtype().startswith("F8_E"):
                    narrow.add(name)
    layers = {name: layer for name, layer in found.items() if reader.marks & layer.files.keys()}
    if unscaled := sorted(narrow - layers.keys()):
        raise ValueError(f"{unscaled[0]} has weights in FP8 without scales")
    return list(layers.values())


def model_names(model: Any, layers: list[StoredLayer]) -> Iterator[tuple[str, StoredLayer]]:
    """Each layer with its name in the model, which for some classes is another one than in the files."""
    weights = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    for layer in layers:
        key, converted = rename_source_key(
            f"{layer.name}.weight", renamings, converters, model.base_model_prefix, weights
        )
        if converted is not None or "experts" in layer.name.split("."):
            raise ValueError(f"{layer.name} is quantised and part of a mixture of experts, which is not supported")
        yield key.removesuffix(".weight"), layer
