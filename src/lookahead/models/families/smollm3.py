"""SmolLM3: a Llama with layers that do not use positions, by default every fourth one.

Its layers may have windows, too. The masks of its forward pass follow `layer_types` alone, whatever
`use_sliding_window` says, so the windows are read from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.models.families.llama import read_llama
from lookahead.models.parts import CausalLM
from lookahead.models.spec import Decoder


def read_smollm3(base: Any, head: Any, config: Any) -> Decoder:
    described = read_llama(base, head, config)
    blocks = []
    for layer, kind, block in zip(base.layers, config.layer_types, described.blocks, strict=True):
        rope = block.plain()[0].rope if layer.self_attn.use_rope else None
        window = config.sliding_window if kind == "sliding_attention" else None
        blocks.append(block.with_attention(rope=rope, window=window))
    return replace(described, blocks=blocks)


READERS = {"SmolLM3ForCausalLM": CausalLM(read_smollm3)}
