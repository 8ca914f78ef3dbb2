"""The host half of the graph backend: chooses the captured step for the inputs, and writes its packet.

It knows the slots and the inputs of a step. Of the device it knows only what determines the kind of a step
(`DeviceTraits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import NamedTuple, Protocol

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kinds import DeviceTraits, ForwardKind, Sampler, StepKind, fallback_kind, step_kind
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.rules import Rules
from lookahead.backends.graph.sizes import MOST_NEEDED, MOST_STATE_NODES, PAGE
from lookahead.backends.graph.targets_packet import StepPacket
from lookahead.kv.slots import Slot, Slots
from lookahead.kv.states import KeptRows

LAZY_CAPTURE = 128
"""`capture_after` of backends that capture lazily. A capture costs what 50 to 100 steps gain by it, and far more on a
machine where kernels have to be compiled or searched for first."""


class Packets(Protocol):
    """The packets of all kinds of steps, in memory that the device can read."""

    def packet(self, kind: StepKind) -> StepPacket:
        """The packet of steps of this kind. The first call captures the step."""
        ...

    def has_captured(self, kind: ForwardKind) -> bool:
        """Whether a forward pass of this kind is captured."""
        ...


class Plan(NamedTuple):
    """A step that is ready to run: its kind and its packet. `starts` are the indices of each input's first needed row,
    `lengths` the positions of the roots. `snapshots`: the states to copy after the step, and where to."""

    kind: StepKind
    packet: StepPacket
    starts: list[int]
    lengths: list[int]
    snapshots: Sequence[tuple[int, int]] = ()


class Planner:
    """Plans the steps of a backend whose passes have at most `most_rows` rows.

    With `capture_after`, an invariant pass is captured only after it was needed this many times; until then a larger
    captured pass is the fallback. 0 captures every pass when it is first needed.
    """

    def __init__(
        self, slots: Slots, rules: Rules, packets: Packets, device: DeviceTraits, *, most_rows: int, capture_after: int
    ) -> None:
        self.rules, self.device, self.capture_after = rules, device, capture_after
        self._slots, self._packets, self._most_rows = slots, packets, most_rows
        self._missed: Counter[ForwardKind] = Counter()  # how often a kind was needed before it was captured

    def plan(self, inputs: Sequence[StepInput]) -> Plan:
        """Reserve pages for a step of these inputs, choose its kind, and write its packet. Their prompt chunks then
        count as cached. The device must have read the previous packet of this kind."""
        # 1. Reserve pages first: if that fails, nothing has changed yet.
        by_number, trees = self._slots.by_number, [sequence.tree for sequence in inputs]
        slots = [by_number[sequence.slot] for sequence in inputs]
        sizes, lengths = [tree.size for tree in trees], [slot.length for slot in slots]
        needs, chunks, rows = list(map(add, lengths, sizes)), [sequence.chunk for sequence in inputs], sum(sizes)
        if has_chunks := any(chunks):
            needs = [need + len(chunk) for need, chunk in zip(needs, chunks, strict=True)]
            rows = sum(needs) - sum(lengths)
        self._check_rows(sizes, rows)
        if self._slots.kept is not None:
            for slot in slots:
                self._slots.kept.check_committed(slot.table_index, slot.kept)
        self._slots.require_pages(slots, needs, PAGE // 2)
        # 2. Choose the kind of the step. All steps of a kind share one packet.
        kind = self.choose_kind(inputs, lengths)
        if kind.targets.adjusted:
            for sequence in inputs:
                if sequence.adjustment is not None:
                    self.rules.open(sequence)
        packet, targets, queries = step_packet = self._packets.packet(kind)
        # 3. The packet of the forward pass.
        starts = packet.write_rows([slot.table_index for slot in slots], lengths, chunks, trees, queries)
        # 4. The packet of the targets graph.
        if kind.targets.sampler is not Sampler.GREEDY:
            targets.write_draws(inputs)
        if kind.targets.adjusted:
            self.rules.write(targets, inputs)
            targets.write_rules(packet)
        # 5. Moves and new pages, also those of other sequences: last, since they are lost if something above fails.
        packet.write_commits(*self._slots.take_pending(), self._slots.take_changes())
        if self._slots.kept is not None:
            self._write_states(packet, self._slots.kept, slots, inputs)
        if has_chunks:
            for slot, chunk in zip(slots, chunks, strict=True):
                slot.length += len(chunk)  # now it is the root's position, where `commit` starts
            lengths = [slot.length for slot in slots]
        return Plan(kind, step_packet, starts, lengths, self._snapshots(inputs, slots) if has_chunks else ())

    def _snapshots(self, inputs: Sequence[StepInput], slots: Sequence[Slot]) -> list[tuple[int, int]]:
        """The sequences whose prompt chunk ends with a page, and the places of their snapshots."""
        if (snapshots := self._slots.snapshots) is None:
            return []
        found = list[tuple[int, int]]()
        for sequence, slot in zip(inputs, slots, strict=True):
            if sequence.chunk and not slot.length % PAGE:
                place = snapshots.take(sequence.slot, slot.length // PAGE)
                if place is not None:
                    found.append((slot.table_index, place))
        return found

    def _write_states(self, packet: Packet, kept: KeptRows, slots: Sequence[Slot], inputs: Sequence[StepInput]) -> None:
        """Write what recurrent states need: the replays of accepted tokens, where this step's nodes are kept, and which
        tokens are of a prompt."""
        replays, prompts = kept.take_pending(), list[int]()
        base = first = kept.take(sum([sequence.tree.size for sequence in inputs]))
        for slot, sequence in zip(slots, inputs, strict=True):
            slot.kept = first
            first += sequence.tree.size
            known, chunk = sequence.prompt_tokens, len(sequence.chunk)
            until_root = slot.length + chunk + 1 if chunk or not slot.length else 0
            prompts.append(until_root if known is None else known)
        packet.write_states(base % kept.capacity, *replays, prompts)

    def choose_kind(self, inputs: Sequence[StepInput], lengths: Sequence[int]) -> StepKind:
        """The kind of captured step to run for these inputs, whose sequences have `lengths` cached tokens."""
        kind = step_kind(inputs, lengths, self.device)
        if not self.capture_after or not kind.forward.invariant or self._packets.has_captured(kind.forward):
            return kind
        self._missed[kind.forward] += 1
        if self._missed[kind.forward] > self.capture_after or any(sequence.continues_alone for sequence in inputs):
            return kind
        has_chunk = any(sequence.chunk for sequence in inputs)
        forward = fallback_kind(kind.forward, has_chunk=has_chunk, most=self._most_rows)
        return StepKind(forward, kind.targets._replace(needed=forward.needed))

    def reserve_ahead(self, inputs: Sequence[StepInput]) -> bool:
        """Reserve pages for the token after the next one of every sequence. False if there are too few."""
        for sequence in inputs:
            slot = self._slots.by_number[sequence.slot]
            if slot.sent_room < slot.length + 2 and not self._slots.reserve_pages(slot, slot.length + 2):
                return False
        return True

    def keep_ahead(self, inputs: Sequence[StepInput]) -> int:
        """Take the rows that a step ahead of these inputs keeps for recurrent states. Returns the first."""
        if (kept := self._slots.kept) is None:
            return 0
        slots = [self._slots.by_number[sequence.slot] for sequence in inputs]
        return kept.follow({slot.table_index: slot.kept for slot in slots})

    def continue_from(self, inputs: Sequence[StepInput], kept: int) -> None:
        """These inputs are those of a step ahead, whose kept rows begin here."""
        if self._slots.kept is None:
            return
        for index, sequence in enumerate(inputs):
            self._slots.by_number[sequence.slot].kept = kept + index

    def _check_rows(self, sizes: Sequence[int], rows: int) -> None:
        """Raise ValueError for a step that does not fit into a pass."""
        if sum(sizes) > self._most_rows:
            raise ValueError(f"trees of {sum(sizes)} tokens do not fit into a pass of {self._most_rows} rows")
        if max(sizes) > MOST_NEEDED:
            raise ValueError(f"a tree of {max(sizes)} tokens is too large; a captured step has at most {MOST_NEEDED}")
        if self._slots.kept is not None and sum(sizes) > MOST_STATE_NODES:
            raise ValueError(
                f"trees of {sum(sizes)} tokens are too large; a step of a model with recurrent states has at most "
                f"{MOST_STATE_NODES}"
            )
        if rows > self._most_rows:
            raise ValueError(
                f"a step of {rows} rows does not fit into a pass of {self._most_rows}; run long prompts with "
                "`backends.prompts`"
            )
