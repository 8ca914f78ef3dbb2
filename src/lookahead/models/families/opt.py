"""OPT, XGLM, BioGPT and CTRL: a table of positions, LayerNorm, biases, no gate.

The tables of the first three begin with two rows that are not used. XGLM's and CTRL's are sinusoidal; they and BioGPT
scale the embedding. OPT-350M norms what its halves add together with their input, and has a narrow embedding: refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import Activation, FeedForward
from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, read_attention, read_norm, read_ungated
from lookahead.models.spec import Attention, Block, Decoder


def read_opt(base: Any, head: Any, config: Any) -> Decoder:
    if not config.do_layer_norm_before:
        raise UnsupportedModelError("its norms are behind its layers")
    if base.final_layer_norm is None:
        raise UnsupportedModelError("it has no norm behind its last layer")
    if base.project_in is not None:
        raise UnsupportedModelError("its embedding has another width than its layers")
    positions = base.embed_positions.weight.detach()
    return _read(base, base.final_layer_norm, head, positions, config.activation_function)


def read_xglm(base: Any, head: Any, config: Any) -> Decoder:
    scale = float(base.embed_tokens.embed_scale)
    positions = base.embed_positions.weights
    return _read(base, base.layer_norm, head, positions, config.activation_function, embedding_scale=scale)


def read_biogpt(base: Any, head: Any, config: Any) -> Decoder:
    scale = float(base.embed_tokens.embed_scale)
    positions = base.embed_positions.weight.detach()
    return _read(base, base.layer_norm, head, positions, config.hidden_act, embedding_scale=scale)


def _read(base: Any, norm: Any, head: Any, positions: torch.Tensor, activation: str, **changes: Any) -> Decoder:
    blocks = [
        Block(
            read_norm(layer.self_attn_layer_norm),
            read_attention(layer.self_attn, None, None, out="out_proj"),
            read_norm(layer.final_layer_norm),
            read_ungated(layer.fc1, layer.fc2, activation),
        )
        for layer in base.layers
    ]
    embedding, used = base.embed_tokens.weight.detach(), positions[base.embed_positions.offset :]
    return Decoder(embedding, blocks, read_norm(norm), Matrix((head,)), position_embedding=used, **changes)


def read_ctrl(base: Any, head: Any, config: Any) -> Decoder:
    blocks = []
    for layer in base.h:
        module, (up, _, down) = layer.multi_head_attention, layer.ffn
        qkv, out = Matrix((module.Wq, module.Wk, module.Wv)), Matrix((module.dense,))
        attention = Attention(module.num_heads, module.num_heads, module.head_dim, float(module.scaling), qkv, out)
        feed_forward = FeedForward(Matrix((up,)), Matrix((down,)), Activation.RELU, gated=False)
        blocks.append(Block(read_norm(layer.layernorm1), attention, read_norm(layer.layernorm2), feed_forward))
    embedding, head = base.w.weight.detach(), Matrix((head,))
    positions, scale = base.pos_encoding.to(embedding.dtype), math.sqrt(base.d_model_size)
    return Decoder(embedding, blocks, read_norm(base.layernorm), head, scale, positions)


READERS = {
    "OPTForCausalLM": CausalLM(read_opt, base="model.decoder"),
    "XGLMForCausalLM": CausalLM(read_xglm),
    "BioGptForCausalLM": CausalLM(read_biogpt, base="biogpt", head="output_projection"),
    "CTRLLMHeadModel": CausalLM(read_ctrl, base="transformer"),
}
