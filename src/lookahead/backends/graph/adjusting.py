"""Penalties, biases and masks on the device: what its tables say of the sequences whose logits are adjusted.

A sequence with penalties or a bias has a *line* in two tables: how often each token of the vocabulary occurs in its
text, and what is added to the token's logit. The line is written once, from the text so far. Later the packets of its
steps bring the tokens that were accepted meanwhile, and the step counts them. Masks are sent anew with every step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.graph.kernels import reference_draw
from lookahead.backends.graph.kernels.reference_draw import IN_PROMPT
from lookahead.backends.graph.kernels.rows import TreeRows
from lookahead.backends.graph.sizes import MOST_NEEDED
from lookahead.backends.graph.targets_packet import NO_MASK, NO_RULES, TargetsPacket
from lookahead.backends.sampling import allowed_rows
from lookahead.config import SamplingParams

FIRST_LINES = 64
"""Lines of the tables at first. They double when there are too few. A line of 150,000 tokens takes 1.2 MB."""


@dataclass(slots=True)
class RulesLine:
    """A sequence's line in the tables. The first `counted` tokens of its text are counted there."""

    number: int
    counted: int = 0


class Adjusting:
    """The tables on the device, and the kernels that use them (see `kernels.adjust` for their shapes).

    Without `compiled` the kernels' slow twins run.
    """

    def __init__(self, vocabulary: int, device: torch.device, compiled: bool) -> None:
        self.vocabulary, self._device = vocabulary, device
        self.counts = torch.zeros(FIRST_LINES, vocabulary, dtype=torch.int32, device=device)
        self.bias = torch.zeros(FIRST_LINES, vocabulary, dtype=torch.float32, device=device)
        self._free = list(range(FIRST_LINES - 1, -1, -1))
        words = -(-vocabulary // 32)
        pinned = device.type == "cuda"
        self.masks = torch.zeros(MOST_NEEDED, words, dtype=torch.int32, device=device)
        self._host_masks = torch.zeros(MOST_NEEDED, words, dtype=torch.int32, pin_memory=pinned)
        self._mask_rows: npt.NDArray[np.uint32] = self._host_masks.numpy().view(np.uint32)
        self._masks = 0  # how many masks the next step has
        self._bans: dict[frozenset[int], int] = {}  # end tokens -> the next step's mask that allows all others
        self._kernels: Any = reference_draw
        if compiled:
            from lookahead.backends.graph.kernels import adjust

            self._kernels = adjust

    # Lines.

    @property
    def full(self) -> bool:
        """Whether the next `take` makes the tables anew. No captured step may use the old ones then."""
        return not self._free

    def take(self) -> int:
        """A line for a sequence."""
        if not self._free:
            self.grow(2 * len(self.counts))
        return self._free.pop()

    def grow(self, lines: int) -> None:
        """Replace the tables by larger ones, with this number of lines. Captured steps still read the old ones."""
        before = len(self.counts)
        grown = [
            torch.cat([table, table.new_zeros(lines - before, self.vocabulary)]) for table in (self.counts, self.bias)
        ]
        self.counts, self.bias = grown
        self._free = [*range(lines - 1, before - 1, -1), *self._free]

    @property
    def lines(self) -> int:
        """How many sequences have room in the tables."""
        return len(self.counts)

    def give_back(self, line: int) -> None:
        self._free.append(line)

    def write(self, line: int, params: SamplingParams, adjustment: Adjustment) -> None:
        """Write a sequence's line: the tokens of its text, and its bias."""
        text, size = np.asarray(adjustment.text, np.int64), self.vocabulary
        counts = np.bincount(text[adjustment.prompt_tokens :], minlength=size).astype(np.int32)
        counts[text[: adjustment.prompt_tokens]] |= IN_PROMPT
        self.counts[line].copy_(torch.from_numpy(counts))
        if params.bias:
            bias = np.zeros(size, np.float32)
            for token, value in params.bias:
                bias[token] = value
            self.bias[line].copy_(torch.from_numpy(bias))

    # A step's packet.

    def put(self, packet: TargetsPacket, lines: Mapping[int, RulesLine], items: Sequence[StepInput]) -> None:
        """Write how a step's logits are adjusted, and the tokens of its texts that are not counted yet. `lines` are
        those of the slots that have one."""
        packet.begin()
        self._masks = 0
        self._bans.clear()
        for item in items:
            self._put(packet, lines.get(item.slot), item)

    def _put(self, packet: TargetsPacket, line: RulesLine | None, item: StepInput) -> None:
        """The part of one input."""
        adjustment = item.adjustment
        if adjustment is None:
            packet.put_rules(-1, NO_RULES, NO_MASK * len(item.tree.needed))
            return
        text = adjustment.text
        if line is not None:
            if not line.counted or not packet.put_counted(line.number, text[line.counted :]):
                self.write(line.number, item.sampling, adjustment)
            line.counted = len(text)
        packet.put_rules(
            -1 if line is None else line.number, rules_of(item.sampling), self.put_masks(adjustment, item.tree)
        )

    def put_masks(self, adjustment: Adjustment, tree: TokenTree) -> array[int]:
        """Note what a sequence allows after its tree's needed nodes. Returns the number of each node's mask, or -1."""
        count, end_depth = len(tree.needed), adjustment.end_depth
        if adjustment.mask is None and end_depth <= 0:
            return NO_MASK * count
        first, depths = self._masks, [tree.depths[node] for node in tree.needed]
        if adjustment.mask is None:  # all rows that ban the same end tokens have one mask
            if adjustment.ends not in self._bans:
                self._bans[adjustment.ends] = first
                self._mask_rows[first] = allowed_rows(adjustment, [0], self.vocabulary)
                self._masks += 1
            ban = self._bans[adjustment.ends]
            return array("i", [ban if depth < end_depth else -1 for depth in depths])
        self._mask_rows[first : first + count] = allowed_rows(adjustment, depths, self.vocabulary)
        self._masks += count
        return array("i", range(first, first + count))

    def send_masks(self) -> None:
        """Send the masks of a step to the device, before it runs."""
        if self._masks:
            self.masks[: self._masks].copy_(self._host_masks[: self._masks], non_blocking=True)

    # On the device, within a step.

    def count(self, views: dict[str, torch.Tensor]) -> None:
        """Count the accepted tokens that came with the packet."""
        self._kernels.count_tokens(self.counts, *views["counted"])

    def adjust(self, logits: torch.Tensor, scores: torch.Tensor, views: dict[str, torch.Tensor]) -> None:
        """Adjusted logits [R, V] to `scores`."""
        rows = TreeRows(views["entries"], views["entry_of"], views["parents"])
        packet = (views[name] for name in ("line_of", "rules"))
        tables = self.counts, self.bias, self.masks
        self._kernels.adjust(logits, scores, views["needed"], rows, views["tokens"], *packet, *tables, views["mask_of"])


def rules_of(params: SamplingParams) -> Sequence[float]:
    """A sequence's `rules`; see `kernels.adjust`."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty, float(bool(params.logit_bias))
