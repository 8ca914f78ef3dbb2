"""Cohere (Command R, Aya) and Cohere 2 (Command R7B, Command A): both halves of a block read one norm's result.

The norms are LayerNorms without biases, of q and k one per head. The rotation turns neighbouring columns. Logits are
scaled. In Cohere 2 only the layers with a window use positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, layer_windows, read_attention, read_feed_forward, read_norm, read_rope
from lookahead.models.spec import Block, Decoder, Rope

_norm = partial(read_norm, centered=True, rounds_first=False)


def read_cohere(base: Any, head: Any, config: Any) -> Decoder:
    rope = _read_rope(base.rotary_emb, config)
    return _read(base, head, config, [(rope, None)] * len(base.layers))


def read_cohere2(base: Any, head: Any, config: Any) -> Decoder:
    rope = _read_rope(base.rotary_emb, config)
    return _read(base, head, config, [(rope if window else None, window) for window in layer_windows(config)])


def _read_rope(module: Any, config: Any) -> Rope:
    """The module gives the cosine and sine of a pair twice, side by side."""

    def once(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = module(x, positions)
        return cosine[..., ::2], sine[..., ::2]

    rope = read_rope(module, config)
    return Rope(once, rope.dim, rope.limit, interleaved=True)


def _read(base: Any, head: Any, config: Any, layers: Sequence[tuple[Rope | None, int | None]]) -> Decoder:
    """A model whose layers have these rotations and windows."""
    blocks = []
    for layer, (rope, window) in zip(base.layers, layers, strict=True):
        norm = _norm(layer.input_layernorm)
        attention = read_attention(layer.self_attn, rope, window, norm=_norm)
        blocks.append(Block(norm, attention, norm, read_feed_forward(layer.mlp, config.hidden_act), parallel=True))
    embedding = base.embed_tokens.weight.detach()
    return Decoder(embedding, blocks, _norm(base.norm), Matrix((head,)), logit_scale=config.logit_scale)


READERS = {"CohereForCausalLM": CausalLM(read_cohere), "Cohere2ForCausalLM": CausalLM(read_cohere2)}
