"""Weights that are moved straight into the fused layout: the same bits, stored once, in a model that still works."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_table import ROWS, build
from safetensors.torch import load_file, save_file
from tiny import tiny
from transformers import AutoModelForCausalLM

from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.matrices.dense import fuse_weights
from lookahead.backends.graph.model import check_lowered
from lookahead.backends.graph.placing import place_fused
from lookahead.loading.embedded import ModelError
from lookahead.loading.load import load_pretrained
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.number_formats import Codes, Format
from lookahead.models.read import read
from lookahead.models.rounding import quantise
from lookahead.models.spec import matrices_in

CPU = torch.device("cpu")
NAMES = ("llama", "llama-tied-mha", "mistral", "qwen2", "qwen3", "phi3", "smollm3")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def saved(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, saved in this dtype as several files with an index, and loaded by transformers."""
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def storages(model: Any) -> dict[int, int]:
    """Address and bytes of all memory that the parameters use."""
    found = [parameter.untyped_storage() for parameter in model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def parameter_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(1, most=3)
def test_placed_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = saved(build(name), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    place_fused(model, CPU)
    model.to(CPU)
    assert model.dtype is torch.bfloat16
    assert list(model.state_dict()) == list(expected.state_dict())
    for key, value in model.state_dict().items():
        assert value.dtype is expected.state_dict()[key].dtype
        assert torch.equal(value, expected.state_dict()[key]), key
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in expected.named_parameters()]  # tied alike
    for (_, buffer), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other)


@pytest.mark.parametrize("name", NAMES)
def test_lowering_placed_weights_copies_none(name: str, tmp_path: Path) -> None:
    model = saved(build(name), tmp_path)
    place_fused(model, CPU)
    fused = [matrix for matrix in matrices_in(read(model, "graph")) if len(matrix.parts) > 1]
    assert len(fused) == (0 if name == "phi3" else 2 * model.config.num_hidden_layers)
    before = storages(model)
    assert sum(storage.untyped_storage().nbytes() for storage in [m.parts[0].weight for m in fused]) == sum(
        parameter_bytes(part.weight for part in matrix.parts) for matrix in fused
    )
    backend = GraphBackend(model)
    assert storages(model) == before
    for matrix in matrices_in(read(model, "graph")):
        assert fuse_weights(matrix)[0].data_ptr() == matrix.parts[0].weight.data_ptr()
    assert backend.reads_weights_of(model)


@pytest.mark.slow
def test_every_family_that_the_graph_backend_runs_can_be_placed() -> None:
    placed = 0
    for name, _, _ in ROWS:
        model = build(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        place_fused(model, CPU)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
        try:
            decoder = read(model, "graph")
            check_lowered(decoder)
        except UnsupportedModelError:
            continue
        placed += 1
        addresses = storages(model)
        for matrix in matrices_in(decoder):
            fuse_weights(matrix)
        assert storages(model) == addresses, name
    assert placed > 40


def test_a_placed_model_generates_and_can_be_saved(tmp_path: Path) -> None:
    expected = saved(tiny("Llama", tie_word_embeddings=True), tmp_path / "first", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    place_fused(model, CPU)
    prompt = torch.tensor([[5, 9, 5, 9, 5, 3]])
    assert torch.equal(
        model.generate(prompt, max_new_tokens=8, do_sample=False),
        expected.generate(prompt, max_new_tokens=8, do_sample=False),
    )
    model.save_pretrained(tmp_path / "second")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in again.state_dict().items())


def test_a_model_without_a_reader_stays_as_it_is() -> None:
    model = tiny("DiffLlama")
    before = storages(model)
    place_fused(model, torch.device("meta"))
    assert storages(model) == before


def test_quantised_matrices_stay_where_they_are() -> None:
    model = tiny("Qwen2")
    first, second = model.model.layers
    for name in ("q_proj", "k_proj"):
        layer = getattr(first.self_attn, name)
        setattr(first.self_attn, name, quantise(layer.weight, Format(Codes.E4M3, 0), layer.bias))
    before = model.state_dict()
    place_fused(model, CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    parts = [[getattr(layer.self_attn, f"{name}_proj").bias for name in "qkv"] for layer in (first, second)]
    assert [len({bias.untyped_storage().data_ptr() for bias in biases}) for biases in parts] == [3, 1]


@pytest.mark.parametrize("fused", [True, False])
def test_loading_places_weights(
    fused: bool, tmp_path: Path, tokenizer: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device here is one that has no memory."""
    saved(make_model(), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("lookahead.loading.load.pick_device", lambda name: torch.device("meta"))
    model = load_pretrained(tmp_path, fused=fused)[0]
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model.dtype is torch.bfloat16
    for matrix in matrices_in(read(model, "graph")):
        one = matrix.parts[0].weight.untyped_storage().nbytes()
        assert (one == parameter_bytes(part.weight for part in matrix.parts)) is (fused or len(matrix.parts) == 1)


def test_missing_weights_are_an_error(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if ".1." not in name}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"cannot load model '.*': its files have no weights for model\.layers\.1.* and"
    ):
        load_pretrained(tmp_path, device="cpu")


@pytest.mark.gpu
@CUDA
def test_peak_memory_is_that_of_the_weights(tmp_path: Path, tokenizer: Any, make_model: Any) -> None:
    wide = make_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    wide.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    needed = parameter_bytes(wide.parameters())
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    model = load_pretrained(tmp_path, device="cuda", fused=True)[0]
    for matrix in matrices_in(read(model, "graph")):
        fuse_weights(matrix)
    assert torch.cuda.max_memory_allocated() - before < 1.02 * needed
    assert torch.cuda.max_memory_reserved() - reserved < 1.1 * needed
