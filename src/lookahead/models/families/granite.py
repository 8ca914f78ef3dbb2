"""Granite: a Llama with factors of the embedding, of scores, of what a block's halves add, and of the logits.

Granite 4's GraniteMoeHybrids have Mamba-2 instead of attention in most layers. They may do without experts, without
Mamba-2 and without positions.
GraniteSWA has windows on some layers, a theta per layer, and sinks. HyperCLOVA X may have norms of what is added.

The MoEs have experts in every layer, and all but GraniteMoe may have a feed-forward that every token goes through.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lookahead.models.experts import read_moe, read_router
from lookahead.models.families.llama import read_llama
from lookahead.models.feed_forward import Activation, FeedForward, MoE, Scoring
from lookahead.models.matrix import Matrix
from lookahead.models.mixers import read_mamba2
from lookahead.models.parts import CausalLM, layer_windows, read_attention, read_norm, read_rope
from lookahead.models.spec import Block, Decoder


def read_granite(base: Any, head: Any, config: Any, **parts: Any) -> Decoder:
    return _scaled(read_llama(base, head, config, **parts), config)


def read_granite_moe(base: Any, head: Any, config: Any) -> Decoder:
    return read_granite(base, head, config, feed_forward=partial(_read_experts, activation=config.hidden_act))


def read_hyperclovax(base: Any, head: Any, config: Any) -> Decoder:
    """Its factor of the logits multiplies them; Granite's divides."""
    described, blocks = read_granite(base, head, config), []
    for layer, block in zip(base.layers, described.blocks, strict=True):
        norms = (read_norm(layer.post_norm1), read_norm(layer.post_norm2)) if config.use_post_norm else (None, None)
        blocks.append(replace(block, mixer_out_norm=norms[0], feed_forward_out_norm=norms[1]))
    return replace(described, blocks=blocks, logit_scale=float(config.logits_scaling))


def read_granite_swa(base: Any, head: Any, config: Any, **parts: Any) -> Decoder:
    """A layer whose theta is 0 does not use positions."""
    described = read_granite(base, head, config, **parts)
    ropes = {module.config.rope_parameters["rope_theta"]: read_rope(module, config) for module in base.rotary_embs}
    layers = zip(base.layers, described.blocks, config.layer_rope_theta, layer_windows(config), strict=True)
    blocks = []
    for layer, block, theta, window in layers:
        rope = ropes[theta] if theta else None
        blocks.append(block.with_attention(rope=rope, window=window, sinks=layer.self_attn.sinks.detach()))
    return replace(described, blocks=blocks)


def read_granite_moe_swa(base: Any, head: Any, config: Any) -> Decoder:
    return read_granite_swa(base, head, config, feed_forward=partial(_read_experts, activation=config.hidden_act))


def read_granite_hybrid(base: Any, head: Any, config: Any) -> Decoder:
    rope = None if base.rotary_emb is None else read_rope(base.rotary_emb, config)
    blocks = []
    for layer in base.layers:
        read = _read_shared if layer.block_sparse_moe is None else _read_experts
        feed_forward = read(layer, config.hidden_act)
        norms = read_norm(layer.input_layernorm), read_norm(layer.post_attention_layernorm)
        attends = layer.self_attn is not None
        mixer = read_attention(layer.self_attn, rope, None) if attends else read_mamba2(layer.mamba)
        blocks.append(Block(norms[0], mixer, norms[1], feed_forward))
    described = Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))
    return _scaled(described, config)


def _read_experts(layer: Any, activation: str) -> MoE:
    block = layer.block_sparse_moe
    has_shared = getattr(layer, "shared_mlp", None) is not None
    return read_moe(
        block.experts,
        read_router(block.router, scoring=Scoring.CHOSEN),
        activation,
        shared=_read_shared(layer, activation) if has_shared else None,
    )


def _read_shared(layer: Any, activation: str) -> FeedForward:
    mlp = layer.shared_mlp
    return FeedForward(Matrix((mlp.input_linear,)), Matrix((mlp.output_linear,)), Activation.named(activation))


def _scaled(described: Decoder, config: Any) -> Decoder:
    """The factors of scores are read with the attention."""
    return replace(
        described,
        blocks=[replace(block, residual_scale=float(config.residual_multiplier)) for block in described.blocks],
        embedding_scale=float(config.embedding_multiplier),
        logit_scale=1 / config.logits_scaling,
    )


READERS = {
    "GraniteForCausalLM": CausalLM(read_granite),
    "GraniteSWAForCausalLM": CausalLM(read_granite_swa),
    "GraniteMoeForCausalLM": CausalLM(read_granite_moe),
    "GraniteMoeSharedForCausalLM": CausalLM(read_granite_moe),
    "GraniteMoeSWAForCausalLM": CausalLM(read_granite_moe_swa),
    "GraniteMoeHybridForCausalLM": CausalLM(read_granite_hybrid),
    "HyperCLOVAXForCausalLM": CausalLM(read_hyperclovax),
}
