"""Phi-3: a Llama whose q, k, v and whose gate, up are one matrix each. All of its layers have a window, or none.

Phi-4-mini is of the same class, and is refused: it turns only a part of each head.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.facts import UnsupportedModelError, rope_limit
from lookahead.models.parts import CausalLM, read_norm
from lookahead.models.spec import Activation, Attention, Block, Decoder, FeedForward, Matrix, Rope


def read_phi3(base: Any, head: Any, config: Any) -> Decoder:
    dim = base.layers[0].self_attn.head_dim
    if 2 * len(base.rotary_emb.inv_freq) != dim:
        raise UnsupportedModelError("only a part of each head is rotated")
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
        feed_forward = FeedForward(
            Matrix((mlp.gate_up_proj,)), Matrix((mlp.down_proj,)), Activation.named(config.hidden_act)
        )
        blocks.append(
            Block(read_norm(layer.input_layernorm), attention, read_norm(layer.post_attention_layernorm), feed_forward)
        )
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))


READERS = {"Phi3ForCausalLM": CausalLM(read_phi3)}
