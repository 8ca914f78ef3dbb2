"""GLM-4-MoE, dots.llm1, Solar Open, K-EXAONE and HunYuan 3: the first layers are dense, the others have DeepSeek's
router and a shared expert.

Theirs is not DeepSeek's attention: that of GLM-4-MoE turns a part of each head, and may norm q and k; in dots.llm1 and
K-EXAONE some layers have a window, and in K-EXAONE only these use positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.models.experts import read_dense_or, read_grouped_moe, read_moe, read_router
from lookahead.models.families.llama import read_llama, read_with_windows
from lookahead.models.feed_forward import FeedForward, MoE, Scoring
from lookahead.models.parts import CausalLM, FeedForwardReader, layer_windows, read_feed_forward
from lookahead.models.spec import Decoder


def glm_feed_forward(config: Any) -> FeedForwardReader:
    """Reads a layer's experts, or in the first layers its dense feed-forward."""
    return lambda layer: read_dense_or(layer.mlp, config.hidden_act, read_grouped_moe)


def read_glm4_moe(base: Any, head: Any, config: Any) -> Decoder:
    return read_llama(base, head, config, feed_forward=glm_feed_forward(config))


def read_dots1(base: Any, head: Any, config: Any) -> Decoder:
    return read_with_windows(base, head, config, layer_windows(config), feed_forward=glm_feed_forward(config))


def read_exaone_moe(base: Any, head: Any, config: Any) -> Decoder:
    """In a model with windows only the layers that have one use positions."""
    described = read_dots1(base, head, config)
    if config.sliding_window is None:
        return described
    blocks = [block if block.plain()[0].window else block.with_attention(rope=None) for block in described.blocks]
    return replace(described, blocks=blocks)


def read_hunyuan3(base: Any, head: Any, config: Any) -> Decoder:
    def read(block: Any, activation: str) -> MoE:
        router = read_router(
            block.gate,
            scoring=Scoring.SIGMOID,
            normalised=True,
            choice_bias=block.e_score_correction_bias.detach(),
            scale=float(block.gate.router_scaling_factor),
        )
        return read_moe(block.experts, router, activation, shared=read_feed_forward(block.shared_experts, activation))

    def feed_forward(layer: Any) -> FeedForward | MoE:
        return read_dense_or(layer.mlp, config.hidden_act, read)

    return read_llama(base, head, config, feed_forward=feed_forward)


READERS = {
    "Glm4MoeForCausalLM": CausalLM(read_glm4_moe),
    "Dots1ForCausalLM": CausalLM(read_dots1),
    "SolarOpenForCausalLM": CausalLM(read_glm4_moe),
    "ExaoneMoeForCausalLM": CausalLM(read_exaone_moe),
    "HYV3ForCausalLM": CausalLM(read_hunyuan3),
}
