"""HunYuan, dense: a Llama with norms of q and k after the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.models.families.llama import read_llama
from lookahead.models.parts import CausalLM, read_norm
from lookahead.models.spec import Decoder


def read_hunyuan(base: Any, head: Any, config: Any) -> Decoder:
    described = read_llama(base, head, config)
    blocks = []
    for layer, block in zip(base.layers, described.blocks, strict=True):
        attention = replace(
            block.attention,
            q_norm=read_norm(layer.self_attn.query_layernorm),
            k_norm=read_norm(layer.self_attn.key_layernorm),
            norms_after_rope=True,
        )
        blocks.append(replace(block, attention=attention))
    return replace(described, blocks=blocks)


READERS = {"HunYuanDenseV1ForCausalLM": CausalLM(read_hunyuan)}
