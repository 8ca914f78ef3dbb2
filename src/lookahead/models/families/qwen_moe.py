"""Qwen2-MoE, Qwen3-MoE and Mellum: Qwens with experts in all layers or in some.

Qwen2-MoE also has a shared expert behind a gate. All layers of Qwen3-MoE have a window, or none; in Mellum each kind
of layer has its own rotation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.models.experts import read_dense_or, read_softmax_moe
from lookahead.models.families.llama import read_with_windows
from lookahead.models.feed_forward import FeedForward, MoE
from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, FeedForwardReader, layer_windows, read_feed_forward, read_ropes_by_type
from lookahead.models.spec import Decoder


def read_qwen2_moe(base: Any, head: Any, config: Any) -> Decoder:
    def feed_forward(layer: Any) -> FeedForward | MoE:
        return read_dense_or(layer.mlp, config.hidden_act, read_shared_moe)

    return read_with_windows(base, head, config, layer_windows(config), feed_forward=feed_forward)


def read_shared_moe(block: Any, activation: str) -> MoE:
    """Experts, and a shared one behind a gate."""
    shared = read_feed_forward(block.shared_expert, activation)
    return read_softmax_moe(block, activation, shared=shared, shared_gate=Matrix((block.shared_expert_gate,)))


def qwen3_feed_forward(config: Any) -> FeedForwardReader:
    """Reads a layer's experts, or in some layers its dense feed-forward."""
    return lambda layer: read_dense_or(layer.mlp, config.hidden_act, read_softmax_moe)


def read_qwen3_moe(base: Any, head: Any, config: Any) -> Decoder:
    windows = [config.sliding_window] * len(base.layers)
    return read_with_windows(base, head, config, windows, feed_forward=qwen3_feed_forward(config))


def read_mellum(base: Any, head: Any, config: Any) -> Decoder:
    ropes = read_ropes_by_type(base.rotary_emb, config)
    described = read_with_windows(
        base,
        head,
        config,
        layer_windows(config),
        rope=next(iter(ropes.values())),
        feed_forward=qwen3_feed_forward(config),
    )
    blocks = [
        block.with_attention(rope=ropes[kind]) for block, kind in zip(described.blocks, config.layer_types, strict=True)
    ]
    return replace(described, blocks=blocks)


READERS = {
    "Qwen2MoeForCausalLM": CausalLM(read_qwen2_moe),
    "Qwen3MoeForCausalLM": CausalLM(read_qwen3_moe),
    "MellumForCausalLM": CausalLM(read_mellum),
}
