"""Phi-3: a Llama whose q, k, v and whose gate, up are one matrix each. All of its layers have a window, or none.

Phi-4-mini is of the same class, and is refused: it turns only a part of each head.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.facts import UnsupportedModelError, rope_limit
from lookahead.models.spec import Activation, Attention, Block, Decoder, FeedForward, Matrix, Norm, Rope


def read(model: Any) -> Decoder:
    config, base = model.config, model.model
    dim = base.layers[0].self_attn.head_dim
    if 2 * len(base.rotary_emb.inv_freq) != dim:
        raise UnsupportedModelError("only a part of each head is rotated")
    if config.hidden_act not in [known.value for known in Activation]:
        raise UnsupportedModelError(f"its activation is {config.hidden_act!r}")
    rope = Rope(base.rotary_emb, dim, rope_limit(config))
    blocks = []
    for layer in base.layers:
        module, mlp = layer.self_attn, layer.mlp
        attention = Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=dim,
            scale=module.scaling,
            qkv=Matrix((module.qkv_proj,)),
            out=Matrix((module.o_proj,)),
            rope=rope,
            window=config.sliding_window,
        )
        feed_forward = FeedForward(Matrix((mlp.gate_up_proj,)), Matrix((mlp.down_proj,)), Activation(config.hidden_act))
        blocks.append(
            Block(_norm(layer.input_layernorm), attention, _norm(layer.post_attention_layernorm), feed_forward)
        )
    return Decoder(base.embed_tokens.weight.detach(), blocks, _norm(base.norm), Matrix((model.lm_head,)))


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


READERS = {"Phi3ForCausalLM": read}
