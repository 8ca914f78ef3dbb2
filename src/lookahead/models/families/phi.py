"""Phi 1, 1.5 and 2: both halves of a block read one LayerNorm, a part of each head is turned, and all matrices have
biases, the LM head too."""

from __future__ import annotations

from typing import Any

from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, read_attention, read_norm, read_rope, read_ungated
from lookahead.models.spec import Block, Decoder


def read_phi(base: Any, head: Any, config: Any) -> Decoder:
    rope, blocks = read_rope(base.rotary_emb, config), []
    for layer in base.layers:
        module, mlp, norm = layer.self_attn, layer.mlp, read_norm(layer.input_layernorm)
        norms: dict[str, Any] = {}
        if module.qk_layernorm:
            norms = {"q_norm": read_norm(module.q_layernorm), "k_norm": read_norm(module.k_layernorm)}
        attention = read_attention(module, rope, None, out="dense", **norms)
        feed_forward = read_ungated(mlp.fc1, mlp.fc2, config.hidden_act)
        blocks.append(Block(norm, attention, norm, feed_forward, parallel=True))
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.final_layernorm), Matrix((head,)))


READERS = {"PhiForCausalLM": CausalLM(read_phi)}
