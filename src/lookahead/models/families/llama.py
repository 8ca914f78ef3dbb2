"""Llama, Mistral, Qwen2 and Qwen3: norms before attention and feed-forward, rotary positions, a SiLU gate.

Mistral has a window on all layers or on none, Qwen2 and Qwen3 may have one on some. Qwen2 adds biases to q, k and v,
Qwen3 norms of q and k. The window is the one that the class's forward pass uses: configs have fields of other classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookahead.models.facts import rope_limit
from lookahead.models.parts import read_attention, read_feed_forward, read_norm
from lookahead.models.spec import Block, Decoder, Matrix, Rope


def read_llama(model: Any) -> Decoder:
    """Llama has no windows. If its config names one all the same, its text must stay below it: see `position_limit`."""
    return _read(model, [None] * len(model.model.layers))


def read_mistral(model: Any) -> Decoder:
    return _read(model, [model.config.sliding_window] * len(model.model.layers))


def read_qwen(model: Any) -> Decoder:
    return _read(model, [layer.self_attn.sliding_window for layer in model.model.layers])


def _read(model: Any, windows: Sequence[int | None]) -> Decoder:
    """A model of these families whose layers have these windows."""
    config, base = model.config, model.model
    rope = Rope(base.rotary_emb, base.layers[0].self_attn.head_dim, rope_limit(config))
    blocks = [
        Block(
            read_norm(layer.input_layernorm),
            read_attention(layer.self_attn, rope, window),
            read_norm(layer.post_attention_layernorm),
            read_feed_forward(layer.mlp, config.hidden_act),
        )
        for layer, window in zip(base.layers, windows, strict=True)
    ]
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((model.lm_head,)))


READERS = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen,
    "Qwen3ForCausalLM": read_qwen,
}
