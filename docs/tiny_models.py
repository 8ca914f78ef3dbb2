"""Any generative class of transformers, tiny: its own config with every size shrunk, and wide random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import GenerationConfig, TimmWrapperModel

VOCABULARY = 61
WINDOW = 8
"""Sliding windows, attention chunks and sparse blocks are at most this wide: shorter than the prompts."""
MOST_PARAMETERS = 5_000_000

SIZES = {
    "vocab_size vocab_size_per_layer_input audio_vocab_size text_vocab_size codebook_vocab_size t2u_vocab_size "
    "num_embeddings vision_vocab_size": VOCABULARY,
    "codebook_size": 64,
    "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim embedding_size emb_dim embedding_dim lru_width "
    "input_embedding_size output_embedding_size backbone_hidden_size ple_embed_dim out_hidden_size "
    "output_hidden_size mm_embed_dim mm_hidden_size hidden_size_global encoder_hidden_size text_hidden_size "
    "audio_hidden_size cross_hidden_size thinker_hidden_size decoder_hidden_size moe_hidden_size hidden_dim "
    "condition_dim input_size projection_dim vision_output_dim image_token_embed_dim codebook_dim latent_channels "
    "base_channels output_channels post_conv_in_channels post_conv_mid_channels post_conv_out_channels "
    "vector_quantization_hidden_dimension upsample_groups": 32,
    "intermediate_size n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff d_inner "
    "intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size feed_forward_size mlp_dim "
    "alignment_intermediate_size projection_intermediate_size projector_hidden_size projector_input_dim "
    "projector_output_dim projector_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim": 64,
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank o_lora_rank laurel_rank adapter_rank d_rel "
    "hidden_size_per_layer_input router_hidden_size mamba_d_state state_size ssm_state_size hc_lowrank "
    "gated_norm_rank num_centroids downsample_hidden_size": 16,
    "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim swa_head_dim swa_v_head_dim global_head_dim dim_head "
    "d_head attention_head_size index_head_dim indexer_head_dim kv_channels rotary_dim query_pre_attn_scalar "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_head_dim mamba_d_head mamba_headdim "
    "mamba_chunk_size chunk_size time_step_rank mamba_dt_rank cross_head_dim": 8,
    "sliding_window window_size attention_window_size sliding_window_size attention_chunk_size local_attention "
    "keep_window_size index_topk": WINDOW,
    "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads index_n_heads indexer_n_heads "
    "linear_num_key_heads linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num index_block_size "
    "centroid_intermediate_top_k cross_num_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads "
    "num_filters num_codebooks num_quantizers num_code_groups": 4,
    "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads kv_n_heads encoder_layers "
    "decoder_layers num_encoder_layers num_decoder_layers num_blocks depth max_window_layers num_layers_per_stack "
    "num_experts_per_tok moe_topk moe_k moe_top_k num_experts_per_token top_k_experts o_groups index_topk_blocks "
    "index_kpool cross_num_key_value_heads t2u_encoder_layers t2u_decoder_layers": 2,
    "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts "
    "first_k_dense_replace num_dense_layers n_groups mamba_n_groups": 1,
    "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length "
    "num_position_embeddings position_embedding_size": 256,
}
SMALL = {name: size for names, size in SIZES.items() for name in names.split()}
"""Config field -> the most it may be in a tiny model."""

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
UNSET = {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": WINDOW}
"""Fields that are set where a config leaves them open: a window is to be tested wherever there can be one."""

AXES = {
    "cosmos3_edge_text": [2, 1, 1],
    "ernie4_5_vl_moe_text": [1, 1, 2],
    "glm4v_moe_text": [2, 1, 1],
    "glm4v_text": [2, 1, 1],
    "glm_image_text": [2, 1, 1],
    "glm_ocr_text": [2, 1, 1],
    "hunyuan_vl_text": [1, 1, 1, 1],
    "paddleocr_vl_text": [2, 1, 1],
    "qwen2_5_omni_talker": [2, 1, 1],
    "qwen2_5_omni_text": [2, 1, 1],
    "qwen2_5_vl_text": [2, 1, 1],
    "qwen2_vl_text": [2, 1, 1],
    "qwen3_omni_moe_talker_text": [2, 1, 1],
    "qwen3_omni_moe_text": [2, 1, 1],
    "qwen3_vl_moe_text": [2, 1, 1],
    "qwen3_vl_text": [2, 1, 1],
}
"""Rotary frequencies per axis (time, height, width) of text models that have several: half of a head of 8."""

DROP = object()
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": {"<image>": 60}},
    "cohere_compass_text": {
        "head_dim": 8,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32]},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 60}},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64},
    "florence_vision": {
        "depths": [1] * 4,
        "embed_dim": [32] * 4,
        "num_heads": [4] * 4,
        "num_groups": [4] * 4,
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0],
        "intermediate_size": 64,
    },
    "glm4v_moe_text": {"head_dim": 16},
    "glm5_next_text": {"head_dim": 0},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},
        "downsample_rate": "1/7",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": DROP},
    "inkling_vision": {"n_layers": 4, "patch_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mistral4": {"head_dim": 16},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "muse_spark_audio": {"hidden_sizes": [32] * 4, "depths": [1] * 4, "num_hidden_layers": 4},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 32}}},
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 60},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16, "sliding_window": None},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 60},
    "qwen4_exp_text": QWEN4,
    "qwen3_vl_moe_text": {"sliding_window": None},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {
        "shape_vocab_size": 16,
        "pronunciation_vocab_size": 16,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [32, 32]},
    "vibevoice_acoustic_tokenizer": {"depths": [1] * 7},
    "vibevoice_acoustic_tokenizer_encoder": {"depths": [1] * 7},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_key_value_heads": 4, "attention_hidden_size": DROP, "attention_head_dim": DROP},
    "zamba2": {"num_key_value_heads": 4, "mamba_headdim": 16},
}
"""What the rules of `shrink` do not know of a model type.

Some configs name a sliding window that the model's mask does not know. The cache would be cut to it all the same, and
the model would contradict itself, so it stays unset there.
"""
OUTSIDE = {"VibeVoiceForConditionalGeneration": "its generate needs the diffusers package"}
"""What would depend on the packages that happen to be installed."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},  # the large models have none
    "gemma4": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
}
"""Arguments without which a config class cannot be made at all."""


def layers_of_every_kind(columns: Sequence[Sequence[Any]], least: int = 2, most: int = 4) -> list[int]:
    """Layers to keep, so that each combination of the per-layer settings is there once."""
    kinds: dict[str, int] = {}
    for index, settings in enumerate(zip(*columns, strict=True)):
        kinds.setdefault(repr(settings), index)
    kept = set(list(kinds.values())[:most])
    others = (index for index in range(len(columns[0])) if index not in kept)
    return sorted([*kept, *(next(others) for _ in range(least - len(kept)))])


def short_rope(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """Rotary settings with an original context shorter than the prompts, where positions are scaled beyond one."""
    if not rope or rope.get("rope_type") not in ("yarn", "llama3"):
        return None
    return {**rope, "original_max_position_embeddings": 2 * WINDOW}


def shrink(config: Any) -> dict[str, Any]:
    """Arguments for a config like this one, but tiny: the same kinds of layers, every size cut down, windows on."""
    fields, small = config.to_dict(), dict[str, Any]()
    depth, layers = getattr(config, "num_hidden_layers", 0), 2
    per_layer = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == depth > 2}
    if per_layer:
        kept = layers_of_every_kind(list(per_layer.values()))
        layers = len(kept)
        small |= {name: [column[i] for i in kept] for name, column in per_layer.items()}
    for name, value in fields.items():
        if value is None and name in UNSET:
            small[name] = UNSET[name]
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name in DEPTHS:
            small[name] = layers
        elif name.endswith("_token_id"):
            small[name] = min(value, VOCABULARY - 1)
        elif name in SMALL:
            small[name] = min(value or UNSET.get(name, 0), SMALL[name])
    if rope := short_rope(fields.get("rope_parameters")):
        small["rope_parameters"] = rope
    if config.model_type in AXES:
        small["rope_parameters"] = {**fields["rope_parameters"], "mrope_section": AXES[config.model_type]}
    if "kv_lora_rank" in fields:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "use_sliding_window" in fields:
        small["use_sliding_window"] = True
    if "sliding_window" in fields and set(small.get("layer_types", ())) == {"full_attention"}:
        small["layer_types"] = ["sliding_attention", *small["layer_types"][1:]]
    if "is_decoder" in fields:
        small["is_decoder"] = True
    if "tie_word_embeddings" in fields:
        small["tie_word_embeddings"] = False  # tied and this small, a model says its last token again and again
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            small[name] = shrink(getattr(config, name))
            if getattr(config, name).model_type:
                small[name]["model_type"] = getattr(config, name).model_type
    return merged(small, OVERRIDES.get(config.model_type or type(config).__name__, {}))


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`fields` with `changes`, sub-configs field by field."""
    result = dict(fields)
    for name, value in changes.items():
        if value is DROP:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def tiny_config(made: Any) -> Any:
    return made(**shrink(made(**DEFAULTS.get(made.model_type, {}))))


@torch.no_grad()
def scatter(model: Any) -> None:
    """Wide random weights, so that no two logits are within rounding of each other and each token matters."""
    generator = torch.Generator().manual_seed(5)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if id(weight) in tables:
            weight.copy_(noise)
        elif weight.dim() > 1:
            weight.copy_(noise * 1.7 / math.sqrt(weight.shape[-1]))
        else:
            weight.add_(0.1 * noise)


def build(name: str) -> Any:
    """A model of this class of transformers."""
    made = getattr(transformers, name)
    with mock.patch.object(TimmWrapperModel, "__init__", transformers.PreTrainedModel.__init__):
        return made(tiny_config(made.config_class))


def tiny_model(name: str) -> Any:
    """A tiny random model of this class in fp32; the same one in every run."""
    if name in OUTSIDE:
        raise ValueError(OUTSIDE[name])
    with torch.device("meta"):
        size = sum(weight.numel() for weight in build(name).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the smallest config found has {size / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)  # some vectors are drawn by the class, such as decays, and `scatter` only adds to them
        model = build(name).float().eval()
    scatter(model)
    start = 0 if model.config.is_encoder_decoder else None
    model.generation_config = GenerationConfig(decoder_start_token_id=start)
    return model
