"""The rows of a step as the kernels see them: sequence, position, K/V cell and ancestors of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PATH = 16
"""Positions per path: attention adds keys in blocks of this many positions, which the matrix units add at once."""


@dataclass(slots=True)
class Rows:
    """The R rows of a step, as int32 tensors on the device.

    counts [2], sequences [B, 5], tiles [T, 6], sequence_of [R], parents [R] come with the packet (see `packet.Packet`).
    tables [slots, longest]: the page tables (see `kv.PagedKV`). shifts [slots]: what the sequence in a slot adds to its
    positions, or None if all add 0.
    positions [R], rotary [R], cells [R], bits [R, words], paths [R, 16] are computed by `locate_rows`: a row's position
    in its text, the position that is encoded, the cell of its K/V, the nodes of its tree that it attends to (bit j % 32
    of word j // 32 for node j), and for a tree's row the cells of the positions that it sees in its own block of 16
    positions, with -1 after its own. rotary is positions itself without shifts, else positions plus shift, from 0 to
    `furthest`.
    """

    counts: torch.Tensor
    sequences: torch.Tensor
    tiles: torch.Tensor
    sequence_of: torch.Tensor
    parents: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    bits: torch.Tensor
    paths: torch.Tensor
    rotary: torch.Tensor
    shifts: torch.Tensor | None = None
    furthest: int = 0


@dataclass(slots=True)
class TreeRows:
    """The part of a step's rows that `kernels.adjust` reads: see `Rows`."""

    sequences: torch.Tensor
    sequence_of: torch.Tensor
    parents: torch.Tensor


def new_rows(
    views: dict[str, torch.Tensor],
    shape: int,
    tables: torch.Tensor,
    most_nodes: int,
    shifts: torch.Tensor | None = None,
    furthest: int = 0,
) -> Rows:
    """The rows that a packet's `views` describe, for layers of head shape number `shape` with page tables `tables`,
    and trees of at most `most_nodes` nodes. `shifts` and `furthest` as in `Rows`."""
    size, like = len(views["sequence_of"]), views["sequence_of"]
    positions = torch.zeros_like(like)
    return Rows(
        counts=views["counts"][shape],
        sequences=views["sequences"],
        tiles=views[f"tiles_{shape}"],
        sequence_of=like,
        parents=views["parents"],
        tables=tables,
        positions=positions,
        cells=torch.zeros_like(like),
        bits=like.new_zeros(size, (most_nodes + 31) // 32),
        paths=like.new_full((size, PATH), -1),
        rotary=positions if shifts is None else torch.zeros_like(like),
        shifts=shifts,
        furthest=furthest,
    )
