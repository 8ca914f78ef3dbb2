"""Hybrids to measure with: the small model's function, or a text that depends on states, and true shapes' bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybrids
import pytest
import torch
import transformers
from inflate_hybrids import (
    HYBRID_SHAPES,
    HybridShape,
    delta_fields,
    inflate_hybrid,
    mamba_fields,
)
from model_table import error
from random_hybrids import RANDOM_HYBRIDS, random_hybrid
from tiny import tiny

from lookahead.models import reference
from lookahead.models.read import read

Plain = Callable[[Any, Sequence[int], int], list[int]]

VOCABULARY = 61
SHAPES = {
    "delta": HybridShape(48, 3, 96, 8, 4, "Qwen3_5Text", 16, delta_fields(2, 4, 8)),
    "mamba": HybridShape(48, 3, 96, 8, 4, "GraniteMoeHybrid", 8, mamba_fields(6, 16, 2, 8)),
}


def small() -> Any:
    return tiny("Llama", vocab_size=VOCABULARY, max_position_embeddings=256)


def text(count: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(5)).tolist()


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def made(name: str, **changes: Any) -> Any:
    return inflate_hybrid(small(), replace(SHAPES[name], **changes), text(60))


# The same function


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("delta", {}),
        ("delta", {"hidden": 32, "layers": 2, "intermediate": 64, "heads": 4, "kv_heads": 2, "between": 3}),
        ("delta", {"dim": 12, "kv_heads": 8}),
        ("mamba", {}),
        ("mamba", {"hidden": 32, "fields": mamba_fields(4, 16, 1, 8), "between": 2, "heads": 6, "kv_heads": 6}),
    ],
)
@pytest.mark.thinned(1, most=3)
def test_the_same_logits(name: str, changes: dict[str, Any]) -> None:
    assert error(logits(made(name, **changes), text(60)), logits(small(), text(60))) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.thinned(1, most=1)
def test_the_same_tokens(name: str, plain: Plain) -> None:
    prompt = [5, 9, 2, 7, 5, 9]
    expected = plain(small(), prompt, 32)
    assert len(set(expected)) > 6
    assert plain(made(name), prompt, 32) == expected


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.thinned(1, most=1)
def test_half_precision(name: str) -> None:
    """The column that norms divide by is exact in bf16, too."""
    exact, model = logits(small(), text(60)), small().to(torch.bfloat16)
    found = logits(inflate_hybrid(model, SHAPES[name], text(60)), text(60))
    assert error(found, exact) < 2 * error(logits(model, text(60)), exact)


# States


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.thinned(1, most=1)
def test_layers_that_add_something(name: str) -> None:
    """More with more strength, and not so much that the small model is lost."""
    expected = logits(small(), text(60))
    weak, strong = (error(logits(made(name, strength=strength), text(60)), expected) for strength in (1e-3, 1e-2))
    assert 1e-4 < weak < strong / 3 < 0.3


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.thinned(1, most=1)
def test_states_reach_far_back(name: str) -> None:
    """Without attention, a token still depends on one that is 50 before it, far more than by rounding."""
    large = made(name, strength=0.05)
    for block in large.model.layers:
        if (attention := getattr(block, "self_attn", None)) is not None:
            attention.o_proj.weight.data.zero_()
    other = [text(60)[0] ^ 1, *text(60)[1:]]
    assert error(logits(large, other)[50:], logits(large, text(60))[50:]) > 1e-5
    for block in large.model.layers:
        for module in (getattr(block, "linear_attn", None), getattr(block, "mamba", None)):
            if module is not None:
                module.out_proj.weight.data.zero_()
    assert torch.equal(logits(large, other)[50:], logits(large, text(60))[50:])


@pytest.mark.parametrize("name", SHAPES)
def test_a_hybrid_is_read(name: str) -> None:
    large = made(name, strength=0.05)
    assert error(reference.forward(read(large, "some"), text(60)), logits(large, text(60))) < 1e-5


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("delta", {"layers": 1}, "layers=1 is less than the small model's 2"),
        ("delta", {"dim": 8}, "heads of 8 for those of 8 of the small model, in a Qwen3_5Text"),
        ("mamba", {"dim": 16}, "heads of 16 for those of 8 of the small model, in a GraniteMoeHybrid"),
    ],
)
def test_shapes_that_do_not_fit(name: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(name, **changes)


# Shapes


def test_the_embedded_model_fits_into_every_shape() -> None:
    for shape in HYBRID_SHAPES.values():
        assert (shape.hidden, shape.layers, shape.intermediate) >= (576, 30, 1536)
        assert shape.heads // shape.kv_heads >= 3
        assert shape.kv_heads >= 3
        assert shape.dim > 64 if shape.kind == "Qwen3_5Text" else shape.dim == 64
    assert {shape.strength > 0 for name, shape in HYBRID_SHAPES.items() if name.endswith("-states")} == {True}


@pytest.mark.parametrize(("name", "billions"), [("qwen3.5-9b", 8.95), ("granite-4-h-tiny", 6.94)])
def test_the_random_shapes_have_the_weights_of_what_they_stand_for(name: str, billions: float) -> None:
    kind, fields = RANDOM_HYBRIDS[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**fields))
    found = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert found == pytest.approx(billions, rel=0.01)


TINY_FIELDS = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
TINY_STATES = {
    "qwen3.5-9b": {"head_dim": 16, **dict(delta_fields(2, 4, 8))},
    "granite-4-h-tiny": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        **dict(mamba_fields(8, 16, 1, 8)),
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RANDOM_HYBRIDS)
def test_random_hybrids_decode(name: str, plain: Plain) -> None:
    model = random_hybrid(RANDOM_HYBRIDS[name], "cpu", dtype=torch.float32, **TINY_FIELDS, **TINY_STATES[name])
    assert len(plain(model, [5, 9, 2, 7], 6)) == 6
    assert model.generation_config.eos_token_id is None
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", RANDOM_HYBRIDS)
def test_what_a_token_reads_is_what_its_layers_have(name: str) -> None:
    """All weights but the embedding's, and of eight experts the two that it chooses."""
    model = random_hybrid(RANDOM_HYBRIDS[name], "cpu", dtype=torch.float32, **TINY_FIELDS, **TINY_STATES[name])
    sizes = {key: parameter.nbytes for key, parameter in model.named_parameters()}
    experts = sum(size for key, size in sizes.items() if "block_sparse_moe.experts" in key)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    unread = 0 if tied else model.get_input_embeddings().weight.nbytes
    assert bool(experts) is ("granite" in name)
    assert hybrids.token_bytes(model) == pytest.approx(sum(sizes.values()) - unread - experts * 6 / 8, rel=0.01)


def test_the_work_of_a_hybrid_is_measured(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "hybrids.json", tmp_path / "model"
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"tokens": 3, "prompt": 8}

    def make(shape: Any) -> Any:
        fields = {**TINY_FIELDS, **TINY_STATES["qwen3.5-9b"], "max_position_embeddings": 512}
        return random_hybrid(shape, "cpu", dtype=torch.float32, **fields)

    arguments = ["qwen3.5-9b", "--model", str(folder), "--out", str(out)]
    (found,) = hybrids.main(arguments, make, backend="graph", **sizes).values()
    assert found["plain 1"] > 0
    assert found["64 / 1"] == pytest.approx(found["ms 64 x 1"] / found["ms 1 x 1"], rel=0.01)
    assert json.loads(out.read_text(encoding="utf-8"))["shapes"] == {"qwen3.5-9b": found}
    with pytest.raises(SystemExit):
        hybrids.main(["qwen"], make)
    assert "unknown shape 'qwen'; choose from qwen3.5-9b" in capsys.readouterr().err
