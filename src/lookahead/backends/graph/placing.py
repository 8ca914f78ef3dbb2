"""Moves a model's weights to their device straight into the fused layout that steps read.

A model moved by `model.to` has q, k and v in three allocations. Fusing them later needs memory for all matrices a
second time: torch's allocator keeps the freed parts, and none of them is large enough for the next layer's fused
matrix.
"""

from __future__ import annotations

from typing import Any

import torch

from lookahead.backends.graph.matrices.dense import fuse_weights
from lookahead.backends.graph.model import check_lowered
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.read import read
from lookahead.models.spec import matrices_in


def place_fused(model: Any, device: torch.device) -> None:
    """Move the matrices that the graph backend fuses to `device`, each once.

    The rest of the model stays where it is, quantised matrices too, as does all of a model that the graph backend does
    not run. If the weights are mapped from a file, as `from_pretrained` leaves them if their dtype is kept, the host
    needs no memory for them.
    """
    try:
        decoder = read(model, "graph")
        check_lowered(decoder)
    except UnsupportedModelError:
        return
    for matrix in matrices_in(decoder):
        if not any(matrix.formats):
            fuse_weights(matrix, device)
