"""Gemma 1, 2, 3 and VaultGemma: norms that multiply by 1 + weight in fp32, embeddings times sqrt(hidden), a GELU gate.

From Gemma 2 on some layers have windows, what a block's halves add is normed (not in VaultGemma), and logits may have
a softcap. Scores have one in Gemma 2 and VaultGemma. Gemma 3 has norms of q and k instead, and a theta per layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lookahead.models.families.llama import read_with_windows
from lookahead.models.matrix import Matrix
from lookahead.models.parts import (
    CausalLM,
    layer_windows,
    read_attention,
    read_feed_forward,
    read_norm,
    read_rope,
    read_ropes_by_type,
    score_softcap,
)
from lookahead.models.spec import Block, Decoder, Rope

gemma_norm = partial(read_norm, offset=1.0, rounds_first=False)


def read_gemma(base: Any, head: Any, config: Any) -> Decoder:
    described = read_with_windows(base, head, config, [None] * len(base.layers), norm=gemma_norm)
    return replace(described, embedding_scale=embedding_scale(base.embed_tokens))


def read_gemma2(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    return _read(base, head, config, dict.fromkeys(config.layer_types, rope), softcap=score_softcap(config))


def read_gemma3(base: Any, head: Any, config: Any) -> Decoder:
    """Its config may name a softcap of scores, which its attention does not use."""
    return _read(base, head, config, read_ropes_by_type(base.rotary_emb, config))


def embedding_scale(module: Any) -> float:
    """What the embedding is multiplied by: sqrt(hidden), rounded to the dtype of its weight."""
    return float(torch.tensor(module.scalar_embed_scale).to(module.weight.dtype))


def _read(base: Any, head: Any, config: Any, ropes: Mapping[str, Rope], softcap: float | None = None) -> Decoder:
    blocks = []
    for layer, kind, window in zip(base.layers, config.layer_types, layer_windows(config), strict=True):
        block = Block(
            gemma_norm(layer.input_layernorm),
            read_attention(layer.self_attn, ropes[kind], window, norm=gemma_norm, softcap=softcap),
            gemma_norm(layer.pre_feedforward_layernorm),
            read_feed_forward(layer.mlp, config.hidden_activation),
        )
        if hasattr(layer, "post_feedforward_layernorm"):
            block = replace(
                block,
                mixer_out_norm=gemma_norm(layer.post_attention_layernorm),
                feed_forward_out_norm=gemma_norm(layer.post_feedforward_layernorm),
            )
        blocks.append(block)
    return Decoder(
        base.embed_tokens.weight.detach(),
        blocks,
        gemma_norm(base.norm),
        Matrix((head,)),
        embedding_scale=embedding_scale(base.embed_tokens),
        logit_softcap=config.final_logit_softcapping,
    )


READERS = {
    "GemmaForCausalLM": CausalLM(read_gemma),
    "Gemma2ForCausalLM": CausalLM(read_gemma2),
    "Gemma3ForCausalLM": CausalLM(read_gemma3),
    "VaultGemmaForCausalLM": CausalLM(read_gemma2),
}
