"""Nemotron-H: layers of one half each, Mamba-2, attention without positions, a feed-forward or experts, none of which
has a gate.

The router is DeepSeek's, and the experts may read and give fewer columns than the layer. A prompt's time steps have a
lower bound.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lookahead.models.experts import is_mixture, read_grouped_router
from lookahead.models.feed_forward import Activation, FeedForward, MoE
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.mixers import read_mamba2
from lookahead.models.parts import CausalLM, read_attention, read_norm, read_ungated
from lookahead.models.spec import Block, Decoder

_norm = partial(read_norm, rounds_first=False)


def read_nemotron_h(base: Any, head: Any, config: Any) -> Decoder:
    blocks = [_read_block(_norm(layer.norm), layer.mixer, config.mlp_hidden_act) for layer in base.layers]
    return Decoder(base.embeddings.weight.detach(), blocks, _norm(base.norm_f), Matrix((head,)))


def _read_block(norm: Any, half: Any, activation: str) -> Block:
    if hasattr(half, "A_log"):
        return Block(norm, read_mamba2(half), None, None)
    if hasattr(half, "q_proj"):
        return Block(norm, read_attention(half, None, None), None, None)
    read = _read_experts if is_mixture(half) else _read_dense
    return Block(None, None, norm, read(half, activation))


def _read_dense(mlp: Any, activation: str) -> FeedForward:
    return read_ungated(mlp.up_proj, mlp.down_proj, activation)


def _read_experts(block: Any, activation: str) -> MoE:
    up, down = (
        ExpertMatrix(getattr(block.experts, name), block.experts.num_experts) for name in ("up_proj", "down_proj")
    )
    latent = type(block.fc1_latent_proj) is not torch.nn.Identity
    return MoE(
        read_grouped_router(block.gate, block.gate.e_score_correction_bias),
        up,
        down,
        Activation.named(activation),
        shared=_read_dense(block.shared_experts, activation),
        gated=False,
        latent_in=Matrix((block.fc1_latent_proj,)) if latent else None,
        latent_out=Matrix((block.fc2_latent_proj,)) if latent else None,
    )


READERS = {"NemotronHForCausalLM": CausalLM(read_nemotron_h)}
