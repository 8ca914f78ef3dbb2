"""Falcon 7B, 11B, 40B and 180B: LayerNorm, one matrix for q, k and v, a feed-forward without a gate.

7B has one K/V head, and both halves of a block read one norm. The others (`new_decoder_architecture`) have groups of
heads, and mostly a norm for each half. Falcon-RW has ALiBi in place of rotary positions and is refused. Falcon 3 is a
Llama.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, grouped_order, read_norm, read_rope, read_ungated
from lookahead.models.spec import Attention, Block, Decoder


def read_falcon(base: Any, head: Any, config: Any) -> Decoder:
    if config.alibi:
        raise UnsupportedModelError("its positions are a bias of the scores (ALiBi)")
    rope, blocks = read_rope(base.rotary_emb, config), []
    for layer in base.h:
        module, mlp = layer.self_attention, layer.mlp
        one_kv_head = config.multi_query and not config.new_decoder_architecture
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else config.num_attention_heads
        attention = Attention(
            heads=module.num_heads,
            kv_heads=1 if one_kv_head else kv_heads,
            head_dim=module.head_dim,
            scale=float(module.inv_norm_factor),
            qkv=Matrix((module.query_key_value,)),
            out=Matrix((module.dense,)),
            rope=rope,
            head_order=None if one_kv_head else grouped_order(module.num_heads, kv_heads),
        )
        two_norms = hasattr(layer, "ln_attn")
        parallel = two_norms or config.parallel_attn
        norm = read_norm(layer.ln_attn if two_norms else layer.input_layernorm)
        other = layer.ln_mlp if two_norms else None if parallel else layer.post_attention_layernorm
        feed_forward = read_ungated(mlp.dense_h_to_4h, mlp.dense_4h_to_h, config.activation)
        blocks.append(
            Block(norm, attention, norm if other is None else read_norm(other), feed_forward, parallel=parallel)
        )
    return Decoder(base.word_embeddings.weight.detach(), blocks, read_norm(base.ln_f), Matrix((head,)))


READERS = {"FalconForCausalLM": CausalLM(read_falcon, base="transformer")}
