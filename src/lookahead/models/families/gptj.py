"""GPT-J and CodeGen: both halves of a block read one LayerNorm, neighbouring columns of a part of each head are turned.

The angles are a table with an end, a buffer of each layer. The matrices of attention have no biases, the LM head has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lookahead.models.matrix import Matrix
from lookahead.models.parts import CausalLM, read_attention, read_norm, read_ungated
from lookahead.models.spec import Attention, Block, Decoder, Rope

GROUPS = 4
"""CodeGen's matrix has four groups of heads, each with its queries, then its values, then its keys."""


@dataclass(frozen=True, eq=False)
class SineTable:
    """The rotary module of a table [positions, dim]: sines of all pairs, then cosines."""

    table: torch.Tensor

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sine, cosine = self.table.to(positions.device)[positions].chunk(2, dim=-1)
        return cosine.to(x.dtype), sine.to(x.dtype)


def read_gptj(base: Any, head: Any, config: Any) -> Decoder:
    def attention(module: Any, rope: Rope) -> Attention:
        return read_attention(module, rope, None, scale=module.head_dim**-0.5, out="out_proj")

    return _read(base, head, config, attention)


def read_codegen(base: Any, head: Any, config: Any) -> Decoder:
    heads = config.num_attention_heads
    each = heads // GROUPS
    starts = [group * 3 * each + part * each for part in (0, 2, 1) for group in range(GROUPS)]
    order = tuple(start + member for start in starts for member in range(each))

    def attention(module: Any, rope: Rope) -> Attention:
        qkv, out, scale = Matrix((module.qkv_proj,)), Matrix((module.out_proj,)), module.head_dim**-0.5
        return Attention(heads, heads, module.head_dim, scale, qkv, out, rope, head_order=order)

    return _read(base, head, config, attention)


def _read(base: Any, head: Any, config: Any, attention: Callable[[Any, Rope], Attention]) -> Decoder:
    first, blocks = base.h[0].attn, []
    dim = first.rotary_dim or first.head_dim
    rope = Rope(SineTable(first.embed_positions), dim, len(first.embed_positions), interleaved=True)
    for layer in base.h:
        norm, mlp = read_norm(layer.ln_1), layer.mlp
        feed_forward = read_ungated(mlp.fc_in, mlp.fc_out, config.activation_function)
        blocks.append(Block(norm, attention(layer.attn, rope), norm, feed_forward, parallel=True))
    return Decoder(base.wte.weight.detach(), blocks, read_norm(base.ln_f), Matrix((head,)))


READERS = {
    "GPTJForCausalLM": CausalLM(read_gptj, base="transformer"),
    "CodeGenForCausalLM": CausalLM(read_codegen, base="transformer"),
}
