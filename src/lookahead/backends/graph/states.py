"""The recurrent states of all slots on the device, and the rows of past steps that are replayed into them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lookahead.backends.graph.kernels.state_rows import StateRows, new_state_rows
from lookahead.backends.graph.kernels.state_shapes import ScanShape
from lookahead.backends.graph.kv import free_bytes
from lookahead.backends.graph.packet import MOST_SEQUENCES
from lookahead.backends.graph.sizes import MOST_STATE_NODES
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.recurrent import GatedDelta, Mamba2, Recurrent
from lookahead.models.spec import Decoder

KEPT_ROWS = 2 * MOST_STATE_NODES
"""Rows of the ring: an engine may launch two passes before it commits the first."""
STATE_SHARE, SNAPSHOT_SHARE = 0.25, 0.25
"""By default, the share of free memory for states, which have at most MOST_SEQUENCES slots, and the share of that for
snapshots."""
MOST_SNAPSHOTS = 256
"""Maximum number of snapshots."""
CPU_BYTES = 1 << 28
"""Memory for states on a CPU, where the backend is only tested."""


@dataclass(frozen=True)
class StateGroup:
    """Layers with states of one shape. `shape` is that of their recurrence, None for a convolution alone; `channels`
    and `taps` are those of their convolution."""

    shape: ScanShape | None
    channels: int
    taps: int
    layers: tuple[int, ...]

    def slot_bytes(self, element_size: int) -> int:
        """Bytes of a sequence's states, over all layers of the group."""
        matrix = 0 if self.shape is None else 4 * self.shape.heads * self.shape.key * self.shape.value
        return len(self.layers) * (matrix + (self.taps - 1) * self.channels * element_size)

    def kept_bytes(self, element_size: int, rows: int) -> int:
        """Bytes of the kept rows, over all layers of the group."""
        gates = 0 if self.shape is None else 4 * self.shape.gates
        columns = self.channels * (1 if self.shape is None else 2)
        return len(self.layers) * rows * (columns * element_size + gates)


def scan_shape(spec: Recurrent) -> ScanShape | None:
    """The shape of a layer's recurrence, whose columns are those behind its convolution; None if it has none."""
    if isinstance(spec, GatedDelta):
        q, k, *_ = spec.columns
        return ScanShape(spec.heads, spec.key_heads, spec.key_dim, spec.value_dim, 0, q, q + k, delta=True)
    if isinstance(spec, Mamba2):
        _, x, b, *_ = spec.columns
        return ScanShape(spec.heads, spec.groups, spec.state_dim, spec.head_dim, x + b, x, 0, delta=False)
    return None


def state_groups_of(decoder: Decoder) -> tuple[StateGroup, ...]:
    """The groups of the model's layers with recurrent states, in the order of their first layers."""
    layers: dict[tuple[ScanShape | None, int, int], list[int]] = {}
    for number, block in enumerate(decoder.blocks):
        if (spec := block.recurrent) is not None:
            key = scan_shape(spec), spec.convolution.channels, spec.convolution.taps
            layers.setdefault(key, []).append(number)
    return tuple(StateGroup(*key, tuple(numbers)) for key, numbers in layers.items())


def shares_states(decoder: Decoder) -> bool:
    """Whether the state after some tokens depends on these alone, and not on which of them are of a prompt."""
    limits = [block.recurrent.prompt_time_steps for block in decoder.blocks if isinstance(block.recurrent, Mamba2)]
    return all(least <= 0 and most == math.inf for least, most in limits)


def state_and_index(groups: Sequence[StateGroup]) -> dict[int, tuple[int, int]]:
    """For each recurrent layer, the number of its group, and its index in the group."""
    return {layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)}


@dataclass(frozen=True, eq=False)
class MatrixStates:
    """The matrices of a group's layers, for all slots.

    matrices [layers, slots, heads, key, value] fp32. kept_mixed [layers, ring, channels] and kept_gates [layers, ring,
    G] fp32: the results of convolutions and the gates of nodes. gates [rows, G] fp32: those of the step, one layer's at
    a time.
    """

    shape: ScanShape
    matrices: torch.Tensor
    kept_mixed: torch.Tensor
    kept_gates: torch.Tensor
    gates: torch.Tensor


class GroupStates:
    """The states of a group's layers, for all slots, and the kept rows of past steps.

    inputs [layers, slots, taps - 1, channels]: the last inputs of the convolutions. kept_inputs [layers, ring,
    channels]: those of nodes. `recurrence` is None for a convolution alone.
    """

    def __init__(self, group: StateGroup, slots: int, ring: int, rows: int, like: torch.Tensor) -> None:
        count, shape = len(group.layers), group.shape
        self.group = group
        self.inputs = like.new_zeros(count, slots, group.taps - 1, group.channels)
        self.kept_inputs = like.new_zeros(count, ring, group.channels)
        self.recurrence: MatrixStates | None = None
        if shape is not None:
            self.recurrence = MatrixStates(
                shape,
                matrices=like.new_zeros(count, slots, shape.heads, shape.key, shape.value, dtype=torch.float32),
                kept_mixed=torch.zeros_like(self.kept_inputs),
                kept_gates=like.new_zeros(count, ring, shape.gates, dtype=torch.float32),
                gates=like.new_zeros(rows, shape.gates, dtype=torch.float32),
            )


class RecurrentStates:
    """The states of all layers that have some: `slots` sequences may be open, and behind their states are those of
    `snapshots` snapshots. `ring` rows are kept."""

    def __init__(self, groups: Sequence[StateGroup], slots: int, snapshots: int, rows: int, like: torch.Tensor) -> None:
        """`rows` is the maximum number of rows of a step, `like` a tensor of the model's dtype on its device."""
        self.slots, self.snapshots, self.ring = slots, snapshots, KEPT_ROWS
        self.groups = [GroupStates(group, slots + snapshots, self.ring, rows, like) for group in groups]

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy the states of one slot, or snapshot, to another."""
        for states in self.groups:
            states.inputs[:, target].copy_(states.inputs[:, source])
            if states.recurrence is not None:
                states.recurrence.matrices[:, target].copy_(states.recurrence.matrices[:, source])

    def of_step(self, views: dict[str, torch.Tensor]) -> StepStates:
        """The states and rows of a step whose packet has these fields on the device."""
        reach = max(states.group.taps - 1 for states in self.groups)
        return StepStates(self, new_state_rows(views, reach, MOST_STATE_NODES, self.ring))


@dataclass(frozen=True)
class StepStates:
    """What recurrent layers need of a step: all states, and the step's rows."""

    memory: RecurrentStates
    rows: StateRows


def new_states(
    groups: Sequence[StateGroup], rows: int, like: torch.Tensor, *, share: bool = True
) -> RecurrentStates | None:
    """States for as many slots as memory allows, for steps of up to `rows` rows; None for a model without. `share`:
    with snapshots. Raises UnsupportedModelError if there is no room for a single one."""
    if not groups:
        return None
    size, free = like.element_size(), free_bytes(like.device)
    kept = sum(group.kept_bytes(size, KEPT_ROWS) for group in groups)
    each = sum(group.slot_bytes(size) for group in groups)
    room = CPU_BYTES if free is None else int(STATE_SHARE * free) - kept
    total = room // each
    snapshots = min(MOST_SNAPSHOTS, int(SNAPSHOT_SHARE * total)) if share else 0
    slots = min(MOST_SEQUENCES, total - snapshots)
    if slots < 1:
        raise UnsupportedModelError(
            f"the recurrent states of a sequence need {(each + kept) / 2**30:.2f} GiB, and a quarter of the free "
            f"memory is {max(0, room + kept) / 2**30:.2f} GiB; free some memory"
        )
    return RecurrentStates(groups, slots, snapshots, rows, like)
