"""GLM, GLM-4, Helium and ERNIE 4.5: Llamas whose rotation turns neighbouring columns, in GLM a part of each head.

GLM-4 also norms what a block's halves add. Helium's norms are in fp32 to the end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lookahead.models.families.llama import read_with_windows
from lookahead.models.parts import CausalLM, NormReader, read_norm, read_rope
from lookahead.models.spec import Decoder


def read_glm(base: Any, head: Any, config: Any, norm: NormReader = read_norm) -> Decoder:
    rope = read_rope(base.rotary_emb, config, interleaved=True)
    return read_with_windows(base, head, config, [None] * len(base.layers), norm=norm, rope=rope)


def read_glm4(base: Any, head: Any, config: Any) -> Decoder:
    described = read_glm(base, head, config)
    blocks = [
        replace(
            block,
            attention_out_norm=read_norm(layer.post_self_attn_layernorm),
            feed_forward_out_norm=read_norm(layer.post_mlp_layernorm),
        )
        for layer, block in zip(base.layers, described.blocks, strict=True)
    ]
    return replace(described, blocks=blocks)


def read_helium(base: Any, head: Any, config: Any) -> Decoder:
    return read_glm(base, head, config, partial(read_norm, rounds_first=False))


READERS = {
    "GlmForCausalLM": CausalLM(read_glm),
    "Glm4ForCausalLM": CausalLM(read_glm4),
    "HeliumForCausalLM": CausalLM(read_helium),
    "Ernie4_5ForCausalLM": CausalLM(read_glm),
}
