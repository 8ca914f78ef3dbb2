"""gpt-oss: sinks, windows on every other layer, and experts with biases, whose gates are clamped.

The experts' matrices are stored as [in, out], unless they are quantised, and alternate columns of gate and up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lookahead.models.experts import read_router
from lookahead.models.families.llama import read_with_windows
from lookahead.models.feed_forward import Activation, MoE, Scoring
from lookahead.models.parts import CausalLM, layer_windows, read_norm
from lookahead.models.quantised_experts import expert_matrices
from lookahead.models.spec import Decoder


def read_gpt_oss(base: Any, head: Any, config: Any) -> Decoder:
    described = read_with_windows(
        base,
        head,
        config,
        layer_windows(config),
        norm=partial(read_norm, rounds_first=False),
        feed_forward=lambda layer: _read_experts(layer.mlp),
    )
    blocks = [
        block.with_attention(sinks=layer.self_attn.sinks.detach())
        for layer, block in zip(base.layers, described.blocks, strict=True)
    ]
    return replace(described, blocks=blocks)


def _read_experts(block: Any) -> MoE:
    """The activation's constants are those of the module, and no part of an older config."""
    constants = float(block.experts.limit), float(block.experts.alpha)
    gate_up, down = expert_matrices(block.experts)
    router = read_router(block.router, scoring=Scoring.CHOSEN)
    return MoE(router, gate_up, down, Activation.CLAMPED, constants=constants, alternate=True)


READERS = {"GptOssForCausalLM": CausalLM(read_gpt_oss)}
