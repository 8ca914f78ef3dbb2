"""Rows of the table of tiny models: mixtures of experts."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = {"sliding_window": 7, "layer_types": [SLIDING, FULL]}
THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, **THETA}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4, "short_mscale": 1.2,
    "long_mscale": 1.4, "original_max_position_embeddings": 128, "factor": 2.0, **THETA,
}  # fmt: skip
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
QWEN2 = {**QWEN, "norm_topk_prob": False, "shared_expert_intermediate_size": 40}
GLM = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "head_dim": 16,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
OSS = {**EIGHT, **TYPES, "head_dim": 16, "num_experts_per_tok": 3}
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 6.0}
SHARED = {**SCALES, **EIGHT, "shared_intermediate_size": 40}
SWA = {**SHARED, "num_hidden_layers": 3, "sliding_window": 7, "layer_types": [FULL, SLIDING, FULL]}
ERNIE = {
    "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2, "head_dim": 16,
    "num_hidden_layers": 3,
}  # fmt: skip
HUNYUAN = {"num_experts": 8, "moe_topk": 3, "head_dim": 16}
AFMOE = {
    **TYPES, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 1, "num_dense_layers": 1,
    "route_scale": 1.7,
}  # fmt: skip
EXAONE = {
    **TYPES, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 2,
    "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
HYBRID = {**SCALES, "layer_types": [FULL, FULL], "shared_intermediate_size": 48, "mamba_n_heads": 8}
MELLUM = {**QWEN, "head_dim": 16, **TYPES, "rope_parameters": {
    FULL: {"rope_type": "default", "rope_theta": 500.0}, SLIDING: {"rope_type": "default", **THETA}
}}  # fmt: skip

EXPERT_ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("mixtral", "Mixtral", EIGHT),
    ("mixtral-window", "Mixtral", {**EIGHT, "sliding_window": 7, "head_dim": 16}),
    ("mixtral-top-1", "Mixtral", {**EIGHT, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ("qwen2-moe", "Qwen2Moe", QWEN2),
    ("qwen2-moe-normalised", "Qwen2Moe", {**QWEN2, "norm_topk_prob": True, "qkv_bias": False}),
    (
        "qwen2-moe-some-dense",
        "Qwen2Moe",
        {
            **QWEN2,
            **TYPES,
            "use_sliding_window": True,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "layer_types": [SLIDING, FULL, SLIDING, FULL, FULL],
        },
    ),
    ("qwen3-moe", "Qwen3Moe", {**QWEN, "head_dim": 16}),
    ("qwen3-moe-window", "Qwen3Moe", {**QWEN, "use_sliding_window": True, "sliding_window": 7, "attention_bias": True}),
    ("qwen3-moe-plain-weights", "Qwen3Moe", {**QWEN, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    ("qwen3-moe-some-dense", "Qwen3Moe", {**QWEN, "decoder_sparse_step": 2}),
    ("mellum", "Mellum", MELLUM),
    ("mellum-dense", "Mellum", {**MELLUM, "mlp_layer_types": ["dense", "sparse"], "norm_topk_prob": False}),
    ("gpt-oss", "GptOss", OSS),
    ("gpt-oss-yarn", "GptOss", {**OSS, "rope_parameters": YARN}),
    ("gpt-oss-top-1", "GptOss", {**OSS, "num_experts_per_tok": 1, "attention_bias": False}),
    ("olmoe", "Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    ("olmoe-normalised", "Olmoe", {"num_experts": 8, "norm_topk_prob": True, "attention_bias": True}),
    ("flex-olmo", "FlexOlmo", {"num_experts": 8, "num_experts_per_tok": 3}),
    ("flex-olmo-normalised", "FlexOlmo", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    ("granite-moe", "GraniteMoe", {**SCALES, **EIGHT}),
    ("granite-moe-biases", "GraniteMoe", {**SCALES, **EIGHT, "attention_bias": True, "tie_word_embeddings": False}),
    ("granite-moe-shared", "GraniteMoeShared", SHARED),
    ("granite-moe-not-shared", "GraniteMoeShared", {**SHARED, "shared_intermediate_size": 0}),
    ("granite-moe-swa", "GraniteMoeSWA", SWA),
    ("granite-hybrid-experts", "GraniteMoeHybrid", {**HYBRID, **EIGHT}),
    ("glm4-moe", "Glm4Moe", {**GLM, "rope_parameters": PARTIAL, "attention_bias": True}),
    ("glm4-moe-groups", "Glm4Moe", {**GLM, **GROUPS, "use_qk_norm": True, "first_k_dense_replace": 0}),
    ("glm4-moe-plain-weights", "Glm4Moe", {**GLM, **GROUPS, "norm_topk_prob": False, "topk_group": 3}),
    ("dots1", "Dots1", {**GLM, **TYPES}),
    ("dots1-groups", "Dots1", {**GLM, **GROUPS, "sliding_window": None, "layer_types": [FULL, FULL]}),
    ("solar-open", "SolarOpen", {**GLM, **GROUPS}),
    ("exaone-moe", "ExaoneMoe", EXAONE),
    ("exaone-moe-groups", "ExaoneMoe", {**EXAONE, **GROUPS, "norm_topk_prob": False, "head_dim": 16}),
    (
        "hunyuan3",
        "HYV3",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    ("ernie-moe", "Ernie4_5_Moe", ERNIE),
    ("ernie-moe-some-dense", "Ernie4_5_Moe", {**ERNIE, "moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    (
        "ernie-moe-end",
        "Ernie4_5_Moe",
        {**ERNIE, "moe_layer_start_index": 0, "moe_layer_end_index": 1, "use_bias": True},
    ),
    ("hunyuan-moe", "HunYuanMoEV1", HUNYUAN),
    ("hunyuan-moe-top-by-layer", "HunYuanMoEV1", {**HUNYUAN, "moe_topk": [1, 4], "attention_bias": True}),
    ("phimoe", "Phimoe", {**EIGHT, "attention_bias": True, "lm_head_bias": True}),
    ("phimoe-jitter", "Phimoe", {**EIGHT, "router_jitter_noise": 0.4, "sliding_window": 7}),
    ("phimoe-longrope", "Phimoe", {**EIGHT, "rope_parameters": LONGROPE}),
    ("afmoe", "Afmoe", AFMOE),
    ("afmoe-scaled", "Afmoe", {**AFMOE, "mup_enabled": True, "num_dense_layers": 0, "attention_bias": True}),
    ("minimax-m2", "MiniMaxM2", {**EIGHT, "head_dim": 16, "rope_parameters": PARTIAL}),
]
