"""The rows of a step as recurrent layers see them: what came before each row, and the walks of the states through them.

A recurrent state is updated by one token after the other. A *walk* is a run of tokens that updates one state: a prompt
chunk, the path from a tree's root to one of its leaves, or the tokens that the last step accepted (a *replay*). All of
them go through one kernel (`scan`), whose update is that of decoding a single token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lookahead.backends.graph.records import Walk

NO_INPUT = -(1 << 20)
"""In `StateRows.above`: the text begins after this input, which is 0."""


@dataclass(slots=True)
class StateRows:
    """The R rows of a step, as int32 tensors on the device.

    sequences [B, 5], sequence_of [R] and parents [R] come with the packet (see `packet.Packet`), and so do kept_base
    [1], the index in the ring of kept rows from which this step's nodes are kept; replays [B, 5], the walks of the
    tokens accepted last, their number replay_count [1], and replayed [M], the kept rows that they go through; prompts
    [B], the number of tokens of each sequence's prompt.

    `walks.list_walks` computes the rest:
    above [R, reach]  for each row and j = 0, 1, ..: the row of the token j + 1 before it; or -1, -2, .. for the newest
                      stored inputs of the convolution, or NO_INPUT
    kept [R]          the index in the ring where a node is kept, -1 for rows of a chunk and padding
    flags [R]         work space
    order [R + L W]   the rows of walks: all rows in order, then the path to each of up to L leaves of up to W nodes
    chunk_walks [B, 5] and tree_walks [L, 5] (see `records.Walk`), and their numbers chunk_count [1] and tree_count [1]
    """

    sequences: torch.Tensor
    sequence_of: torch.Tensor
    parents: torch.Tensor
    kept_base: torch.Tensor
    replays: torch.Tensor
    replay_count: torch.Tensor
    replayed: torch.Tensor
    prompts: torch.Tensor
    above: torch.Tensor
    kept: torch.Tensor
    flags: torch.Tensor
    order: torch.Tensor
    chunk_walks: torch.Tensor
    tree_walks: torch.Tensor
    chunk_count: torch.Tensor
    tree_count: torch.Tensor
    ring: int

    @property
    def most_nodes(self) -> int:
        """The most nodes of a step's trees, which is also the most leaves."""
        return len(self.tree_walks)


def new_state_rows(views: dict[str, torch.Tensor], reach: int, most_nodes: int, ring: int) -> StateRows:
    """The rows that a packet's `views` describe, for convolutions that read `reach` earlier inputs, and trees of
    together at most `most_nodes` nodes, which are kept in a ring of `ring` rows."""
    size, like = len(views["sequence_of"]), views["sequence_of"]
    nodes = min(size, most_nodes)
    return StateRows(
        sequences=views["sequences"],
        sequence_of=like,
        parents=views["parents"],
        kept_base=views["kept_base"],
        replays=views["replays"],
        replay_count=views["replay_count"],
        replayed=views["replayed"],
        prompts=views["prompts"],
        above=like.new_zeros(size, reach),
        kept=torch.zeros_like(like),
        flags=torch.zeros_like(like),
        order=like.new_zeros(size + nodes * nodes),
        chunk_walks=like.new_zeros(len(views["sequences"]), len(Walk)),
        tree_walks=like.new_zeros(nodes, len(Walk)),
        chunk_count=like.new_zeros(1),
        tree_count=like.new_zeros(1),
        ring=ring,
    )


def roots_as_replays(rows: StateRows) -> Callable[[], None]:
    """Work after a step of one node per sequence: its walks become the replays of the next step, whose nodes are kept
    behind its own."""
    count = min(len(rows.replays), rows.most_nodes)
    replays, replayed, number = (
        rows.replays[:count],
        rows.replayed[:count],
        torch.arange(count, device=rows.kept.device),
    )
    # A replay goes through one row of `replayed`, not of `order`, and writes no output.
    change = torch.zeros_like(replays)
    change[:, Walk.BEGIN] = number - (len(rows.kept) + number * rows.most_nodes)
    change[:, Walk.WRITE_FROM] = 1

    def accept() -> None:
        torch.add(rows.tree_walks[:count], change, out=replays)
        replayed.copy_(rows.kept[:count])
        rows.replay_count.copy_(rows.tree_count)
        rows.kept_base.add_(rows.tree_count)

    return accept
