"""What readers find in published checkpoints with LayerNorm, whose parameters are counted to check the configs here."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import transformers

from lookahead.models.read import read


class Found(NamedTuple):
    parameters: int
    heads: tuple[int, int, int]
    """Query heads, K/V heads, width."""
    turned: int | None
    """Columns of a head that rotary positions turn."""
    positions: int | None
    """Rows of the table of positions."""
    windows: list[int | None]


def sizes(hidden: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """Config fields that most classes have in common."""
    named = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**named, "vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, **more}


FALCON_40B = sizes(8192, 60, 128, 65024, num_kv_heads=8, new_decoder_architecture=True)
PHI4_MINI = sizes(
    3072, 32, 24, 200064, intermediate_size=8192, num_key_value_heads=8, tie_word_embeddings=True,
    partial_rotary_factor=0.75, pad_token_id=199999,
)  # fmt: skip
PYTHIA_70M = sizes(512, 6, 8, 50304, intermediate_size=2048, rotary_pct=0.25)
SANTACODER = {"vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192}
STABLELM_2 = sizes(2048, 24, 32, 100352, intermediate_size=5632, use_qkv_bias=True, partial_rotary_factor=0.25)
XGLM_564M = {"vocab_size": 256008, "d_model": 1024, "ffn_dim": 4096, "num_layers": 24, "attention_heads": 16}
GPT_NEO = {"attention_types": [[["global", "local"], 6]], "hidden_size": 768, "num_heads": 12, "num_layers": 12}

PUBLISHED: dict[str, tuple[str, dict[str, Any], Found]] = {
    "biogpt": ("BioGpt", {}, Found(346_763_264, (16, 16, 64), None, 1024, [None])),
    "codegen-350M": (
        "CodeGen",
        {"vocab_size": 51200, "n_embd": 1024, "n_layer": 20, "rotary_dim": 32},
        Found(356_712_448, (16, 16, 64), 32, None, [None]),
    ),
    "falcon-7b": ("Falcon", {}, Found(6_921_720_704, (71, 1, 64), 64, None, [None])),
    "falcon-40b": ("Falcon", FALCON_40B, Found(41_303_293_952, (128, 8, 64), 64, None, [None])),
    "gpt2": ("GPT2", {}, Found(124_439_808, (12, 12, 64), None, 1024, [None])),
    "gpt-j-6b": ("GPTJ", {}, Found(6_050_882_784, (16, 16, 256), 64, None, [None])),
    "gpt-neo-125m": ("GPTNeo", GPT_NEO, Found(125_198_592, (12, 12, 64), None, 2048, [None, 256])),
    "opt-125m": ("OPT", {}, Found(125_239_296, (12, 12, 64), None, 2048, [None])),
    "phi-2": (
        "Phi",
        sizes(2560, 32, 32, 51200, intermediate_size=10240, partial_rotary_factor=0.4),
        Found(2_779_683_840, (32, 32, 80), 32, None, [None]),
    ),
    "Phi-4-mini": ("Phi3", PHI4_MINI, Found(3_836_021_760, (24, 8, 128), 96, None, [None])),
    "pythia-70m": ("GPTNeoX", PYTHIA_70M, Found(70_426_624, (8, 8, 64), 16, None, [None])),
    "santacoder": ("GPTBigCode", SANTACODER, Found(1_124_886_528, (16, 1, 128), None, 2048, [None])),
    "stablelm-2-1_6b": ("StableLm", STABLELM_2, Found(1_644_515_328, (32, 32, 64), 16, None, [None])),
    "starcoder2-3b": (
        "Starcoder2",
        {"sliding_window": 4096},
        Found(3_030_371_328, (24, 2, 128), 128, None, [4096]),
    ),
    "xglm-564M": ("XGLM", XGLM_564M, Found(564_463_616, (16, 16, 64), None, 2048, [None])),
}
"""Checkpoint -> its family, what its config changes of the family's defaults, and what is found."""


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.thinned(1, most=7)
def test_published_checkpoints(name: str) -> None:
    """Models without memory."""
    kind, config, expected = PUBLISHED[name]
    with torch.device("meta"):
        made = getattr(transformers, f"{kind}Config")(**config)
        model = transformers.AutoModelForCausalLM.from_config(made)
    described = read(model, "some")
    attention, table = described.blocks[-1].attention, described.position_embedding
    assert expected == Found(
        sum(parameter.numel() for parameter in model.parameters()),
        (attention.heads, attention.kv_heads, attention.head_dim),
        None if attention.rope is None else attention.rope.dim,
        None if table is None else len(table),
        described.windows,
    )
