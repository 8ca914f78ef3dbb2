"""Matrices of a GGUF file as they are in its blocks, for models that transformers has loaded from it.

transformers expands all blocks. For some architectures it also puts the rows of q and k in another order, so a matrix
is replaced only if its expansion is the loaded one, in the file's order of rows or in that of rotary halves. Experts
are if all of a layer are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lookahead.loading.quantised.weights import Weights
from lookahead.models.number_formats import Codes, Format
from lookahead.models.packing import packed
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import QuantisedExperts, is_experts, stacked

SAME = 0.999
"""The share of weights that must be equal in the model's dtype. Expansions may differ in the last bit of fp32."""


@torch.no_grad()
def keep_packed(model: Any, path: Path) -> int:
    """Replace linear layers and experts whose matrices are quantised in the file. Returns the number of matrices.

    Others stay as transformers loaded them: of other types of blocks, tied to the embedding, or with rows in an order
    that is not known; and experts whose gates and ups are of different types.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    tied = model.get_input_embeddings().weight.data_ptr()
    kept = 0
    for name, file_name in names_in(model, str(reader.fields["general.architecture"].contents())):
        module, tensor = model.get_submodule(name), stored.get(f"{file_name}.weight")
        if type(module) is not torch.nn.Linear or tensor is None or module.weight.data_ptr() == tied:
            continue
        unpack = BLOCKS.get(tensor.tensor_type.name)
        if unpack is None or len(tensor.data) != module.out_features:
            continue
        weights = unpack(torch.from_numpy(tensor.data.copy()))
        linear = in_order(weights, module, model.config)
        if linear is not None:
            model.set_submodule(name, linear)
            kept += 1
    for name, module in list(model.named_modules()):
        if is_experts(module) and (experts := packed_experts(name, module, stored)) is not None:
            model.set_submodule(name, experts)
            kept += len(EXPERTS) * experts.num_experts
    return kept


EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""A matrix of experts in the model -> its parts in a file, `blk.N.ffn_..._exps` [experts, out, in]."""


def packed_experts(name: str, module: Any, stored: dict[str, Any]) -> QuantisedExperts | None:
    """The experts of a layer from their blocks; None if these are of unknown types, or not what the module has."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None or not module.is_concatenated:
        return None
    made = []
    for own, parts in EXPERTS.items():
        tensors = [stored.get(f"blk.{layer[1]}.ffn_{part}_exps.weight") for part in parts]
        if any(tensor is None or tensor.tensor_type.name not in BLOCKS for tensor in tensors):
            return None
        linears = expert_parts(tensors, getattr(module, own).detach())
        try:
            made.append(stacked(linears, module.num_experts * len(parts)))
        except ValueError:  # of several types, or not the same
            return None
    return QuantisedExperts(module, made[0], made[1])


def expert_parts(tensors: list[Any], weights: torch.Tensor) -> Iterator[QuantisedLinear]:
    """The parts of each expert of W [experts, out, in]. Raises ValueError if they are not the same."""
    for expert, whole in enumerate(weights):
        for tensor, weight in zip(tensors, whole.chunk(len(tensors)), strict=True):
            data = torch.from_numpy(tensor.data[expert].copy())
            linear = BLOCKS[tensor.tensor_type.name](data).linear(None, weights.dtype)
            if not is_same(linear.weight.to(weight.device), weight):
                raise ValueError(f"{tensor.name} is not what was loaded")
            yield linear


def names_in(model: Any, architecture: str) -> Iterator[tuple[str, str]]:
    """(name in the model, name in a GGUF file without its last part) of the linear layers that the file may have."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        return
    table = get_tensor_name_map(arch, model.config.get_text_config(decoder=True).num_hidden_layers)
    for name, module in model.named_modules():
        found = table.get_name(name) if isinstance(module, torch.nn.Linear) else None
        if found is not None:
            yield name, found


def in_order(weights: Weights, module: torch.nn.Linear, config: Any) -> torch.nn.Module | None:
    """The layer with its rows in the order in which the module has them; None if that is not found."""
    text = config.get_text_config(decoder=True)
    linear, dtype = weights.linear(module.bias, module.weight.dtype), module.weight.dtype
    expanded = linear.dequantised(dtype).to(module.weight.device)
    if is_same(expanded, module.weight):
        return linear
    for heads in {text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads}:
        if len(expanded) % (2 * heads):
            continue
        rows = half_order(len(expanded), heads)
        if is_same(expanded[rows], module.weight):
            codes, scales = weights.codes[rows], weights.scales[rows]
            offsets = None if weights.offsets is None else weights.offsets[rows]
            return Weights(weights.format, codes, scales, offsets=offsets).linear(module.bias, dtype)
    return None


def is_same(expanded: torch.Tensor, weight: torch.Tensor) -> bool:
    return expanded.shape == weight.shape and bool((expanded == weight).float().mean() >= SAME)


def half_order(rows: int, heads: int) -> torch.Tensor:
    """Per row, its row in a file whose pairs of a head's rows lie beside each other: the halves of each head."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def numbers(blocks: torch.Tensor) -> torch.Tensor:
    """The fp16 number [..., 1] in the first two bytes of blocks [..., bytes]."""
    return blocks[..., :2].contiguous().view(torch.float16)


def blocks_of(data: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 [out, bytes] -> [out, blocks, size]."""
    return data.unflatten(1, (-1, size))


def halves(values: torch.Tensor) -> torch.Tensor:
    """Nibbles [..., 2 n] of bytes [..., n]: all low ones, then all high ones."""
    return torch.cat([values & 15, values >> 4], -1)


def q4_0(data: torch.Tensor) -> Weights:
    """32 weights (nibble - 8) d: d fp16, then 16 bytes."""
    blocks = blocks_of(data, 18)
    return Weights(Format(Codes.INT4, 32), packed(halves(blocks[..., 2:]).flatten(1)), numbers(blocks).flatten(1))


def q4_1(data: torch.Tensor) -> Weights:
    """32 weights nibble d + m: d and m fp16, then 16 bytes. Codes are nibbles less 8, so the offset is m + 8 d."""
    blocks = blocks_of(data, 20)
    scales = numbers(blocks).flatten(1)
    offsets = numbers(blocks[..., 2:]).flatten(1).float() + 8 * scales.float()
    return Weights(
        Format(Codes.INT4, 32, offsets=True), packed(halves(blocks[..., 4:]).flatten(1)), scales, offsets=offsets
    )


def q4_k(data: torch.Tensor) -> Weights:
    """256 weights, in 8 groups: nibble d s - e t, with d and e fp16, s and t of 6 bits in 12 bytes, then 128 bytes."""
    blocks = blocks_of(data, 144)
    low, middle, high = (part for part in blocks[..., 4:16].unflatten(2, (3, 4)).unbind(2))
    factor = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    least = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    scales = numbers(blocks).float() * factor.float()
    offsets = 8 * scales - numbers(blocks[..., 2:]).float() * least.float()
    nibbles = halves(blocks[..., 16:].unflatten(2, (4, 32))).flatten(1)
    return Weights(Format(Codes.INT4, 32, offsets=True), packed(nibbles), scales.flatten(1), offsets=offsets.flatten(1))


def q8_0(data: torch.Tensor) -> Weights:
    """32 weights q d: d fp16, then 32 signed bytes."""
    blocks = blocks_of(data, 34)
    return Weights(Format(Codes.INT8, 32), blocks[..., 2:].flatten(1), numbers(blocks).flatten(1))


def q6_k(data: torch.Tensor) -> Weights:
    """256 weights (q - 32) d s in 16 groups: 128 bytes of low nibbles, 64 of high bits, 16 signed s, and d fp16."""
    blocks = blocks_of(data, 210)
    low = halves(blocks[..., :128].unflatten(2, (2, 64)))  # [out, blocks, 2, 128]
    bits = blocks[..., 128:192].unflatten(2, (2, 32))
    high = torch.cat([bits >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (low | high << 4).flatten(1).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * numbers(blocks[..., 208:]).float()
    return Weights(Format(Codes.INT8, 16), codes.view(torch.uint8), scales.flatten(1))


BLOCKS: dict[str, Callable[[torch.Tensor], Weights]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q8_0": q8_0,
    "Q6_K": q6_k,
}
"""Type of blocks -> its reader, from uint8 [out, bytes]."""
