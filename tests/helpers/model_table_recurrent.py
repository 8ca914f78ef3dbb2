"""Rows of the table of tiny models: mixers with a recurrent state.

They are no part of `ROWS`: most backends refuse them. Chunks are short, so that a text has several of them where
transformers runs a prompt in chunks.
"""

from __future__ import annotations

from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"
HYBRID = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}  # fmt: skip
DELTA = {
    **HYBRID, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
QWEN_ROPE = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 6.0}
GRANITE = {**SCALES, **HYBRID, **MAMBA, "shared_intermediate_size": 40, "num_local_experts": 0}
FALCON = {
    **MAMBA, "mamba_d_ssm": 64, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.7, "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.4,
    "mlp_multipliers": [0.75, 1.25], "ssm_multipliers": [1.1, 0.8, 1.3, 0.7, 0.9], "mamba_rms_norm": True,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR], "num_hidden_layers": 5, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 8, "head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
PURE = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 12, "expand": 2, "chunk_size": 8}
LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], "block_auto_adjust_ff_dim": False}
OLMO = {**DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

RECURRENT_ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3-next", "Qwen3Next", {**DELTA, **EXPERTS, "mlp_only_layers": [1]}),
    (
        "qwen3-next-equal-heads",
        "Qwen3Next",
        {**DELTA, **EXPERTS, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "attention_bias": True},
    ),
    ("qwen3.5", "Qwen3_5Text", {**DELTA, **QWEN_ROPE}),
    ("qwen3.5-wide-keys", "Qwen3_5Text", {**DELTA, **QWEN_ROPE, "linear_key_head_dim": 20, "attention_bias": True}),
    ("qwen3.5-moe", "Qwen3_5MoeText", {**DELTA, **QWEN_ROPE, **EXPERTS}),
    ("olmo-hybrid", "OlmoHybrid", OLMO),
    ("olmo-hybrid-positive", "OlmoHybrid", {**OLMO, "linear_allow_neg_eigval": False}),
    ("olmo-hybrid-no-positions", "OlmoHybrid", {**OLMO, "rope_parameters": None}),
    ("granite-mamba", "GraniteMoeHybrid", GRANITE),
    (
        "granite-mamba-experts",
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    ("granite-mamba-biases", "GraniteMoeHybrid", {**GRANITE, "mamba_proj_bias": True, "mamba_n_groups": 1}),
    ("granite-mamba-limit", "GraniteMoeHybrid", {**GRANITE, "time_step_limit": (0.6, 0.9)}),
    ("granite-mamba-no-conv-bias", "GraniteMoeHybrid", {**GRANITE, "mamba_conv_bias": False, "mamba_d_conv": 3}),
    ("bamba", "Bamba", {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    ("falcon-h1", "FalconH1", FALCON),
    ("falcon-h1-norm-first", "FalconH1", {**FALCON, "mamba_norm_before_gate": True}),
    ("falcon-h1-no-norm", "FalconH1", {**FALCON, "mamba_rms_norm": False, "mamba_proj_bias": True}),
    ("nemotron-h", "NemotronH", NEMOTRON),
    ("nemotron-h-limit", "NemotronH", {**NEMOTRON, "time_step_min": 0.6, "n_groups": 4}),
    ("nemotron-h-latent", "NemotronH", {**NEMOTRON, "moe_latent_size": 20, "mlp_bias": True, "use_bias": True}),
    ("mamba2", "Mamba2", PURE),
    ("mamba2-limit", "Mamba2", {**PURE, "time_step_limit": (0.6, 0.9), "use_bias": True}),
    ("lfm2", "Lfm2", LFM2),
    ("lfm2-biases", "Lfm2", {**LFM2, "conv_bias": True, "conv_L_cache": 4}),
    (
        "lfm2-moe",
        "Lfm2Moe",
        {**LFM2, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 1},
    ),
    (
        "lfm2-moe-no-bias",
        "Lfm2Moe",
        {
            **LFM2, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 0,
            "use_expert_bias": False, "routed_scaling_factor": 1.5,
        },
    ),
]  # fmt: skip
"""(name, family, changes to the config of `tiny`)"""

QUICK_RECURRENT_ROWS = (
    "qwen3-next", "qwen3.5", "olmo-hybrid", "granite-mamba", "bamba", "falcon-h1", "nemotron-h", "mamba2", "lfm2",
    "lfm2-moe",
)  # fmt: skip
"""One of each family, but for a mixture of experts of one that is there without."""
