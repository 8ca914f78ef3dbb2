"""HunYuan: a Llama with norms of q and k after the rotation; and one with experts, and a shared one, in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.models.experts import read_moe, read_router
from lookahead.models.families.llama import read_llama
from lookahead.models.feed_forward import MoE
from lookahead.models.parts import CausalLM, read_feed_forward, read_norm
from lookahead.models.spec import Decoder


def read_hunyuan(base: Any, head: Any, config: Any, **parts: Any) -> Decoder:
    described = read_llama(base, head, config, **parts)
    blocks = []
    for layer, block in zip(base.layers, described.blocks, strict=True):
        norms = read_norm(layer.self_attn.query_layernorm), read_norm(layer.self_attn.key_layernorm)
        blocks.append(block.with_attention(q_norm=norms[0], k_norm=norms[1], norms_after_rope=True))
    return replace(described, blocks=blocks)


def read_hunyuan_moe(base: Any, head: Any, config: Any) -> Decoder:
    """Its router is a linear module inside of its gate, in fp32 whatever the model's dtype is."""

    def feed_forward(layer: Any) -> MoE:
        block = layer.mlp
        router = read_router(block.gate.wg, top_k=block.gate.top_k, normalised=True)
        shared = read_feed_forward(block.shared_mlp, config.hidden_act)
        return read_moe(block.experts, router, config.hidden_act, shared=shared)

    return read_hunyuan(base, head, config, feed_forward=feed_forward)


READERS = {
    "HunYuanDenseV1ForCausalLM": CausalLM(read_hunyuan),
    "HunYuanMoEV1ForCausalLM": CausalLM(read_hunyuan_moe),
}
