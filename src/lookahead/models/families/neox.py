"""GPT-NeoX (Pythia), GPT-NeoX-Japanese and Persimmon: LayerNorm, a part of each head turned, no gate.

One matrix has the query, key and value of each head side by side. Both halves of GPT-NeoX's blocks read the block's
input, by a norm each, if `use_parallel_residual`. Persimmon has norms of q and k.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, grouped_order, read_norm, read_rope, read_ungated, with_bias
from lookahead.models.spec import Attention, Block, Decoder, Rope


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


def read_neox_japanese(base: Any, head: Any, config: Any) -> Decoder:
    """Its last output projection alone has a bias, which is a parameter of its own."""
    rope = read_rope(base.rotary_emb, config)
    blocks = []
    for layer in base.layers:
        module, out = layer.attention, layer.attention.dense
        if module.dense_bias is not None:
            out = with_bias(out, module.dense_bias)
        blocks.append(
            Block(
                read_norm(layer.input_layernorm),
                _read_attention(module, module.head_size, rope, out=Matrix((out,))),
                read_norm(layer.post_attention_layernorm),
                read_ungated(layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h, config.hidden_act),
            )
        )
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
    fields = {
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "qkv": Matrix((module.query_key_value,)),
        "out": Matrix((module.dense,)),
        "rope": rope,
        "head_order": grouped_order(heads, heads),
    }
    return Attention(**{**fields, **changes})


READERS = {
    "GPTNeoXForCausalLM": CausalLM(read_neox, base="gpt_neox"),
    "GPTNeoXJapaneseForCausalLM": CausalLM(read_neox_japanese, base="gpt_neox_japanese", head="embed_out"),
    "PersimmonForCausalLM": CausalLM(read_persimmon),
}
