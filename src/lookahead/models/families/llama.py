"""Llama, Mistral, Qwen2 and Qwen3: norms before attention and feed-forward, rotary positions, a SiLU gate.

Mistral has a window on all layers or on none, Qwen2 and Qwen3 may have one on some. Qwen2 adds biases to q, k and v,
Qwen3 norms of q and k. The window is the one that the class's forward pass uses: configs have fields of other classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookahead.models.facts import UnsupportedModelError, rope_limit
from lookahead.models.spec import Activation, Attention, Block, Decoder, FeedForward, Matrix, Norm, Rope


def read_llama(model: Any) -> Decoder:
    """Llama has no windows. If its config names one all the same, its text must stay below it: see `position_limit`."""
    return _read(model, [None] * len(model.model.layers))


def read_mistral(model: Any) -> Decoder:
    return _read(model, [model.config.sliding_window] * len(model.model.layers))


def read_qwen(model: Any) -> Decoder:
    return _read(model, [layer.self_attn.sliding_window for layer in model.model.layers])


def _read(model: Any, windows: Sequence[int | None]) -> Decoder:
    """A model of these families whose layers have these windows."""
    config, base = model.config, model.model
    rope = Rope(base.rotary_emb, base.layers[0].self_attn.head_dim, rope_limit(config))
    blocks = [
        Block(
            _norm(layer.input_layernorm),
            _attention(layer.self_attn, rope, window),
            _norm(layer.post_attention_layernorm),
            _feed_forward(layer.mlp, config.hidden_act),
        )
        for layer, window in zip(base.layers, windows, strict=True)
    ]
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


READERS = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen,
    "Qwen3ForCausalLM": read_qwen,
}
