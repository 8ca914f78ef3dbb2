"""The rotary inputs of a step: cosines and sines at the positions of its rows."""

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

        Queries and keys are rotated, values are not.
        """
        made: dict[str, Any] = {}
        for group in groups:
            if group.rope is None or group.input("cosine") in made:
                continue
            tables = self._tables_to(group.rope, int(positions.max()) + 1)
            for kind, table, neutral in zip(("cosine", "sine"), tables, (1, 0), strict=True):
                factors = np.full((len(positions), group.vectors, table.shape[1]), neutral, np.float32)
                factors[:, : group.heads + group.kv_heads] = table[positions][:, None]
                made[group.input(kind)] = factors.reshape(-1, table.shape[1])
            made[group.input("vectors")] = np.arange(len(positions) * group.vectors)[None]
        return made

    def _tables_to(self, rope: int, positions: int) -> tuple[Array, Array]:
        """The tables of a rope, for at least this many positions."""
        if positions > len(self._tables[rope][0]):
            self._tables[rope] = _tables(self._ropes[rope], -(-positions // (8 * BLOCK)) * 8 * BLOCK)
        return self._tables[rope]


def _tables(rope: Rope, positions: int) -> tuple[Array, Array]:
    cosine, sine = rope.tables(positions, torch.device("cpu"))
    return cosine.numpy(), sine.numpy()
