"""The table of tiny models that `models.reference` is checked on against transformers, and backends against it.

A new reader needs a row here, and a row for each of its knobs: see "Add a model family" in docs/development.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from model_table_experts import EXPERT_ROWS
from model_table_gpt import GPT_ROWS
from model_table_more import MORE_ROWS
from model_table_recurrent import RECURRENT_ROWS
from tiny import tiny

THETA = {"rope_theta": 10000.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 128,
}

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    # heads and head_dim
    ("llama", "Llama", {}),
    ("llama-tied-mha", "Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("llama-mqa", "Llama", {"num_key_value_heads": 1}),
    (
        "llama-odd-heads",
        "Llama",
        {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    ),
    # biases
    ("llama-attention-biases", "Llama", {"attention_bias": True}),
    ("llama-mlp-biases", "Llama", {"mlp_bias": True}),
    # norms
    ("llama-large-eps", "Llama", {"rms_norm_eps": 0.1}),
    # rotary positions
    ("llama-theta", "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama-linear", "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}),
    ("llama-llama3", "Llama", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0, **LLAMA3, **THETA}}),
    (
        "llama-yarn",
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **THETA}},
    ),
    ("llama-dynamic", "Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}}),
    ("llama-longrope", "Llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, **LONGROPE, **THETA}}),
    # windows
    ("mistral", "Mistral", {"sliding_window": 7}),
    ("mistral-no-window", "Mistral", {"sliding_window": None, "head_dim": 12}),
    # a Mistral has one window for all layers, whatever fields of other classes its config has
    ("mistral-foreign-field", "Mistral", {"sliding_window": 7, "use_sliding_window": False}),
    ("qwen2", "Qwen2", {}),
    ("qwen2-tied-mqa", "Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen2-hybrid", "Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("qwen2-unused-window", "Qwen2", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}),
    ("qwen3", "Qwen3", {"head_dim": 16}),
    ("qwen3-tied-mqa", "Qwen3", {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen3-biases", "Qwen3", {"head_dim": 8, "attention_bias": True}),
    (
        "qwen3-hybrid",
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    # q, k, v in one matrix, and gate and up in another
    ("phi3", "Phi3", {}),
    ("phi3-tied-mqa", "Phi3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("phi3-window", "Phi3", {"sliding_window": 7}),
    ("phi3-longrope", "Phi3", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, **LONGROPE, **THETA}}),
    # layers without positions
    ("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    ("smollm3-no-positions", "SmolLM3", {"no_rope_layer_interval": 1}),
    (
        "smollm3-untied-mqa",
        "SmolLM3",
        {"no_rope_layers": [0, 1], "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    ("smollm3-attention-biases", "SmolLM3", {"no_rope_layer_interval": 2, "attention_bias": True}),
    ("smollm3-mlp-biases", "SmolLM3", {"no_rope_layer_interval": 2, "mlp_bias": True}),
    (
        "smollm3-yarn",
        "SmolLM3",
        {
            "no_rope_layer_interval": 2,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **THETA},
        },
    ),
    ("smollm3-windows", "SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7}),
    (
        "smollm3-windows-by-type",
        "SmolLM3",
        {"no_rope_layers": [0, 1], "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    *GPT_ROWS,
    *MORE_ROWS,
    *EXPERT_ROWS,
]
"""(name, family, changes to the config of `tiny`)"""

FIRST_ROWS = list({family: name for name, family, _ in reversed(ROWS)}.values())[::-1]
"""The first row of each family."""

DENSE = [name for name, _, _ in ROWS if name not in {row[0] for row in EXPERT_ROWS}]
"""The rows of models without experts."""
ROUNDING = 1e-5
"""`error` of two ways to compute the same logits in fp32 stays below this (6e-7 measured)."""


def build(name: str, device: str | torch.device = "cpu", **more: Any) -> Any:
    """The tiny model of this row, with more arguments of `tiny`; equal weights for equal arguments."""
    (row,) = [row for row in (*ROWS, *RECURRENT_ROWS) if row[0] == name]
    return tiny(row[1], device=device, **{**row[2], **more})


@torch.no_grad()
def stock_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The logits [n, vocabulary] of n tokens by transformers itself."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)], device=model.device)).logits[0]
    return logits


@torch.no_grad()
def stock_logits_of_each(model: Any, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits [n, vocabulary] of each text of n tokens, in one pass: no token sees the padding behind its text."""
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=model.device)
    return [logits[: len(text)] for logits, text in zip(model(padded).logits, texts, strict=True)]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
