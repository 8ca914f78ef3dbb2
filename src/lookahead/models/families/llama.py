"""Llama, Mistral, Qwen2 and Qwen3: norms before attention and feed-forward, rotary positions, a SiLU gate.

Mistral has a window on all layers or on none, Qwen2 and Qwen3 may have one on some. Qwen2 adds biases to q, k and v,
Qwen3 norms of q and k. The window is the one that the class's forward pass uses: configs have fields of other classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookahead.models.facts import rope_limit
from lookahead.models.parts import CausalLM, read_attention, read_feed_forward, read_norm
from lookahead.models.spec import Block, Decoder, Matrix, Rope


def read_llama(base: Any, head: Any, config: Any) -> Decoder:
    """Llama has no windows. If its config names one all the same, its text must stay below it: see `position_limit`."""
    return read_with_windows(base, head, config, [None] * len(base.layers))


def read_mistral(base: Any, head: Any, config: Any) -> Decoder:
    return read_with_windows(base, head, config, [config.sliding_window] * len(base.layers))


def read_qwen(base: Any, head: Any, config: Any) -> Decoder:
    return read_with_windows(base, head, config, [layer.self_attn.sliding_window for layer in base.layers])


def read_with_windows(base: Any, head: Any, config: Any, windows: Sequence[int | None]) -> Decoder:
    """A model with the modules of these families, whose layers have these windows."""
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
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))


READERS = {
    "LlamaForCausalLM": CausalLM(read_llama),
    "MistralForCausalLM": CausalLM(read_mistral),
    "Qwen2ForCausalLM": CausalLM(read_qwen),
    "Qwen3ForCausalLM": CausalLM(read_qwen),
}
