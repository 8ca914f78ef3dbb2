"""The inputs of a step that depend on its rows' positions: rotary angles, factors of queries, learned positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from lookahead.backends.cpu.cells import BLOCK, Integers
from lookahead.backends.cpu.groups import Group, QueryScale, query_scales_of, ropes_of
from lookahead.backends.cpu.onnx_model import Array
from lookahead.models.spec import Decoder, Rope


class PositionTables:
    """The cosines and sines [positions, dim / 2] of each rope and the factors [positions] of each query scale, which
    grow with the furthest position."""

    def __init__(self, decoder: Decoder) -> None:
        self._ropes = [_Table(partial(_angles, rope)) for rope in ropes_of(decoder)]
        self._scales = [_Table(partial(_factors, scale)) for scale in query_scales_of(decoder)]
        learned = decoder.position_embedding
        self._learned = None if learned is None else len(learned)

    def inputs(self, positions: Integers, padded: Integers, groups: Sequence[Group]) -> dict[str, Any]:
        """The inputs `positions`, `vectors`, `cosine`, `sine` and `query_scale` of these groups (see `lower`).

        positions [R] are the rows' own, and padded [L, P] the rows in the columns of each sequence.
        """
        made: dict[str, Any] = {}
        end = int(positions.max()) + 1
        if self._learned is not None:  # rows behind the last learned position can never be accepted
            made["positions"] = np.minimum(positions, self._learned - 1)
        for group in groups:
            if group.rope is not None and group.input("cosine") not in made:
                cosine, sine = self._ropes[group.rope].up_to(end)
                made |= _rotary_inputs(cosine[positions], sine[positions], group)
            if group.query_scale is not None and group.input("query_scale") not in made:
                (factors,) = self._scales[group.query_scale].up_to(end)
                columns = np.tile(factors[positions[padded]], (1, group.sharing))
                made[group.input("query_scale")] = columns[:, None, None, :, None]
        return made


class _Table:
    """Arrays by position, computed again for more of them when a position is behind their end."""

    def __init__(self, make: Callable[[int], Sequence[Array]]) -> None:
        self._make = make
        self._arrays = make(1)

    def up_to(self, positions: int) -> Sequence[Array]:
        """The arrays, with at least this many positions."""
        if positions > len(self._arrays[0]):
            self._arrays = self._make(-(-positions // (8 * BLOCK)) * 8 * BLOCK)
        return self._arrays


def _rotary_inputs(cosine: Array, sine: Array, group: Group) -> dict[str, Any]:
    """The inputs of a group for rows with these cosines and sines [R, dim / 2]. Values are not rotated."""
    made: dict[str, Any] = {}
    rotated = group.heads + group.kv_heads if group.own_kv else group.heads
    for kind, row, neutral in (("cosine", cosine, 1), ("sine", sine, 0)):
        factors = np.full((len(row), group.vectors, row.shape[1]), neutral, np.float32)
        factors[:, :rotated] = row[:, None]
        made[group.input(kind)] = factors.reshape(-1, row.shape[1])
    made[group.input("vectors")] = np.arange(len(cosine) * group.vectors)[None]
    return made


def _angles(rope: Rope, positions: int) -> list[Array]:
    return [table.numpy() for table in rope.tables(positions, torch.device("cpu"))]


def _factors(scale: QueryScale, positions: int) -> list[Array]:
    return [scale(torch.arange(positions)).float().numpy()]
