"""Gemma 4, dense: layers without a window have other heads, whose values may be their keys.

Norms multiply by the weight itself, in fp32. Queries, keys and values are normed, the values without a weight, so
scores are not scaled. The last layers may read the keys and values of earlier ones. Each layer scales its result.
Experts are not described, nor the E models, whose layers have embeddings of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.families.gemma import embedding_scale
from lookahead.models.matrix import Matrix
from lookahead.models.parts import (
    CausalLM,
    layer_windows,
    read_feed_forward,
    read_norm,
    read_ropes_by_type,
)
from lookahead.models.spec import Attention, Block, Decoder, Rope

_norm = partial(read_norm, rounds_first=False)


def read_gemma4(base: Any, head: Any, config: Any) -> Decoder:
    if getattr(config, "hidden_size_per_layer_input", None):
        raise UnsupportedModelError("its layers have embeddings of their own")
    if getattr(config, "enable_moe_block", False):
        raise UnsupportedModelError("it has experts")
    ropes = read_ropes_by_type(base.rotary_emb, config)
    blocks = [
        Block(
            _norm(layer.input_layernorm),
            _read_attention(layer.self_attn, ropes[kind], window, config),
            _norm(layer.pre_feedforward_layernorm),
            read_feed_forward(layer.mlp, config.hidden_activation),
            mixer_out_norm=_norm(layer.post_attention_layernorm),
            feed_forward_out_norm=_norm(layer.post_feedforward_layernorm),
            output_scale=layer.layer_scalar.detach(),
        )
        for layer, kind, window in zip(base.layers, config.layer_types, layer_windows(config), strict=True)
    ]
    return Decoder(
        base.embed_tokens.weight.detach(),
        blocks,
        _norm(base.norm),
        Matrix((head,)),
        embedding_scale=embedding_scale(base.embed_tokens),
        logit_softcap=config.final_logit_softcapping,
    )


def _read_attention(module: Any, rope: Rope, window: int | None, config: Any) -> Attention:
    heads = config.num_attention_heads
    kv_heads = heads // module.num_key_value_groups
    fields: dict[str, Any] = {}
    if module.is_kv_shared_layer:
        own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        fields["kv_layer"] = max(index for index, kind in enumerate(own) if kind == module.layer_type)
        parts = [module.q_proj]
    else:
        fields |= {"k_norm": _norm(module.k_norm), "v_norm": _norm(module.v_norm)}
        parts = [module.q_proj, module.k_proj]
        if module.v_proj is not None:
            parts.append(module.v_proj)
        else:  # values are keys
            fields["head_order"] = (*range(heads + kv_heads), *range(heads, heads + kv_heads))
    return Attention(
        heads,
        kv_heads,
        module.head_dim,
        module.scaling,
        qkv=Matrix(tuple(parts)),
        out=Matrix((module.o_proj,)),
        rope=rope,
        window=window,
        q_norm=_norm(module.q_norm),
        **fields,
    )


READERS = {"Gemma4ForCausalLM": CausalLM(read_gemma4), "Gemma4UnifiedForCausalLM": CausalLM(read_gemma4)}
