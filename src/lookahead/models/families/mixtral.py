"""Mixtral, Phi-3.5-MoE and MiniMax-M2: Llamas with experts in every layer.

Mixtral is a Mistral whose router takes a softmax. Phi-3.5-MoE has LayerNorms, and the router that is called sparse
mixer. MiniMax-M2's router takes sigmoids, and has a bias that only chooses; q and k are normed as whole vectors.
"""

from __future__ import annotations

from typing import Any

from lookahead.models.experts import read_moe, read_router, read_softmax_moe
from lookahead.models.families.llama import read_llama, read_with_windows
from lookahead.models.feed_forward import MoE, Scoring
from lookahead.models.parts import CausalLM
from lookahead.models.spec import Decoder


def read_mixtral(base: Any, head: Any, config: Any) -> Decoder:
    windows = [config.sliding_window] * len(base.layers)
    return read_with_windows(
        base, head, config, windows, feed_forward=lambda layer: read_softmax_moe(layer.mlp, config.hidden_act)
    )


def read_phimoe(base: Any, head: Any, config: Any) -> Decoder:
    """Its class always chooses two experts, whatever the config says."""

    def feed_forward(layer: Any) -> MoE:
        block = layer.mlp
        jitter = block.router.router_jitter_noise
        router = read_router(block.router, top_k=2, scoring=Scoring.SPARSE_MIXER, jitter=jitter)
        return read_moe(block.experts, router, config.hidden_act)

    windows = [config.sliding_window] * len(base.layers)
    return read_with_windows(base, head, config, windows, feed_forward=feed_forward)


def read_minimax_m2(base: Any, head: Any, config: Any) -> Decoder:
    def feed_forward(layer: Any) -> MoE:
        block = layer.mlp
        bias = block.e_score_correction_bias.detach()
        router = read_router(block.gate, scoring=Scoring.SIGMOID, normalised=True, choice_bias=bias)
        return read_moe(block.experts, router, config.hidden_act)

    return read_llama(base, head, config, feed_forward=feed_forward, whole_norms=True)


READERS = {
    "MixtralForCausalLM": CausalLM(read_mixtral),
    "PhimoeForCausalLM": CausalLM(read_phimoe),
    "MiniMaxM2ForCausalLM": CausalLM(read_minimax_m2),
}
