"""Qwen3-Next and Qwen3.5, dense and with experts: gated delta nets, and attention in some layers.

Attention's query projection has a gate beside each query head. Norms have weights of 1 + w, but those behind the gated
delta nets. A mixture has a shared expert behind a gate; in Qwen3-Next some layers may do without experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lookahead.models.experts import read_dense_or
from lookahead.models.families.qwen_moe import read_shared_moe
from lookahead.models.matrix import Matrix
from lookahead.models.mixers import read_gated_delta
from lookahead.models.parts import CausalLM, EqualAxes, read_attention, read_norm, read_rope
from lookahead.models.recurrent import GatedDelta
from lookahead.models.spec import Attention, Block, Decoder, Rope

_norm = partial(read_norm, offset=1.0, rounds_first=False)


def read_qwen3_next(base: Any, head: Any, config: Any) -> Decoder:
    return _read(base, head, config, read_rope(base.rotary_emb, config))


def read_qwen3_5(base: Any, head: Any, config: Any) -> Decoder:
    """Its positions have three axes, for images."""
    rope = read_rope(base.rotary_emb, config)
    return _read(base, head, config, replace(rope, module=EqualAxes(rope.module)))


def _read(base: Any, head: Any, config: Any, rope: Rope) -> Decoder:
    blocks = []
    for layer in base.layers:
        attends = hasattr(layer, "self_attn")
        mixer = _read_attention(layer.self_attn, rope) if attends else _read_gated_delta(layer.linear_attn)
        norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        feed_forward = read_dense_or(layer.mlp, config.hidden_act, read_shared_moe)
        blocks.append(Block(norms[0], mixer, norms[1], feed_forward))
    return Decoder(base.embed_tokens.weight.detach(), blocks, _norm(base.norm), Matrix((head,)))


def _read_attention(module: Any, rope: Rope) -> Attention:
    """The matrix of queries has a head of queries, its gate, the next head, and so on."""
    heads, kv_heads = module.config.num_attention_heads, module.config.num_key_value_heads
    queries, others = range(0, 2 * heads, 2), range(2 * heads, 2 * heads + 2 * kv_heads)
    return read_attention(
        module,
        rope,
        None,
        norm=_norm,
        heads=heads,
        head_order=(*queries, *others),
        gate_heads=tuple(head + 1 for head in queries),
    )


def _read_gated_delta(module: Any) -> GatedDelta:
    norm, out = read_norm(module.norm), Matrix((module.out_proj,))
    if hasattr(module, "in_proj_qkvz"):
        projection = Matrix((module.in_proj_qkvz, module.in_proj_ba))
        return read_gated_delta(module, projection, norm=norm, out=out, order=_grouped_order(module))
    parts = module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
    return read_gated_delta(module, Matrix(parts), norm=norm, out=out)


def _grouped_order(module: Any) -> torch.Tensor:
    """Of matrices that have for each key head its columns of q, k, v and z, and of b and a."""
    keys, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
    values = group * module.head_v_dim
    wide = torch.arange(keys * 2 * (module.head_k_dim + values)).view(keys, -1)
    narrow = wide.numel() + torch.arange(keys * 2 * group).view(keys, -1)
    parts = (*wide.split([module.head_k_dim, module.head_k_dim, values, values], dim=1), *narrow.split(group, dim=1))
    return torch.cat([part.flatten() for part in parts]).to(module.A_log.device)


READERS = {
    "Qwen3NextForCausalLM": CausalLM(read_qwen3_next),
    "Qwen3_5ForCausalLM": CausalLM(read_qwen3_5),
    "Qwen3_5MoeForCausalLM": CausalLM(read_qwen3_5),
}
