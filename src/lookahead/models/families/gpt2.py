"""GPT-2, GPT-BigCode (SantaCoder, StarCoder) and GPT-Neo: learned positions, LayerNorm, biases, no gate.

GPT-2 stores its matrices transposed and may scale the scores of a layer by its number. GPT-BigCode has one K/V head, or
the query, key and value of each head side by side. GPT-Neo does not scale scores; its local layers have a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, grouped_order, read_attention, read_norm, read_ungated
from lookahead.models.spec import Attention, Block, Decoder


def read_gpt2(base: Any, head: Any, config: Any) -> Decoder:
    return _read(base, head, config, lambda layer: _read_fused(layer.attn, transposed=True), transposed=True)


def read_gpt_bigcode(base: Any, head: Any, config: Any) -> Decoder:
    def attention(layer: Any) -> Attention:
        heads, kv_heads = config.num_attention_heads, 1 if config.multi_query else config.num_attention_heads
        order = None if config.multi_query else grouped_order(heads, heads)
        return _read_fused(layer.attn, kv_heads=kv_heads, head_order=order)

    return _read(base, head, config, attention)


def read_gpt_neo(base: Any, head: Any, config: Any) -> Decoder:
    def attention(layer: Any) -> Attention:
        module = layer.attn.attention
        window = config.window_size if module.attention_type == "local" else None
        return read_attention(module, None, window, scale=1.0, out="out_proj")

    return _read(base, head, config, attention)


def _read(
    base: Any, head: Any, config: Any, attention: Callable[[Any], Attention], *, transposed: bool = False
) -> Decoder:
    """A model with GPT-2's modules, whose layers have this attention."""
    blocks = [
        Block(
            read_norm(layer.ln_1),
            attention(layer),
            read_norm(layer.ln_2),
            read_ungated(layer.mlp.c_fc, layer.mlp.c_proj, config.activation_function, transposed=transposed),
        )
        for layer in base.h
    ]
    embedding, positions = base.wte.weight.detach(), base.wpe.weight.detach()
    return Decoder(embedding, blocks, read_norm(base.ln_f), Matrix((head,)), position_embedding=positions)


def _read_fused(module: Any, *, transposed: bool = False, **changes: Any) -> Attention:
    """Attention with one matrix for q, k and v."""
    fields = {
        "heads": module.num_heads,
        "kv_heads": module.num_heads,
        "head_dim": module.head_dim,
        "scale": float(module.scaling),
        "qkv": Matrix((module.c_attn,), transposed),
        "out": Matrix((module.c_proj,), transposed),
    }
    return Attention(**{**fields, **changes})


READERS = {
    "GPT2LMHeadModel": CausalLM(read_gpt2, base="transformer"),
    "GPTBigCodeForCausalLM": CausalLM(read_gpt_bigcode, base="transformer"),
    "GPTNeoForCausalLM": CausalLM(read_gpt_neo, base="transformer"),
}
