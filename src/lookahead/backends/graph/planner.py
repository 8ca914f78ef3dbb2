"""The host half of the graph backend: which captured step serves the inputs, and what stands in its packet.

It knows slots and inputs, and nothing of the device but the numbers that the kind of a step depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import NamedTuple, Protocol

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kinds import Device, ForwardKind, StepKind, Targets, kind_of, stand_in
from lookahead.backends.graph.rules import Rules
from lookahead.backends.graph.sizes import MOST_NEEDED, PAGE
from lookahead.backends.graph.targets_packet import StepPacket
from lookahead.kv.slots import Slots

PATIENCE = 128
"""How often another step stands in for one that is not captured. A capture takes as long as 50 to 100 steps gain by it,
and far longer on a machine where a kernel has yet to be compiled or searched for."""


class Packets(Protocol):
    """The packets of all kinds of steps, in memory that the device reads."""

    def packet(self, kind: StepKind) -> StepPacket:
        """The packet of steps of this kind. The first call captures the step."""
        ...

    def has_captured(self, kind: ForwardKind) -> bool:
        """Whether a forward pass of this kind is captured."""
        ...


class Plan(NamedTuple):
    """A step that can run: its kind and its packet. `starts` are where the needed rows of each input begin, `lengths`
    the positions of its roots."""

    kind: StepKind
    packet: StepPacket
    starts: list[int]
    lengths: list[int]


class Planner:
    """Plans the steps of a backend whose passes have at most `most_rows` rows.

    With `patient`, an invariant pass is captured only when it has been asked for a number of times. Until then a larger
    one stands in for it.
    """

    def __init__(
        self, slots: Slots, rules: Rules, packets: Packets, device: Device, *, most_rows: int, patient: bool
    ) -> None:
        self.rules, self.device, self.patient = rules, device, patient
        self._slots, self._packets, self._most_rows = slots, packets, most_rows
        self._missed: Counter[ForwardKind] = Counter()  # how often a kind was asked for that was not captured

    def plan(self, inputs: Sequence[StepInput]) -> Plan:
        """Take the pages of a step of these inputs, choose its kind, and write its packet. Their prompt chunks then
        count as cached. The packet's last step has been read by the device."""
        # 1. Take the pages first: without them, nothing has happened yet.
        by_number, trees = self._slots.by_number, [item.tree for item in inputs]
        slots = [by_number[item.slot] for item in inputs]
        sizes, lengths = [tree.size for tree in trees], [slot.length for slot in slots]
        needs, chunks = list(map(add, lengths, sizes)), [item.chunk for item in inputs]
        if has_chunks := any(chunks):
            needs = [need + len(chunk) for need, chunk in zip(needs, chunks, strict=True)]
        self._check_rows(sizes, sum(needs) - sum(lengths))
        self._slots.need_pages(slots, needs, PAGE // 2)
        # 2. Choose the kind of the step. Its packet is that of all steps of this kind.
        for item in inputs:
            if item.adjustment is not None:
                self.rules.open(item)
        kind = self.kind(inputs, lengths)
        packet, ends, queries = filled = self._packets.packet(kind)
        # 3. The packet of the forward pass.
        packet.begin()
        starts = packet.put([slot.line for slot in slots], lengths, chunks, trees, queries)
        packet.end(*self._slots.take_pending(), self._slots.take_changes())
        # 4. How targets are chosen.
        if kind.targets.targets is not Targets.GREEDY:
            ends.put_draws(inputs)
        if kind.targets.adjusted:
            self.rules.put(ends, inputs)
            ends.end(packet)
        if has_chunks:
            for slot, chunk in zip(slots, chunks, strict=True):
                slot.length += len(chunk)  # now it is the root's position, where `commit` starts
            lengths = [slot.length for slot in slots]
        return Plan(kind, filled, starts, lengths)

    def kind(self, inputs: Sequence[StepInput], lengths: Sequence[int]) -> StepKind:
        """The kind of the captured step for these inputs, whose sequences have `lengths` tokens cached."""
        kind = kind_of(inputs, lengths, self.device)
        if not self.patient or not kind.forward.invariant or self._packets.has_captured(kind.forward):
            return kind
        self._missed[kind.forward] += 1
        if self._missed[kind.forward] > PATIENCE or any(item.continues_alone for item in inputs):
            return kind
        forward = stand_in(kind.forward, any(item.chunk for item in inputs), self._most_rows)
        return StepKind(forward, kind.targets._replace(needed=forward.needed))

    def take_pages_ahead(self, inputs: Sequence[StepInput]) -> bool:
        """Whether all sequences have pages for the token after their next one; if need be, they get some."""
        for item in inputs:
            slot = self._slots.by_number[item.slot]
            if slot.sent_room < slot.length + 2 and not self._slots.has_pages(slot, slot.length + 2):
                return False
        return True

    def _check_rows(self, sizes: Sequence[int], rows: int) -> None:
        """Raise ValueError for a step that does not fit into a pass."""
        if sum(sizes) > self._most_rows:
            raise ValueError(f"trees of {sum(sizes)} tokens in a pass of {self._most_rows}")
        if max(sizes) > MOST_NEEDED:
            raise ValueError(f"a tree of {max(sizes)} tokens; at most {MOST_NEEDED} are captured")
        if rows > self._most_rows:
            raise ValueError(
                f"a step of {rows} rows in a pass of {self._most_rows}; run long prompts with `backends.prompts`"
            )
