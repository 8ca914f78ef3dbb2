"""AFMoE (Trinity): experts with a shared one, but in the first layers, and gates behind the attention.

Only layers with a window use positions. Norms before and after both halves of a block, and those of q and k, are in
fp32 to the end. The embedding may be scaled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lookahead.models.experts import read_dense_or, read_moe, read_router
from lookahead.models.feed_forward import MoE, Scoring
from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, layer_windows, read_attention, read_feed_forward, read_norm, read_rope
from lookahead.models.spec import Block, Decoder

_norm = partial(read_norm, rounds_first=False)


def read_afmoe(base: Any, head: Any, config: Any) -> Decoder:
    rope, blocks = read_rope(base.rotary_emb, config), []
    for layer, window in zip(base.layers, layer_windows(config), strict=True):
        module = layer.self_attn
        gate = Matrix((module.gate_proj,))
        blocks.append(
            Block(
                _norm(layer.input_layernorm),
                read_attention(module, rope if window else None, window, norm=_norm, output_gate=gate),
                _norm(layer.pre_mlp_layernorm),
                read_dense_or(layer.mlp, config.hidden_act, _read_experts),
                mixer_out_norm=_norm(layer.post_attention_layernorm),
                feed_forward_out_norm=_norm(layer.post_mlp_layernorm),
            )
        )
    scale = config.hidden_size**0.5 if config.mup_enabled else 1.0
    return Decoder(base.embed_tokens.weight.detach(), blocks, _norm(base.norm), Matrix((head,)), embedding_scale=scale)


def _read_experts(block: Any, activation: str) -> MoE:
    router = read_router(
        block.router.gate,
        top_k=block.router.top_k,
        scoring=Scoring.SIGMOID,
        normalised=True,
        choice_bias=block.expert_bias.detach(),
        scale=float(block.router.route_scale),
    )
    return read_moe(block.experts, router, activation, shared=read_feed_forward(block.shared_experts, activation))


READERS = {"AfmoeForCausalLM": CausalLM(read_afmoe)}
