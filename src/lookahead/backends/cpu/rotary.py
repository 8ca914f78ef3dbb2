"""The inputs that turn a step's queries and keys by their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead.backends.cpu.cells import BLOCK, Integers
from lookahead.backends.cpu.groups import Group
from lookahead.backends.cpu.onnx_model import Array
from lookahead.models.spec import Rope


class RotaryTables:
    """The cosines and sines [positions, D / 2] of each rope, which grow with the furthest position."""

    def __init__(self, ropes: Sequence[Rope]) -> None:
        self._ropes = ropes
        self._tables = [_tables(rope, 1) for rope in ropes]

    def inputs(self, positions: Integers, groups: Sequence[Group]) -> dict[str, Any]:
        """The inputs `vectors`, `cosine` and `sine` of these groups (see `lower`), for rows at positions [R].

        Queries and keys are turned, values are not.
        """
        made: dict[str, Any] = {}
        for group in groups:
            if group.rope is None or group.input("cosine") in made:
                continue
            tables = self._reaching(group.rope, int(positions.max()) + 1)
            for kind, table, still in zip(("cosine", "sine"), tables, (1, 0), strict=True):
                lines = np.full((len(positions), group.vectors, table.shape[1]), still, np.float32)
                lines[:, : group.heads + group.kv_heads] = table[positions][:, None]
                made[group.input(kind)] = lines.reshape(-1, table.shape[1])
            made[group.input("vectors")] = np.arange(len(positions) * group.vectors)[None]
        return made

    def _reaching(self, rope: int, positions: int) -> tuple[Array, Array]:
        """The tables of a rope, for at least this many positions."""
        if positions > len(self._tables[rope][0]):
            self._tables[rope] = _tables(self._ropes[rope], -(-positions // (8 * BLOCK)) * 8 * BLOCK)
        return self._tables[rope]


def _tables(rope: Rope, positions: int) -> tuple[Array, Array]:
    cosine, sine = rope.tables(positions, torch.device("cpu"))
    return cosine.numpy(), sine.numpy()
