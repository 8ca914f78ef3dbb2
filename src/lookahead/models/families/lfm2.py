"""LFM2 and its mixture of experts: short convolutions, and attention in some layers.

The convolution reads the product of two thirds of its projection, and the last third is its gate. In the mixture the
first layers are dense; its router is one of sigmoids, with a bias that only chooses.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.experts import is_mixture, read_moe, read_router
from lookahead.models.feed_forward import FeedForward, MoE, Scoring
from lookahead.models.matrix import Matrix
from lookahead.models.mixers import read_convolution
from lookahead.models.parts import CausalLM, read_attention, read_norm, read_rope
from lookahead.models.recurrent import ShortConv
from lookahead.models.spec import Block, Decoder, Mixer, Rope

SUM_EPS = 1e-6
"""Is added to the sum that the router's weights are divided by."""


def read_lfm2(base: Any, head: Any, config: Any) -> Decoder:
    rotary = base.pos_emb if hasattr(base, "pos_emb") else base.rotary_emb
    rope, blocks = read_rope(rotary, config), []
    for layer in base.layers:
        norms = read_norm(layer.operator_norm), read_norm(layer.ffn_norm)
        blocks.append(Block(norms[0], _read_mixer(layer, rope), norms[1], _read_feed_forward(layer.feed_forward)))
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.embedding_norm), Matrix((head,)))


def _read_mixer(layer: Any, rope: Rope) -> Mixer:
    if hasattr(layer, "conv"):
        module = layer.conv
        return ShortConv(Matrix((module.in_proj,)), read_convolution(module.conv, None), Matrix((module.out_proj,)))
    module = layer.self_attn
    q_norm, k_norm = read_norm(module.q_layernorm), read_norm(module.k_layernorm)
    return read_attention(module, rope, None, out="out_proj", q_norm=q_norm, k_norm=k_norm)


def _read_feed_forward(module: Any) -> FeedForward | MoE:
    if not is_mixture(module):
        return FeedForward(Matrix((module.w1, module.w3)), Matrix((module.w2,)))
    bias = module.expert_bias.detach() if module.gate.use_expert_bias else None
    router = read_router(
        module.gate,
        scoring=Scoring.SIGMOID,
        normalised=module.gate.norm_topk_prob,
        sum_eps=SUM_EPS,
        choice_bias=bias,
        scale=float(module.gate.routed_scaling_factor),
    )
    return read_moe(module.experts, router, "silu")


READERS = {"Lfm2ForCausalLM": CausalLM(read_lfm2), "Lfm2MoeForCausalLM": CausalLM(read_lfm2)}
