"""Bamba and Falcon-H1: Mamba-2, and a feed-forward in every layer.

In some of Bamba's layers there is attention instead. Falcon-H1 has it beside every Mamba-2, whose norm is optional, and
factors of nearly everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lookahead.models.feed_forward import FeedForward
from lookahead.models.matrix import Matrix
from lookahead.models.mixers import read_mamba2
from lookahead.models.parts import CausalLM, read_attention, read_feed_forward, read_norm, read_rope
from lookahead.models.spec import Block, Branch, Decoder, Mixer, Rope, SideBySide


def read_bamba(base: Any, head: Any, config: Any) -> Decoder:
    def mixer(layer: Any, rope: Rope) -> Mixer:
        return read_mamba2(layer.mamba) if hasattr(layer, "mamba") else read_attention(layer.self_attn, rope, None)

    def feed_forward(layer: Any) -> FeedForward:
        return read_feed_forward(layer.feed_forward, config.hidden_act)

    return _read(base, head, config, mixer, feed_forward)


def read_falcon_h1(base: Any, head: Any, config: Any) -> Decoder:
    def feed_forward(layer: Any) -> FeedForward:
        mlp = layer.feed_forward
        described = read_feed_forward(mlp, config.hidden_act)
        return replace(described, gate_scale=float(mlp.gate_multiplier), out_scale=float(mlp.down_multiplier))

    described = _read(base, head, config, _side_by_side, feed_forward)
    scales = float(base.embedding_multiplier), float(base.lm_head_multiplier)
    return replace(described, embedding_scale=scales[0], logit_scale=scales[1])


def _side_by_side(layer: Any, rope: Rope) -> Mixer:
    """The factor of keys is one of scores."""
    own, mamba = layer.self_attn, layer.mamba
    attention = read_attention(own, rope, None, scale=float(own.scaling * own.key_multiplier))
    norm = partial(read_norm, rounds_first=False)
    recurrent = read_mamba2(mamba, norm, column_scales=mamba.mup_vector.detach().flatten())
    return SideBySide(
        Branch(attention, float(layer.attention_in_multiplier), float(layer.attn_out_multiplier)),
        Branch(recurrent, float(mamba.ssm_in_multiplier), float(layer.ssm_out_multiplier)),
    )


def _read(
    base: Any,
    head: Any,
    config: Any,
    mixer: Callable[[Any, Rope], Mixer],
    feed_forward: Callable[[Any], FeedForward],
) -> Decoder:
    """A model whose layers' parts are read by these functions."""
    rope, blocks = read_rope(base.rotary_emb, config), []
    for layer in base.layers:
        norms = read_norm(layer.input_layernorm), read_norm(layer.pre_ff_layernorm)
        blocks.append(Block(norms[0], mixer(layer, rope), norms[1], feed_forward(layer)))
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.final_layernorm), Matrix((head,)))


READERS = {"BambaForCausalLM": CausalLM(read_bamba), "FalconH1ForCausalLM": CausalLM(read_falcon_h1)}
