"""Rows of the table of tiny models: families that differ from Llama in norms, scales, rotations, windows or sinks."""

from __future__ import annotations

from typing import Any

THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **THETA}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **THETA}
FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = {"sliding_window": 7, "layer_types": [SLIDING, FULL]}
SMALL = {"head_dim": 16, "query_pre_attn_scalar": 10}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
GEMMA4 = {
    "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 7,
    "hidden_size_per_layer_input": 0, "layer_types": [SLIDING, FULL, SLIDING, FULL],
}  # fmt: skip
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 6.0}
SWA = {**SCALES, "num_hidden_layers": 3, "sliding_window": 7, "layer_types": [FULL, SLIDING, FULL]}
HYBRID = {
    **SCALES, "layer_types": [FULL, FULL], "num_local_experts": 0, "shared_intermediate_size": 48, "mamba_n_heads": 8
}  # fmt: skip
MINISTRAL3 = {**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}

MORE_ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma", "Gemma", {"head_dim": 16}),
    ("gemma-untied-biases", "Gemma", {"head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}),
    ("gemma2", "Gemma2", {**SMALL, **CAPS, "sliding_window": 7}),
    ("gemma2-uncapped", "Gemma2", {**SMALL, **dict.fromkeys(CAPS), "sliding_window": 7}),
    ("gemma2-biases", "Gemma2", {**SMALL, **TYPES, "attention_bias": True, "hidden_activation": "silu"}),
    ("gemma3", "Gemma3Text", {**SMALL, **TYPES}),
    ("gemma3-capped", "Gemma3Text", {**SMALL, **TYPES, "final_logit_softcapping": 5.0}),
    ("gemma3-unused-cap", "Gemma3Text", {**SMALL, **TYPES, "attn_logit_softcapping": 3.0}),
    (
        "gemma3-linear",
        "Gemma3Text",
        {
            **SMALL,
            **TYPES,
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, **THETA}, SLIDING: {"rope_theta": 50.0}},
        },
    ),
    ("gemma4", "Gemma4Text", {**GEMMA4, "attention_k_eq_v": True}),
    ("gemma4-values", "Gemma4Text", {**GEMMA4, "final_logit_softcapping": 5.0}),
    (
        "gemma4-shared",
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "attention_k_eq_v": True,
        },
    ),
    ("gemma4-biases", "Gemma4Text", {**GEMMA4, "attention_k_eq_v": True, "attention_bias": True}),
    ("gemma4-unified", "Gemma4UnifiedText", {**GEMMA4, "attention_k_eq_v": True}),
    ("vaultgemma", "VaultGemma", {**SMALL, **CAPS, "sliding_window": 7}),
    ("granite", "Granite", SCALES),
    ("granite-untied-biases", "Granite", {**SCALES, "tie_word_embeddings": False, "attention_bias": True}),
    ("granite-mlp-biases", "Granite", {**SCALES, "mlp_bias": True}),
    ("granite-swa", "GraniteSWA", SWA),
    ("granite-swa-thetas", "GraniteSWA", {**SWA, "layer_rope_theta": [0, 50.0, 10000.0]}),
    ("hyperclovax", "HyperCLOVAX", SCALES),
    ("hyperclovax-no-out-norms", "HyperCLOVAX", {**SCALES, "use_post_norm": False, "head_dim": 16}),
    ("hyperclovax-biases", "HyperCLOVAX", {"attention_bias": True, "mlp_bias": True}),
    ("granite-hybrid", "GraniteMoeHybrid", {**HYBRID, "position_embedding_type": "rope"}),
    ("granite-hybrid-no-positions", "GraniteMoeHybrid", HYBRID),
    ("olmo", "Olmo", {}),
    ("olmo-clipped", "Olmo", {"clip_qkv": 0.8}),
    ("olmo-biases", "Olmo", {"clip_qkv": 2.0, "attention_bias": True}),
    ("olmo2", "Olmo2", {}),
    ("olmo2-biases", "Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    ("olmo3", "Olmo3", TYPES),
    ("olmo3-yarn", "Olmo3", {**TYPES, "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", **THETA}}}),
    ("exaone4", "Exaone4", TYPES),
    ("exaone4-no-windows", "Exaone4", {"sliding_window": None, "layer_types": [FULL, FULL]}),
    ("glm", "Glm", {"head_dim": 16, "rope_parameters": PARTIAL}),
    ("glm-biases", "Glm", {"head_dim": 8, "rope_parameters": PARTIAL, "attention_bias": True}),
    ("glm-whole-heads", "Glm", {"head_dim": 16, "rope_parameters": {**PARTIAL, "partial_rotary_factor": 1.0}}),
    ("glm4", "Glm4", {"head_dim": 16, "rope_parameters": PARTIAL, "attention_bias": True}),
    ("helium", "Helium", {"head_dim": 8}),
    ("helium-biases", "Helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    ("ernie", "Ernie4_5", {"head_dim": 16}),
    ("ernie-biases", "Ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    ("cohere", "Cohere", {"logit_scale": 0.3}),
    ("cohere-norms", "Cohere", {"use_qk_norm": True, "attention_bias": True}),
    ("cohere2", "Cohere2", {**TYPES, "logit_scale": 0.3}),
    ("cohere2-biases", "Cohere2", {**TYPES, "attention_bias": True}),
    ("ministral", "Ministral", {**TYPES, "head_dim": 8}),
    ("ministral3", "Ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL3}),
    ("ministral3-window", "Ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL3, "sliding_window": 7}),
    ("seed", "SeedOss", {"head_dim": 16}),
    ("seed-biases", "SeedOss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
    ("hunyuan", "HunYuanDenseV1", {"head_dim": 16}),
    ("hunyuan-biases", "HunYuanDenseV1", {"head_dim": 8, "attention_bias": True}),
    ("hunyuan-alpha", "HunYuanDenseV1", {"head_dim": 16, "rope_parameters": {**DYNAMIC, "alpha": 50.0}}),
    ("cwm", "Cwm", {**TYPES, "head_dim": 16, "bos_token_id": 1}),
    ("arcee", "Arcee", {}),
    ("arcee-biases", "Arcee", {"attention_bias": True, "mlp_bias": True}),
    ("apertus", "Apertus", {}),
    ("apertus-biases", "Apertus", {"hidden_act": "relu2", "attention_bias": True}),
    ("nanochat", "NanoChat", {}),
    ("nanochat-biases", "NanoChat", {"attention_bias": True, "final_logit_softcapping": None}),
    ("jais2", "Jais2", {}),
    ("jais2-no-biases", "Jais2", {"attention_bias": False, "mlp_bias": False}),
]
