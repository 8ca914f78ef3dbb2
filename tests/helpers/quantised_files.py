"""Quantised checkpoints, packed number by number from the formats' descriptions, and the weights that they stand for.

A packer takes a random generator and a shape (out, in), and returns the tensors of a layer by their last names, and W
[out, in] in fp32.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from lookahead.models.quantised_experts import NAMES, expert_matrices, is_experts

Layer = tuple[dict[str, torch.Tensor], torch.Tensor]
Packer = Callable[[np.random.Generator, tuple[int, int]], Layer]
ExpertsPacker = Callable[[np.random.Generator, str, int, tuple[int, int]], Layer]
"""(generator, name of a matrix in the model, experts, (out, in)) -> the tensors by their names after the module's, and
W [experts, out, in]."""


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Rows of codes in int32 words, the first code lowest; the last word is filled up with zeros."""
    per = 32 // bits
    packed = np.zeros((len(codes), -(-codes.shape[1] // per)), np.uint32)
    for row, column in np.ndindex(*codes.shape):
        packed[row, column // per] |= np.uint32(int(codes[row, column]) << bits * (column % per))
    return torch.from_numpy(packed.view(np.int32))


def expanded(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | float, index: np.ndarray, rows: int = 1
) -> torch.Tensor:
    """(code - zero) * scale for codes [out, in], scales [out / rows, groups] and the group of each column."""
    row = np.arange(len(codes)) // rows
    scale = scales.astype(np.float32)[row][:, index]
    zero = zeros[row][:, index] if isinstance(zeros, np.ndarray) else zeros
    return torch.from_numpy((codes.astype(np.float32) - zero).astype(np.float32) * scale)


def scales_of(draw: np.random.Generator, *shape: int, least: float = 0.01) -> np.ndarray:
    return draw.uniform(least, 2 * least, shape).astype(np.float16)


def groups(width: int, group: int) -> np.ndarray:
    return np.arange(width) // (group or width)


def fp8(block: tuple[int, int] | None = None, group: int = 0, per: str = "row", name: str = "weight_scale") -> Packer:
    """Scales by `block`, else by `group`, else `per` 'row', 'column' (as [out, 1]) or 'tensor'."""

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        out, width = shape
        weight = torch.from_numpy(draw.normal(0, 30, shape).astype(np.float32)).to(torch.float8_e4m3fn)
        rows, columns = block or (out if per == "tensor" else 1, group or width)
        scales = draw.uniform(0.005, 0.01, (-(-out // rows), -(-width // columns))).astype(np.float32)
        dense = expanded(weight.float().numpy(), scales, 0.0, groups(width, columns), rows)
        given = torch.from_numpy(scales)
        given = given.reshape(()) if per == "tensor" and not block else given
        given = given[:, 0].clone() if per == "row" and not block and not group else given
        return {"weight": weight, name: given, "input_scale": torch.tensor(0.5)}, dense

    return pack


def awq(group: int) -> Packer:
    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        out, width = shape
        index = groups(width, group)
        codes, zeros = draw.integers(0, 16, shape), draw.integers(0, 16, (out, index[-1] + 1))
        scales = scales_of(draw, out, index[-1] + 1)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def interleaved(values: np.ndarray) -> torch.Tensor:
            return words(values.reshape(len(values), -1, 8)[:, :, order].reshape(len(values), -1), 4)

        tensors = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T)}
        tensors["scales"] = torch.from_numpy(scales.T.copy())
        return tensors, expanded(codes, scales, zeros, index)

    return pack


def gptq(group: int, *, bits: int = 4, version: int = 1, symmetric: bool = True, shuffled: bool = False) -> Packer:
    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        out, width = shape
        index = groups(width, group)
        if shuffled:
            index = draw.permutation(index)
        count, most = int(index.max()) + 1, 2**bits
        codes, scales = draw.integers(0, most, shape), scales_of(draw, out, count, least=0.01 if bits == 4 else 0.001)
        middle = np.full((out, count), most // 2)
        zeros = middle if symmetric else draw.integers(0, most, (out, count))
        stored = (zeros - 1) % most if version == 1 else zeros
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
            "bias": torch.zeros(out, dtype=torch.float16),  # as AutoGPTQ writes it
        }
        return tensors, expanded(codes, scales, zeros, index)

    return pack


def packed(group: int, *, bits: int = 4, symmetric: bool = True, shuffled: bool = False) -> Packer:
    """compressed-tensors' pack-quantized."""

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        out, width = shape
        index = groups(width, group)
        if shuffled:
            index = draw.permutation(index)
        count, most = int(index.max()) + 1, 2**bits
        codes, scales = draw.integers(0, most, shape), scales_of(draw, out, count, least=0.01 if bits == 4 else 0.001)
        zeros = np.full((out, count), most // 2) if symmetric else draw.integers(0, most, (out, count))
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        if shuffled:
            tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, expanded(codes, scales, zeros, index)

    return pack


def int8(group: int = 0, *, bits: int = 8, symmetric: bool = True) -> Packer:
    """compressed-tensors' int-quantized and naive-quantized."""

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        out, width = shape
        index, most = groups(width, group), 2 ** (bits - 1)
        codes = draw.integers(-most, most, shape).astype(np.int8)
        scales = scales_of(draw, out, index[-1] + 1, least=0.1 / most)
        zeros = np.zeros(scales.shape) if symmetric else draw.integers(-most, most, scales.shape)
        tensors = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        return tensors, expanded(codes, scales, zeros, index)

    return pack


def mxfp4() -> Packer:
    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        out, width = shape
        nibbles, powers = draw.integers(0, 16, shape), draw.integers(118, 124, (out, width // 32)).astype(np.uint8)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        tensors = {
            "weight_packed": torch.from_numpy((nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8)),
            "weight_scale": torch.from_numpy(powers),
        }
        return tensors, expanded(table[nibbles], 2.0 ** (powers.astype(np.float32) - 127), 0.0, groups(width, 32))

    return pack


@dataclass(frozen=True)
class Case:
    """A format: its config and its packer. `plain`: layers that are not quantised, by the ends of their names."""

    config: Mapping[str, Any]
    pack: Packer
    plain: tuple[str, ...] = ("lm_head",)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' config with one group for all linear layers."""
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, **weights}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}
ROWS = {"strategy": "channel", "group_size": None}
CASES = {
    "fp8-block": Case({**FP8, "weight_block_size": [24, 24]}, fp8((24, 24), name="weight_scale_inv")),
    "fp8-tensor": Case({**FP8, "activation_scheme": "static"}, fp8(per="tensor")),
    "fbgemm": Case({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8(per="column")),
    "modelopt": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8(per="tensor")),
    "ct-fp8": Case(compressed("float-quantized", num_bits=8, type="float", **ROWS), fp8(per="column")),
    "ct-fp8-group": Case(compressed("float-quantized", num_bits=8, type="float"), fp8(group=16)),
    "ct-fp8-block": Case(
        compressed("naive-quantized", num_bits=8, type="float", strategy="block", block_structure=[24, 24]),
        fp8((24, 24)),
    ),
    "awq": Case(AWQ, awq(16)),
    "gptq": Case(GPTQ, gptq(16)),
    "gptq-asymmetric": Case({**GPTQ, "sym": False}, gptq(16, symmetric=False)),
    "gptq-v2": Case({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(16, version=2, symmetric=False)),
    "gptq-order": Case({**GPTQ, "desc_act": True}, gptq(16, shuffled=True)),
    "gptq-rows": Case({**GPTQ, "group_size": -1}, gptq(0)),
    "gptq-8": Case({**GPTQ, "bits": 8, "desc_act": True}, gptq(16, bits=8, shuffled=True)),
    "ct-4": Case(compressed("pack-quantized"), packed(16)),
    "ct-4-asymmetric": Case(compressed("pack-quantized", symmetric=False), packed(16, symmetric=False)),
    "ct-4-order": Case(compressed("pack-quantized", actorder="group"), packed(16, shuffled=True)),
    "ct-4-rows": Case(compressed("pack-quantized", **ROWS), packed(0)),
    "ct-8": Case(compressed("pack-quantized", num_bits=8), packed(16, bits=8)),
    "ct-int8": Case(compressed("int-quantized", num_bits=8, **ROWS), int8()),
    "ct-naive-4": Case(compressed("naive-quantized", symmetric=False), int8(16, bits=4, symmetric=False)),
    "ct-mxfp4": Case(compressed("mxfp4-pack-quantized", type="float", group_size=32), mxfp4()),
}


def write(
    folder: Path,
    model: Any,
    tokenizer: Any,
    case: Case,
    *,
    experts: ExpertsPacker | None = None,
    rename: Callable[[str], str] = str,
    files: int = 1,
    dtype: str = "bfloat16",
) -> Any:
    """Save `model` with random weights of this format. Returns a plain model in fp32 with the same weights.

    `experts` packs its experts, which are left out otherwise; `rename` gives tensors their names in the files.
    """
    draw, dense = np.random.default_rng(0), copy.deepcopy(model)
    tensors = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, module in list(dense.named_modules()):
        tied = model.config.tie_word_embeddings and name == "lm_head"
        if isinstance(module, torch.nn.Linear) and not tied:
            if name.endswith(case.plain):
                continue
            own, weight = case.pack(draw, (module.out_features, module.in_features))
            if module.bias is not None:
                own["bias"] = module.bias.detach().half()
                module.bias.data = own["bias"].float()
            tensors.pop(f"{name}.weight")
            tensors |= {f"{name}.{local}": tensor for local, tensor in own.items()}
            module.weight.data = weight
        elif experts is not None and is_experts(module):
            for own, weights in zip(NAMES, experts_weights(draw, experts, name, module, tensors), strict=True):
                getattr(module, own).data = weights.mT.contiguous() if module.is_transposed else weights
    state = dense.state_dict()
    for name, tensor in tensors.items():
        if name in state and name.rpartition(".")[0] + ".input_scale" not in tensors and tensor.dtype.itemsize == 2:
            state[name].copy_(tensor)
    save(folder, {rename(name): tensor for name, tensor in tensors.items()}, files)
    tokenizer.save_pretrained(folder)
    config = {**model.config.to_dict(), "dtype": dtype, "quantization_config": dict(case.config)}
    (folder / "config.json").write_text(json.dumps(config))
    return dense.eval()


def experts_weights(
    draw: np.random.Generator, pack: ExpertsPacker, name: str, module: Any, tensors: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Put packed tensors in place of those of an experts module. Returns W [experts, out, in] of both matrices."""
    made = []
    for own, matrix in zip(NAMES, expert_matrices(module), strict=True):
        tensors.pop(f"{name}.{own}")
        packed_ones, weights = pack(draw, own, matrix.experts, matrix.shape)
        tensors |= {f"{name}.{local}": tensor for local, tensor in packed_ones.items()}
        made.append(weights)
    return made


def separately(pack: Packer, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> ExpertsPacker:
    """Each expert's matrices as linear layers of their own, gate and up apart."""

    def packed_experts(draw: np.random.Generator, name: str, experts: int, shape: tuple[int, int]) -> Layer:
        parts = names[:2] if name == "gate_up_proj" else names[2:]
        tensors, weights = dict[str, torch.Tensor](), []
        for expert in range(experts):
            for part in parts:
                own, weight = pack(draw, (shape[0] // len(parts), shape[1]))
                tensors |= {f"{expert}.{part}.{local}": tensor for local, tensor in own.items()}
                weights.append(weight)
        return tensors, torch.cat(weights).view(experts, *shape)

    return packed_experts


def together(pack: Packer, suffixes: Mapping[str, str], *, turned: bool = False) -> ExpertsPacker:
    """One tensor for all experts. `suffixes`: what is added to a matrix's name, by the last part of a layer's tensors.

    `turned`: the files have matrices [in, out].
    """

    def packed_experts(draw: np.random.Generator, name: str, experts: int, shape: tuple[int, int]) -> Layer:
        layers = [pack(draw, shape) for _ in range(experts)]
        weights = torch.stack([weight for _, weight in layers])
        tensors = {}
        for local, suffix in suffixes.items():
            whole = torch.stack([own[local] for own, _ in layers])
            if local == "weight_packed":
                whole = whole.unflatten(2, (-1, 16))
            tensors[name + suffix] = whole.mT.contiguous() if turned else whole
        return tensors, weights

    return packed_experts


GPT_OSS = Case({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4(), plain=("",))
"""Experts alone are quantised, by `GPT_OSS_EXPERTS`."""
GPT_OSS_EXPERTS = together(mxfp4(), {"weight_packed": "_blocks", "weight_scale": "_scales"})


def save(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    names = sorted(tensors)
    shards = [names[start::files] for start in range(files)]
    if files == 1:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    where = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in shard}, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
