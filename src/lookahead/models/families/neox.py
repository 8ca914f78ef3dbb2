"""GPT-NeoX (Pythia) and Persimmon: LayerNorm, one matrix with the query, key and value of each head side by side.

A part of each head is turned. Both halves of GPT-NeoX's blocks read the block's input, by a norm each, if
`use_parallel_residual`. Persimmon has norms of q and k.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.parts import CausalLM, grouped_order, read_norm, read_rope, read_ungated
from lookahead.models.spec import Attention, Block, Decoder, Matrix, Rope


def read_neox(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    blocks = [
        Block(
            read_norm(layer.input_layernorm),
            _read_attention(layer.attention, layer.attention.head_size, rope),
            read_norm(layer.post_attention_layernorm),
            read_ungated(layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h, config.hidden_act),
            parallel=layer.use_parallel_residual,
        )
        for layer in base.layers
    ]
    return Decoder(base.embed_in.weight.detach(), blocks, read_norm(base.final_layer_norm), Matrix((head,)))


def read_persimmon(base: Any, head: Any, config: Any) -> Decoder:
    rope, blocks = read_rope(base.rotary_emb, config), []
    for layer in base.layers:
        module = layer.self_attn
        norms: dict[str, Any] = {}
        if module.qk_layernorm:
            norms = {"q_norm": read_norm(module.q_layernorm), "k_norm": read_norm(module.k_layernorm)}
        blocks.append(
            Block(
                read_norm(layer.input_layernorm),
                _read_attention(module, module.head_dim, rope, **norms),
                read_norm(layer.post_attention_layernorm),
                read_ungated(layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h, config.hidden_act),
            )
        )
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.final_layernorm), Matrix((head,)))


def _read_attention(module: Any, head_dim: int, rope: Rope, **changes: Any) -> Attention:
    heads = module.dense.in_features // head_dim
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=float(module.scaling),
        qkv=Matrix((module.query_key_value,)),
        out=Matrix((module.dense,)),
        rope=rope,
        head_order=grouped_order(heads, heads),
        **changes,
    )


READERS = {
    "GPTNeoXForCausalLM": CausalLM(read_neox, base="gpt_neox"),
    "PersimmonForCausalLM": CausalLM(read_persimmon),
}
