"""The chunks in which transformers' Mamba-2 layers run several tokens."""

from __future__ import annotations

from typing import Any

import torch

FIELDS = {
    "bamba": "mamba_chunk_size",
    "falcon_h1": "mamba_chunk_size",
    "granitemoehybrid": "mamba_chunk_size",
    "mamba2": "chunk_size",
}
"""Config fields of the classes that run chains on a CPU, by model type."""
CHUNK = 16
"""Tokens of a chunk on a CPU, where every pass over several tokens is padded to a multiple of it. On one core of an
Intel Xeon at 2.5 GHz passes of granite with 60 layers and 305M parameters took 0.28 seconds for 1 token; for 2 and 16
tokens 1.31 and 1.49 in chunks of 256, which is the default, and 0.28 and 0.49 in chunks of 16 (0.22 for 1 token)."""


def shorter_chunks(config: Any, device: torch.device) -> dict[str, int]:
    """The fields of a model's config that `load` changes on this device: the size of the chunks, if they are longer
    than CHUNK on a CPU. The size decides how sums are rounded, and nothing else."""
    name = FIELDS.get(config.model_type)
    if device.type != "cpu" or name is None or (getattr(config, name) or 0) <= CHUNK:
        return {}
    return {name: CHUNK}
