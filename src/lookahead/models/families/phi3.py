"""Phi-3: a Llama whose q, k, v and whose gate, up are one matrix each. All of its layers have a window, or none.

Phi-4-mini is of the same class. It turns only a part of each head.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.feed_forward import Activation, FeedForward
from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, read_norm, read_rope
from lookahead.models.spec import Attention, Block, Decoder


def read_phi3(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    blocks = []
    for layer in base.layers:
        module, mlp = layer.self_attn, layer.mlp
        attention = Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=module.head_dim,
            scale=module.scaling,
            qkv=Matrix((module.qkv_proj,)),
            out=Matrix((module.o_proj,)),
            rope=rope,
            window=config.sliding_window,
        )
        feed_forward = FeedForward(
            Matrix((mlp.gate_up_proj,)), Matrix((mlp.down_proj,)), Activation.named(config.hidden_act)
        )
        blocks.append(
            Block(read_norm(layer.input_layernorm), attention, read_norm(layer.post_attention_layernorm), feed_forward)
        )
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))


READERS = {"Phi3ForCausalLM": CausalLM(read_phi3)}
