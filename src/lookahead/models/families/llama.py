"""Llama, Mistral, Qwen2 and Qwen3: norms before attention and feed-forward, rotary positions, a SiLU gate.

Mistral and Qwen2 may have a window, on all layers or on some; Qwen2 adds biases to q, k and v, Qwen3 norms of q and k.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.facts import UnsupportedModelError, position_limit, sliding_windows
from lookahead.models.spec import Activation, Attention, Block, Decoder, FeedForward, Matrix, Norm, Rope


def read(model: Any) -> Decoder:
    config, base = model.config, model.model
    limit = position_limit(config)
    windows = sliding_windows(config)
    rope = Rope(base.rotary_emb, base.layers[0].self_attn.head_dim, limit.positions if limit.hard else None)
    blocks = []
    for number, layer in enumerate(base.layers):
        kind = "" if "" in windows else config.layer_types[number]
        blocks.append(
            Block(
                _norm(layer.input_layernorm),
                _attention(layer.self_attn, rope, windows.get(kind)),
                _norm(layer.post_attention_layernorm),
                _feed_forward(layer.mlp, config.hidden_act),
            )
        )
    return Decoder(base.embed_tokens.weight.detach(), blocks, _norm(base.norm), Matrix((model.lm_head,)))


def _attention(module: Any, rope: Rope, window: int | None) -> Attention:
    qkv, dim = Matrix((module.q_proj, module.k_proj, module.v_proj)), module.head_dim
    return Attention(
        heads=module.q_proj.out_features // dim,
        kv_heads=module.k_proj.out_features // dim,
        head_dim=dim,
        scale=float(module.scaling),
        qkv=qkv,
        out=Matrix((module.o_proj,)),
        rope=rope,
        window=window,
        q_norm=_norm(module.q_norm) if hasattr(module, "q_norm") else None,
        k_norm=_norm(module.k_norm) if hasattr(module, "k_norm") else None,
    )


def _feed_forward(module: Any, activation: str) -> FeedForward:
    if activation not in [known.value for known in Activation]:
        raise UnsupportedModelError(f"its activation is {activation!r}")
    return FeedForward(Matrix((module.gate_proj, module.up_proj)), Matrix((module.down_proj,)), Activation(activation))


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


READERS = dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), read)
