"""Steps of recurrent layers for kernel tests: rows and their walks, as a packet describes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from flat import Part, tree_of

from lookahead.backends.graph.kernels import reference_states
from lookahead.backends.graph.kernels.state_rows import StateRows, new_state_rows
from lookahead.backends.graph.packet import Packet

RING = 64


def state_rows_of(
    parts: Sequence[Part],
    device: torch.device,
    *,
    padding: int = 0,
    kept_base: int = 0,
    slots: Sequence[int] | None = None,
    reach: int = 3,
) -> StateRows:
    """The rows of a step of these parts, plus `padding` rows, with their walks. Part i has slot slots[i]."""
    size = sum(part.chunk + len(part.parents) for part in parts) + padding
    packet = Packet(size, size, [size], 1, False, states=True)
    packet.begin()
    chunks, trees = [[1] * part.chunk for part in parts], [tree_of(part.parents) for part in parts]
    packet.write_rows(slots or range(len(parts)), [part.length for part in parts], chunks, trees, [(1, 16)])
    packet.write_commits((), [()])
    packet.write_states(kept_base, (), (), [part.prompt for part in parts])
    rows = new_state_rows(packet.views(packet.host.to(device)), reach, size, RING)
    reference_states.list_walks(rows)
    return rows
