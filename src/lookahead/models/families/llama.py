"""Llama, Mistral, Qwen2 and Qwen3: norms before attention and feed-forward, rotary positions, a SiLU gate.

Mistral has a window on all layers or on none, Qwen2 and Qwen3 may have one on some. Qwen2 adds biases to q, k and v,
Qwen3 norms of q and k. The window is the one that the class's forward pass uses: configs have fields of other classes.
Seed-OSS is a Llama with biases of q, k and v. Ministral and CWM are Llamas with windows on some layers, and Ministral 3
is a Mistral whose queries grow with the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookahead.models.matrix import Matrix
from lookahead.models.parts import (
    CausalLM,
    FeedForwardReader,
    NormReader,
    layer_windows,
    read_attention,
    read_feed_forward,
    read_norm,
    read_rope,
)
from lookahead.models.spec import Block, Decoder, Rope


def read_llama(base: Any, head: Any, config: Any, **parts: Any) -> Decoder:
    """Llama has no windows. If its config names one all the same, its text must stay below it: see `position_limit`.

    `parts` are those of `read_with_windows` in which a class differs.
    """
    return read_with_windows(base, head, config, [None] * len(base.layers), **parts)


def read_mistral(base: Any, head: Any, config: Any) -> Decoder:
    return read_with_windows(base, head, config, [config.sliding_window] * len(base.layers))


def read_qwen(base: Any, head: Any, config: Any) -> Decoder:
    return read_with_windows(base, head, config, [layer.self_attn.sliding_window for layer in base.layers])


def read_ministral(base: Any, head: Any, config: Any) -> Decoder:
    return read_with_windows(base, head, config, layer_windows(config))


def read_ministral3(base: Any, head: Any, config: Any) -> Decoder:
    """The queries are scaled by the logarithm of how often the original context fits before their position."""
    beta = config.rope_parameters["llama_4_scaling_beta"]
    context = config.rope_parameters["original_max_position_embeddings"]

    def scale(positions: torch.Tensor) -> torch.Tensor:
        return 1 + beta * torch.log(1 + torch.floor(positions / context))

    return read_with_windows(base, head, config, [config.sliding_window] * len(base.layers), query_scale=scale)


def read_with_windows(
    base: Any,
    head: Any,
    config: Any,
    windows: Sequence[int | None],
    *,
    norm: NormReader = read_norm,
    rope: Rope | None = None,
    feed_forward: FeedForwardReader | None = None,
    **attention: Any,
) -> Decoder:
    """A model with the modules of these families, whose layers have these windows.

    `norm` reads the class's norms, `rope` is its rotation if it is not Llama's, `feed_forward` reads that of a layer,
    and `attention` has more fields of it.
    """
    rope = rope or read_rope(base.rotary_emb, config)
    feed_forward = feed_forward or (lambda layer: read_feed_forward(layer.mlp, config.hidden_act))
    blocks = [
        Block(
            norm(layer.input_layernorm),
            read_attention(layer.self_attn, rope, window, norm=norm, **attention),
            norm(layer.post_attention_layernorm),
            feed_forward(layer),
        )
        for layer, window in zip(base.layers, windows, strict=True)
    ]
    return Decoder(base.embed_tokens.weight.detach(), blocks, norm(base.norm), Matrix((head,)))


READERS = {
    "LlamaForCausalLM": CausalLM(read_llama),
    "MistralForCausalLM": CausalLM(read_mistral),
    "Qwen2ForCausalLM": CausalLM(read_qwen),
    "Qwen3ForCausalLM": CausalLM(read_qwen),
    "SeedOssForCausalLM": CausalLM(read_llama),
    "MinistralForCausalLM": CausalLM(read_ministral),
    "Ministral3ForCausalLM": CausalLM(read_ministral3),
    "CwmForCausalLM": CausalLM(read_ministral),
}
