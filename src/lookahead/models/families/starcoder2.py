"""StarCoder2, Nemotron and StableLM: Llamas with LayerNorm.

StarCoder2 and Nemotron have no gate. Nemotron and StableLM turn a part of each head. All layers of StarCoder2 have a
window, or none.
"""

from __future__ import annotations

from typing import Any

import torch

from lookahead.models.matrix import Matrix
from lookahead.models.norm import Norm
from lookahead.models.parts import CausalLM, read_attention, read_feed_forward, read_norm, read_rope, read_ungated
from lookahead.models.spec import Block, Decoder


def read_starcoder2(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    blocks = [
        Block(
            read_norm(layer.input_layernorm),
            read_attention(layer.self_attn, rope, config.sliding_window),
            read_norm(layer.post_attention_layernorm),
            read_ungated(layer.mlp.c_fc, layer.mlp.c_proj, config.hidden_act),
        )
        for layer in base.layers
    ]
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))


def read_nemotron(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    blocks = [
        Block(
            _norm_plus_one(layer.input_layernorm),
            read_attention(layer.self_attn, rope, None),
            _norm_plus_one(layer.post_attention_layernorm),
            read_ungated(layer.mlp.up_proj, layer.mlp.down_proj, config.hidden_act),
        )
        for layer in base.layers
    ]
    return Decoder(base.embed_tokens.weight.detach(), blocks, _norm_plus_one(base.norm), Matrix((head,)))


def _norm_plus_one(module: Any) -> Norm:
    """Nemotron adds 1 to the weight in the model's dtype, so the sum is rounded: `Norm.offset` would not be."""
    return Norm(module.weight.detach() + 1, module.eps, module.bias.detach(), centered=True, rounds_first=False)


def read_stablelm(base: Any, head: Any, config: Any) -> Decoder:
    """StableLM 2 12B has a norm for each head, and both halves of a block read one norm."""
    rope, blocks = read_rope(base.rotary_emb, config), []
    for layer in base.layers:
        module, norm = layer.self_attn, read_norm(layer.input_layernorm)
        norms: dict[str, Any] = {}
        if module.qk_layernorm:
            norms = {"q_norm": _norm_of_heads(module.q_layernorm), "k_norm": _norm_of_heads(module.k_layernorm)}
        parallel = layer.use_parallel_residual
        blocks.append(
            Block(
                norm,
                read_attention(module, rope, None, **norms),
                norm if parallel else read_norm(layer.post_attention_layernorm),
                read_feed_forward(layer.mlp, config.hidden_act),
                parallel=parallel,
            )
        )
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))


def _norm_of_heads(module: Any) -> Norm:
    """LayerNorms without biases, one module for each head."""
    weight = torch.stack([norm.weight.detach() for norm in module.norms])
    return Norm(weight, module.norms[0].eps, centered=True, rounds_first=False)


READERS = {
    "Starcoder2ForCausalLM": CausalLM(read_starcoder2),
    "NemotronForCausalLM": CausalLM(read_nemotron),
    "StableLmForCausalLM": CausalLM(read_stablelm),
}
