"""Arcee, Jais 2, Apertus and nanochat: Llamas whose feed-forwards have no gate.

Jais 2 has LayerNorms. Apertus has norms of q and k, and an activation with learned constants. In nanochat no norm has
a weight, those of q and k come after the rotation, which goes backwards, and the embeddings are normed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from lookahead.models.feed_forward import Activation, FeedForward
from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, read_attention, read_norm, read_rope, read_ungated
from lookahead.models.spec import Block, Decoder


def read_arcee(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    blocks = [
        Block(
            read_norm(layer.input_layernorm),
            read_attention(layer.self_attn, rope, None),
            read_norm(layer.post_attention_layernorm),
            read_ungated(layer.mlp.up_proj, layer.mlp.down_proj, config.hidden_act),
        )
        for layer in base.layers
    ]
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))


def read_apertus(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)
    blocks = [
        Block(
            read_norm(layer.attention_layernorm),
            read_attention(layer.self_attn, rope, None),
            read_norm(layer.feedforward_layernorm),
            _read_apertus_mlp(layer.mlp, config),
        )
        for layer in base.layers
    ]
    return Decoder(base.embed_tokens.weight.detach(), blocks, read_norm(base.norm), Matrix((head,)))


def _read_apertus_mlp(mlp: Any, config: Any) -> FeedForward:
    """Two of xIELU's constants are kept as what softplus turns into them."""
    if config.hidden_act != "xielu":
        return read_ungated(mlp.up_proj, mlp.down_proj, config.hidden_act)
    own = mlp.act_fn
    square, bent = F.softplus(own.alpha_p.detach()), own.beta + F.softplus(own.alpha_n.detach())
    constants = (float(square), float(bent), float(own.beta), float(own.eps))
    up, down = Matrix((mlp.up_proj,)), Matrix((mlp.down_proj,))
    return FeedForward(up, down, Activation.XIELU, gated=False, constants=constants)


def read_nanochat(base: Any, head: Any, config: Any) -> Decoder:
    rope = read_rope(base.rotary_emb, config)

    def backwards(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = base.rotary_emb(x, positions)
        return cosine, -sine

    rope = replace(rope, module=backwards)
    blocks = [
        Block(
            read_norm(layer.input_layernorm),
            read_attention(layer.self_attn, rope, None, norms_after_rope=True),
            read_norm(layer.post_attention_layernorm),
            read_ungated(layer.mlp.fc1, layer.mlp.fc2, config.hidden_act),
        )
        for layer in base.layers
    ]
    embedding = base.norm(base.embed_tokens.weight.detach())  # the last norm is also the first one
    cap = config.final_logit_softcapping
    return Decoder(embedding, blocks, read_norm(base.norm), Matrix((head,)), logit_softcap=cap)


READERS = {
    "ArceeForCausalLM": CausalLM(read_arcee),
    "Jais2ForCausalLM": CausalLM(read_arcee),
    "ApertusForCausalLM": CausalLM(read_apertus),
    "NanoChatForCausalLM": CausalLM(read_nanochat),
}
