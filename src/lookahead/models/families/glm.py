"""GLM, GLM-4, Helium and ERNIE 4.5: Llamas whose rotation turns neighbouring columns, in GLM a part of each head.

GLM-4 also norms what a block's halves add. Helium's norms are in fp32 to the end. Some layers of ERNIE 4.5 may have
experts, whose router has a bias that only chooses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lookahead.models.experts import read_dense_or, read_moe, read_router
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.families.llama import read_llama
from lookahead.models.feed_forward import FeedForward, MoE
from lookahead.models.parts import CausalLM, read_feed_forward, read_norm, read_rope
from lookahead.models.spec import Decoder


def read_glm(base: Any, head: Any, config: Any, **parts: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config, interleaved=True)
    return read_llama(base, head, config, rope=rope, **parts)


def read_glm4(base: Any, head: Any, config: Any) -> Decoder:
    described = read_glm(base, head, config)
    blocks = [
        replace(
            block,
            mixer_out_norm=read_norm(layer.post_self_attn_layernorm),
            feed_forward_out_norm=read_norm(layer.post_mlp_layernorm),
        )
        for layer, block in zip(base.layers, described.blocks, strict=True)
    ]
    return replace(described, blocks=blocks)


def read_helium(base: Any, head: Any, config: Any) -> Decoder:
    return read_glm(base, head, config, norm=partial(read_norm, rounds_first=False))


def read_ernie_moe(base: Any, head: Any, config: Any) -> Decoder:
    if config.moe_norm_min > SMALLEST_SUM:
        raise UnsupportedModelError(f"it divides its router's weights by {config.moe_norm_min} or more")

    def read(block: Any, activation: str) -> MoE:
        bias = block.gate.moe_statics.e_score_correction_bias.detach().flatten()
        router = read_router(block.gate, normalised=True, choice_bias=bias)
        shared = None if block.shared_experts is None else read_feed_forward(block.shared_experts, activation)
        return read_moe(block.experts, router, activation, shared=shared)

    def feed_forward(layer: Any) -> FeedForward | MoE:
        return read_dense_or(layer.mlp, config.hidden_act, read)

    return read_glm(base, head, config, feed_forward=feed_forward)


SMALLEST_SUM = 1e-9
"""Experts whose weights have a smaller sum are never chosen: they are the best of all but for a small bias."""


READERS = {
    "GlmForCausalLM": CausalLM(read_glm),
    "Glm4ForCausalLM": CausalLM(read_glm4),
    "HeliumForCausalLM": CausalLM(read_helium),
    "Ernie4_5ForCausalLM": CausalLM(read_glm),
    "Ernie4_5_MoeForCausalLM": CausalLM(read_ernie_moe),
}
