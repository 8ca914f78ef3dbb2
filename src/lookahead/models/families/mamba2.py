"""Mamba-2: blocks of a Mamba-2 mixer alone, and a residual stream that is in fp32 in any model."""

from __future__ import annotations

from typing import Any

from lookahead.models.matrix import Matrix
from lookahead.models.mixers import read_mamba2
from lookahead.models.parts import CausalLM, read_norm
from lookahead.models.spec import Block, Decoder


def read_pure_mamba2(base: Any, head: Any, config: Any) -> Decoder:
    blocks = [Block(read_norm(layer.norm), read_mamba2(layer.mixer), None, None) for layer in base.layers]
    return Decoder(
        base.embeddings.weight.detach(),
        blocks,
        read_norm(base.norm_f),
        Matrix((head,)),
        residual_fp32=bool(config.residual_in_fp32),
    )


READERS = {"Mamba2ForCausalLM": CausalLM(read_pure_mamba2, base="backbone")}
