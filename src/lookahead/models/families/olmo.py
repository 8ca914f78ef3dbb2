"""OLMo 1 is a Llama with LayerNorms without weights, whose q, k and v may be clipped.

OLMo 2 and 3 and EXAONE 4 norm what a block's halves add, not what they read. They also norm q and k: OLMo all heads as
one vector, EXAONE each head. OLMo 3 and EXAONE 4 have windows on some layers.

OLMo Hybrid has gated delta nets in most layers, and may do without positions. OLMoE and FlexOlmo have experts in every
layer: OLMoE in a Llama that norms q and k, FlexOlmo in an OLMo 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lookahead.models.experts import read_softmax_moe
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.families.llama import read_llama, read_with_windows
from lookahead.models.matrix import Matrix
from lookahead.models.mixers import read_gated_delta
from lookahead.models.norm import Norm
from lookahead.models.parts import (
    CausalLM,
    FeedForwardReader,
    NormReader,
    layer_windows,
    read_attention,
    read_feed_forward,
    read_norm,
    read_rope,
    read_ropes_by_type,
)
from lookahead.models.recurrent import GatedDelta
from lookahead.models.spec import Block, Decoder, Rope

_norm = partial(read_norm, rounds_first=False)


def read_olmo(base: Any, head: Any, config: Any) -> Decoder:
    def norm(module: Any) -> Norm:
        """Its eps is a constant of the class."""
        return Norm(None, 1e-5, centered=True, rounds_first=False)

    return read_with_windows(base, head, config, [None] * len(base.layers), norm=norm, clip=config.clip_qkv)


def read_olmo2(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    layers: list[tuple[Rope | None, int | None]] = [(rope, None)] * len(base.layers)
    return _read(base, head, config, layers, norm=_norm, whole_norms=True)


def read_olmo3(base: Any, head: Any, config: Any) -> Decoder:
    ropes = read_ropes_by_type(base.rotary_emb, config)
    layers = [(ropes[kind], window) for kind, window in zip(config.layer_types, layer_windows(config), strict=True)]
    return _read(base, head, config, layers, norm=_norm, whole_norms=True)


def read_exaone4(base: Any, head: Any, config: Any) -> Decoder:
    """In a model with windows only the layers that have one use positions."""
    rope, windows = read_rope(base.rotary_emb, config), layer_windows(config)
    everywhere = config.sliding_window is None
    return _read(base, head, config, [(rope if everywhere or window else None, window) for window in windows])


def read_olmoe(base: Any, head: Any, config: Any) -> Decoder:
    if config.clip_qkv is not None:
        raise UnsupportedModelError("it clips queries and keys behind their norms")
    return read_llama(base, head, config, feed_forward=_experts(config), whole_norms=True)


def read_flex_olmo(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    layers: list[tuple[Rope | None, int | None]] = [(rope, None)] * len(base.layers)
    return _read(base, head, config, layers, norm=_norm, feed_forward=_experts(config), whole_norms=True)


def read_olmo_hybrid(base: Any, head: Any, config: Any) -> Decoder:
    """Its layers with a gated delta net have norms before both halves, those with attention have OLMo 3's."""
    rope, blocks = None if base.rotary_emb is None else read_rope(base.rotary_emb, config), []
    for layer in base.layers:
        feed_forward = read_feed_forward(layer.mlp, config.hidden_act)
        middle = _norm(layer.post_attention_layernorm)
        if hasattr(layer, "linear_attn"):
            recurrent = _read_gated_delta(layer.linear_attn)
            blocks.append(Block(_norm(layer.input_layernorm), recurrent, middle, feed_forward))
        else:
            attention = read_attention(layer.self_attn, rope, None, norm=_norm, whole_norms=True)
            last = _norm(layer.post_feedforward_layernorm)
            blocks.append(Block(None, attention, None, feed_forward, mixer_out_norm=middle, feed_forward_out_norm=last))
    return Decoder(base.embed_tokens.weight.detach(), blocks, _norm(base.norm), Matrix((head,)))


def _read_gated_delta(module: Any) -> GatedDelta:
    parts = module.q_proj, module.k_proj, module.v_proj, module.g_proj, module.b_proj, module.a_proj
    norm, out, scale = read_norm(module.o_norm), Matrix((module.o_proj,)), 2.0 if module.allow_neg_eigval else 1.0
    return read_gated_delta(module, Matrix(parts), norm=norm, out=out, beta_scale=scale)


def _experts(config: Any) -> FeedForwardReader:
    return lambda layer: read_softmax_moe(layer.mlp, config.hidden_act)


def _read(
    base: Any,
    head: Any,
    config: Any,
    layers: Sequence[tuple[Rope | None, int | None]],
    norm: NormReader = read_norm,
    feed_forward: FeedForwardReader | None = None,
    **attention: Any,
) -> Decoder:
    """A model whose layers have these rotations and windows."""
    feed_forward = feed_forward or (lambda layer: read_feed_forward(layer.mlp, config.hidden_act))
    blocks = [
        Block(
            None,
            read_attention(layer.self_attn, rope, window, norm=norm, **attention),
            None,
            feed_forward(layer),
            mixer_out_norm=norm(layer.post_attention_layernorm),
            feed_forward_out_norm=norm(layer.post_feedforward_layernorm),
        )
        for layer, (rope, window) in zip(base.layers, layers, strict=True)
    ]
    return Decoder(base.embed_tokens.weight.detach(), blocks, norm(base.norm), Matrix((head,)))


READERS = {
    "OlmoForCausalLM": CausalLM(read_olmo),
    "Olmo2ForCausalLM": CausalLM(read_olmo2),
    "Olmo3ForCausalLM": CausalLM(read_olmo3),
    "Exaone4ForCausalLM": CausalLM(read_exaone4),
    "OlmoeForCausalLM": CausalLM(read_olmoe),
    "OlmoHybridForCausalLM": CausalLM(read_olmo_hybrid),
    "FlexOlmoForCausalLM": CausalLM(read_flex_olmo),
}
