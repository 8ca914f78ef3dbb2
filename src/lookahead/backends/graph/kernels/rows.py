"""What the kernels are told about a step's rows: whose they are, where they stand, and whom they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Rows:
    """A step's R rows, as int32 tensors on the device. E, T and the meaning of the first five: see `packet.Packet`.

    counts [2], entries [E, 5], tiles [T, 6], entry_of [R], parents [R] come with the packet.
    tables [lines, longest]: each sequence's pages (see `kv.PagedKV`).
    positions [R], places [R], bits [R, words] are computed by `place_nodes`: a row's position in its text, the place in
    the pages where its K/V go, and which nodes of its tree it sees (bit j % 32 of word j // 32 stands for node j).
    """

    counts: torch.Tensor
    entries: torch.Tensor
    tiles: torch.Tensor
    entry_of: torch.Tensor
    parents: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor


@dataclass(slots=True)
class TreeRows:
    """What `kernels.adjust` reads of a step's rows: see `Rows`."""

    entries: torch.Tensor
    entry_of: torch.Tensor
    parents: torch.Tensor


def new_rows(views: dict[str, torch.Tensor], shape: int, tables: torch.Tensor, most_nodes: int) -> Rows:
    """The rows that a packet's `views` describe, for layers of head shape number `shape` whose pages are in `tables`,
    with trees of at most `most_nodes` nodes."""
    size, like = len(views["entry_of"]), views["entry_of"]
    return Rows(
        counts=views["counts"][shape],
        entries=views["entries"],
        tiles=views[f"tiles_{shape}"],
        entry_of=like,
        parents=views["parents"],
        tables=tables,
        positions=torch.zeros_like(like),
        places=torch.zeros_like(like),
        bits=like.new_zeros(size, (most_nodes + 31) // 32),
    )
