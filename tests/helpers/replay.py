"""A machine whose text and times are both known: it replays streams of tokens, and a clock advances by its curve."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from toys import ToyBackend

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Capabilities, StepInput

LEVELS = [2, 5, 7, 8, 9, 10, 11, 12]
"""The probability levels of the model's first, second, ... token."""


def words_of(path: Path) -> list[int]:
    """A text file as a stream of tokens: one for each word, number and sign."""
    ids: dict[str, int] = {}
    return [ids.setdefault(piece, len(ids)) for piece in re.findall(r"\w+|[^\w\s]", path.read_text())]


def unguessable(count: int, vocabulary: int = 64) -> list[int]:
    """A stream in which tokens repeat all the time, and no two of them ever follow each other twice."""
    rng, used, stream = random.Random(0), set[tuple[int, int]](), [0]
    while len(stream) < count:
        token = rng.choice([one for one in range(vocabulary) if (stream[-1], one) not in used])
        used.add((stream[-1], token))
        stream.append(token)
    return stream


class Replay:
    """Wants the next token of its stream after what is a beginning of the stream. After anything else it wants a token
    that has followed the last one somewhere in the stream; unless it is `forgetful`, and wants always the same."""

    def __init__(self, stream: Sequence[int], forgetful: bool = False) -> None:
        self.stream = stream
        counts = defaultdict[int, Counter[int]](Counter)
        for token, following in [] if forgetful else pairwise(stream):
            counts[token][following] += 1
        self._usual = {token: [one for one, _ in found.most_common(MAX_SUCCESSORS)] for token, found in counts.items()}

    def output(self, tree: TokenTree, root: int, top: bool) -> StepOutput:
        """What a backend returns for a tree whose root has this index in the stream."""
        on_stream = [False] * tree.size
        targets, rows = list[int](), list[list[int]]()
        tokens, parents, depths = tree.tokens, tree.parents, tree.depths
        for node in range(tree.size):
            above = node == 0 or on_stream[parents[node]]
            on_stream[node] = above and tokens[node] == self.stream[root + depths[node]]
        for node in tree.needed:
            usual = self._usual.get(tokens[node], self.stream[:1])
            target = self.stream[root + depths[node] + 1] if on_stream[node] else usual[0]
            likely = [target, *[one for one in usual if one != target]]
            likely += [one for one in self.stream[: 2 * MAX_SUCCESSORS] if one not in likely]
            targets.append(target)
            rows.append([*likely[:MAX_SUCCESSORS], *LEVELS])
        return StepOutput(targets, np.array(rows, dtype=np.int32) if top else None)


class Clock:
    """Stands still, except while a pass runs."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class ReplayBackend(ToyBackend):
    """Replays a model's stream. The n-th slot begins at `begins[n]`, and a pass takes what the `table` says.

    Before a pass the device waits for the `host`, unless it runs ahead. A pass that ran ahead and was not asked for is
    lost. `ahead` counts the passes that ran ahead, `lost` those that were lost.
    """

    def __init__(
        self,
        model: Replay,
        begins: Sequence[int],
        clock: Clock,
        table: Sequence[float],
        *,
        pads: bool = False,
        host: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self.begins, self.clock, self.table = model, begins, clock, table  # type: ignore[assignment]
        self.capabilities = Capabilities("replay", pads=pads, runs_ahead=host > 0)
        self.vocab_size, self.most_rows = 1 << 20, 512
        self.host, self.ahead, self.lost = host, 0, 0
        self._next_slots: list[int] = []  # of a step that already runs

    def launch(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        sizes, slots = [len(item.chunk) + item.tree.size for item in inputs], [item.slot for item in inputs]
        rows = len(sizes) * max(sizes) if self.capabilities.pads else sum(sizes)
        if self._next_slots == slots and rows == len(slots):
            self.ahead += 1
        else:
            self.lost += bool(self._next_slots)
            self.clock.now += self.host + (self.table[len(self._next_slots) - 1] if self._next_slots else 0.0)
        self.clock.now += self.table[rows - 1]
        self._next_slots = slots if all(item.continues_alone for item in inputs) else []
        return super().launch(inputs)

    def _read(self, item: StepInput) -> StepOutput:
        root = self.begins[item.slot - 1] + len(self.slots[item.slot]) + len(item.chunk)
        model: Replay = self.model  # type: ignore[assignment]
        return model.output(item.tree, root, item.top > 0)
