"""Blocks of GGUF files that stay packed: what they expand to, and which matrices of a loaded model are replaced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny import tiny
from tiny_gguf import write_gguf

import lookahead
from lookahead.loading.load import keeps_blocks, load_pretrained
from lookahead.loading.quantised.gguf import BLOCKS, half_order, keep_packed
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import QuantisedExperts, expert_matrices

SIZES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Type of blocks -> weights and bytes of one."""


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes with scales of the size that weights have: uint8 [rows, bytes]."""
    draw, size = np.random.default_rng(seed), SIZES[kind][1]
    data = draw.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for place in places:
        scales = draw.uniform(0.001, 0.01, (rows, blocks, 1)) * (1 if kind != "Q4_1" or place == 0 else -8)
        data[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", SIZES)
def test_blocks_expand_to_what_gguf_says(kind: str) -> None:
    assert SIZES.keys() == BLOCKS.keys()
    for rows, blocks in ((7, 3), (64, 1)):
        data = random_blocks(kind, rows, blocks, seed=rows)
        expected = torch.from_numpy(gguf.quants.dequantize(data, Type[kind]))
        linear = BLOCKS[kind](torch.from_numpy(data)).linear(None, torch.bfloat16)
        found = linear.dequantised()
        assert found.shape == (rows, blocks * SIZES[kind][0])
        most = expected.unflatten(1, (-1, 16)).abs().amax(2, keepdim=True)
        error = (found - expected).unflatten(1, (-1, 16)).abs()
        assert (error <= 1e-6 * most).all()
        equal = (linear.weight == expected.bfloat16()).float().mean()
        assert equal == 1 if kind in ("Q4_0", "Q8_0", "Q6_K") else equal > 0.999


def quantised_gguf(path: Path, tokenizer: Any, kinds: dict[str, str], **options: Any) -> Path:
    """A tiny model whose matrices with these names (or all others, '') are of these types of blocks."""
    original = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, tensor: np.ndarray, *args: Any, **kwargs: Any) -> None:
        kind = kinds.get(name.removesuffix(".weight"), kinds.get("", "F32"))
        if tensor.ndim == 1 or name.startswith(("token_embd", "blk.0.ffn_gate_inp")) or kind == "F32":
            return original(self, name, tensor, *args, **kwargs)
        if kind in ("Q4_K", "Q6_K"):  # gguf expands these but does not write them
            data = random_blocks(kind, len(tensor), tensor.shape[1] // 256)
        else:
            data = gguf.quants.quantize(tensor, Type[kind])
        return original(self, name, data, raw_dtype=Type[kind])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return write_gguf(path, tokenizer, **options)


def packed_layers(model: Any) -> dict[str, QuantisedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.thinned(1, most=1)
def test_a_loaded_models_matrices_are_packed_again(kind: str, dtype: str, tokenizer: Any, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, {"": kind})
    model, _, _ = load_pretrained(path, device="cpu", dtype=dtype)
    before = {name: module.weight.detach() for name, module in model.named_modules() if hasattr(module, "weight")}
    assert not packed_layers(model)
    assert keep_packed(model, path) == 7
    found = packed_layers(model)
    assert {name.rpartition(".")[2] for name in found} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name, layer in found.items():
        equal = layer.weight == before[name]
        assert equal.all() if kind != "Q4_1" else equal.float().mean() > 0.999, name
        assert layer.dtype is before[name].dtype
    assert type(model.lm_head) is torch.nn.Linear  # tied to the embedding


def test_k_blocks_of_a_loaded_model(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_gguf

    monkeypatch.setattr(tiny_gguf, "WIDTH", 256)
    monkeypatch.setattr(tiny_gguf, "INNER", 256)
    kinds = {"": "Q4_K", "blk.0.ffn_down": "Q6_K", "blk.0.attn_v": "F32"}
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, kinds)
    model, _, _ = load_pretrained(path, device="cpu", dtype="bfloat16")
    assert keep_packed(model, path) == 6
    assert type(model.get_submodule("model.layers.0.self_attn.v_proj")) is torch.nn.Linear
    assert packed_layers(model)["model.layers.0.mlp.down_proj"].format.group == 16


def test_a_matrix_that_is_not_the_files_stays_plain(tokenizer: Any, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, {"": "Q4_0"})
    model, _, _ = load_pretrained(path, device="cpu", dtype="bfloat16")
    up = model.model.layers[0].mlp.up_proj
    up.weight.data = up.weight.data.flip(0)
    assert keep_packed(model, path) == 6
    assert model.model.layers[0].mlp.up_proj is up


def test_rows_are_found_in_the_order_of_rotary_halves() -> None:
    """Row 2 j of a head in the file is row j of its first half, row 2 j + 1 row j of its second half."""
    assert half_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_on_a_cpu_blocks_are_expanded(tokenizer: Any, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, {"": "Q4_1"})
    assert not packed_layers(load_pretrained(path, device="cpu")[0])


def test_blocks_are_kept_where_kernels_read_them(make_model: Any) -> None:
    gpu, model = torch.device("cuda"), make_model().to(torch.bfloat16)
    assert keeps_blocks(model, gpu)
    assert not keeps_blocks(model, torch.device("cpu"))
    assert not keeps_blocks(make_model(), gpu)
    assert not keeps_blocks(tiny("Jamba").to(torch.bfloat16), gpu)  # without a reader


def test_a_packed_model_generates_what_its_expansion_does(tokenizer: Any, settings: Any, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, {"": "Q4_0"})
    texts = []
    for packs in (False, True):
        model, own, _ = load_pretrained(path, device="cpu", dtype="float32")
        if packs:
            assert keep_packed(model, path) == 7
        loaded = lookahead.load((model, own), config=settings)
        texts.append(loaded.generate("the quick brown fox", max_tokens=16).token_ids)
    assert texts[0] == texts[1]


# Experts


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.thinned(1, most=1)
def test_the_experts_of_a_loaded_model_are_packed_again(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, {"": kind}, mixture=True)
    model, _, _ = load_pretrained(path, device="cpu", dtype="bfloat16")
    before = copy.deepcopy(expert_matrices(model.model.layers[0].mlp.experts))
    assert keep_packed(model, path) == 4 + 2 * 3
    module = model.model.layers[0].mlp.experts
    assert type(module) is QuantisedExperts
    for found, expected in zip(expert_matrices(module), before, strict=True):
        for expert in range(3):
            equal = found.weight(expert, torch.bfloat16) == expected.weight(expert, torch.bfloat16)
            assert equal.all() if kind != "Q4_1" else equal.float().mean() > 0.999


@pytest.mark.parametrize("kinds", [{"blk.0.ffn_up_exps": "Q8_0"}, {"blk.0.ffn_down_exps": "F32"}])
def test_experts_of_several_types_stay_plain(kinds: dict[str, str], tokenizer: Any, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, {"": "Q4_0", **kinds}, mixture=True)
    model, _, _ = load_pretrained(path, device="cpu", dtype="bfloat16")
    assert keep_packed(model, path) == 4
    assert model.model.layers[0].mlp.experts.gate_up_proj.ndim == 3


def test_experts_that_are_not_the_files_stay_plain(tokenizer: Any, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "tiny.gguf", tokenizer, {"": "Q4_0"}, mixture=True)
    model, _, _ = load_pretrained(path, device="cpu", dtype="bfloat16")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj.data[2] = experts.down_proj.data[1]
    assert keep_packed(model, path) == 4
    assert model.model.layers[0].mlp.experts is experts
