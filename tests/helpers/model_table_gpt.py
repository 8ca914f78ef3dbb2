"""Rows of `model_table` for models with LayerNorm: GPT-2, GPT-J, GPT-NeoX, OPT, Falcon, Phi and their relatives."""

from __future__ import annotations

from typing import Any

HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
DYNAMIC = {"rope_parameters": {**HALF["rope_parameters"], "rope_type": "dynamic", "factor": 4.0}}
PARTLY_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [4.0, 4.0],
    "original_max_position_embeddings": 128,
}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
NARROW = {"ffn_dim": 64, "init_std": 0.3}

GPT_ROWS: list[tuple[str, str, dict[str, Any]]] = [
    # one norm for both halves of a block, a part of each head turned, biases everywhere
    ("phi", "Phi", HALF),
    ("phi-quarter-mqa", "Phi", {"partial_rotary_factor": 0.25, "num_key_value_heads": 1}),
    ("phi-norms", "Phi", {**HALF, "qk_layernorm": True}),
    ("phi-tied", "Phi", {**HALF, "tie_word_embeddings": True}),
    ("phi-dynamic", "Phi", DYNAMIC),
    ("phi4", "Phi3", HALF),
    ("phi4-longrope", "Phi3", {"rope_parameters": PARTLY_LONG, "tie_word_embeddings": True}),
    # LayerNorm and no gate
    ("starcoder2", "Starcoder2", {}),
    ("starcoder2-window", "Starcoder2", {"sliding_window": 7, "tie_word_embeddings": False}),
    ("starcoder2-no-biases", "Starcoder2", {"use_bias": False}),
    ("nemotron", "Nemotron", {"head_dim": 8}),
    ("nemotron-biases", "Nemotron", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    ("nemotron-tied", "Nemotron", {"head_dim": 8, "tie_word_embeddings": True, "norm_eps": 0.1}),
    # LayerNorm and a gate
    ("stablelm", "StableLm", HALF),
    ("stablelm-quarter", "StableLm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    ("stablelm-norms-of-heads", "StableLm", {**HALF, "qk_layernorm": True}),
    ("stablelm-parallel", "StableLm", {**HALF, "use_parallel_residual": True}),
    # query, key and value of each head side by side
    ("neox", "GPTNeoX", {}),
    ("neox-sequential", "GPTNeoX", {**HALF, "use_parallel_residual": False, "tie_word_embeddings": True}),
    ("neox-no-biases", "GPTNeoX", {**HALF, "attention_bias": False}),
    ("neox-dynamic", "GPTNeoX", DYNAMIC),
    ("neox-japanese", "GPTNeoXJapanese", {"intermediate_multiple_size": 2}),
    ("persimmon", "Persimmon", {}),
    ("persimmon-no-norms", "Persimmon", {"qk_layernorm": False}),
    # one K/V head, or groups of heads side by side
    ("falcon", "Falcon", {}),
    ("falcon-biases", "Falcon", {"bias": True, "tie_word_embeddings": False}),
    ("falcon-sequential", "Falcon", {"parallel_attn": False}),
    ("falcon-mha", "Falcon", {"multi_query": False}),
    ("falcon-groups", "Falcon", GROUPED),
    ("falcon-groups-one-norm", "Falcon", {**GROUPED, "num_ln_in_parallel_attn": 1}),
    ("falcon-relu", "Falcon", {**GROUPED, "activation": "relu", "ffn_hidden_size": 48}),
    # learned positions
    ("gpt2", "GPT2", {}),
    ("gpt2-untied", "GPT2", {"tie_word_embeddings": False, "n_inner": 48, "activation_function": "gelu"}),
    ("gpt2-unscaled", "GPT2", {"scale_attn_weights": False}),
    ("gpt2-scaled-by-layer", "GPT2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("bigcode", "GPTBigCode", {}),
    ("bigcode-mha", "GPTBigCode", {"multi_query": False}),
    ("bigcode-unscaled", "GPTBigCode", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    ("gpt-neo", "GPTNeo", {"attention_types": [[["global", "local"], 1]], "window_size": 7}),
    ("gpt-neo-global", "GPTNeo", {"attention_types": [[["global"], 2]], "tie_word_embeddings": False}),
    # neighbouring columns turned
    ("gptj", "GPTJ", {"rotary_dim": 4}),
    ("gptj-whole-heads", "GPTJ", {"rotary_dim": 8, "tie_word_embeddings": True, "n_inner": 48}),
    ("codegen", "CodeGen", {"rotary_dim": 4}),
    ("codegen-pairs-of-heads", "CodeGen", {"rotary_dim": 4, "num_attention_heads": 8}),
    # a table of positions with unused rows, a scaled embedding
    ("opt", "OPT", NARROW),
    ("opt-untied", "OPT", {**NARROW, "tie_word_embeddings": False, "activation_function": "gelu"}),
    ("opt-no-biases", "OPT", {**NARROW, "enable_bias": False}),
    ("opt-plain-norms", "OPT", {**NARROW, "layer_norm_elementwise_affine": False}),
    ("xglm", "XGLM", NARROW),
    ("xglm-unscaled", "XGLM", {**NARROW, "scale_embedding": False, "pad_token_id": 5}),
    ("biogpt", "BioGpt", {}),
    ("biogpt-unscaled", "BioGpt", {"scale_embedding": False, "tie_word_embeddings": False}),
    ("ctrl", "CTRL", {"dff": 64}),
]
"""(name, family, changes to the config of `tiny`)"""
