"""The rows of a step as the kernels see them: sequence, position, K/V cell and ancestors of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Rows:
    """The R rows of a step, as int32 tensors on the device.

    counts [2], sequences [B, 5], tiles [T, 6], sequence_of [R], parents [R] come with the packet (see `packet.Packet`).
    tables [slots, longest]: the page tables (see `kv.PagedKV`).
    positions [R], cells [R], bits [R, words] are computed by `locate_rows`: a row's position in its text, the cell of
    its K/V, and the nodes of its tree that it attends to (bit j % 32 of word j // 32 for node j).
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


@dataclass(slots=True)
class TreeRows:
    """The part of a step's rows that `kernels.adjust` reads: see `Rows`."""

    sequences: torch.Tensor
    sequence_of: torch.Tensor
    parents: torch.Tensor


def new_rows(views: dict[str, torch.Tensor], shape: int, tables: torch.Tensor, most_nodes: int) -> Rows:
    """The rows that a packet's `views` describe, for layers of head shape number `shape` with page tables `tables`,
    and trees of at most `most_nodes` nodes."""
    size, like = len(views["sequence_of"]), views["sequence_of"]
    return Rows(
        counts=views["counts"][shape],
        sequences=views["sequences"],
        tiles=views[f"tiles_{shape}"],
        sequence_of=like,
        parents=views["parents"],
        tables=tables,
        positions=torch.zeros_like(like),
        cells=torch.zeros_like(like),
        bits=like.new_zeros(size, (most_nodes + 31) // 32),
    )
