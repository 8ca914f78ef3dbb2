"""A model that replays a known stream of tokens, for steps whose times and texts are both known beforehand."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import TokenTree

LEVELS = [2, 5, 7, 8, 9, 10, 11, 12]
"""The probability levels of the model's first, second, ... token."""


def words_of(path: Path) -> list[int]:
    """A text file as a stream of tokens: one for each word, number and sign."""
    ids: dict[str, int] = {}
    return [ids.setdefault(piece, len(ids)) for piece in re.findall(r"\w+|[^\w\s]", path.read_text())]


def noise(count: int, vocabulary: int = 64, seed: int = 0) -> list[int]:
    """A stream that repeats its tokens all the time and never goes on as it did before, except by chance."""
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]


class Replay:
    """Wants the next token of its stream after what is a beginning of the stream. After anything else it wants a token
    that has followed the last one somewhere in the stream."""

    def __init__(self, stream: Sequence[int]) -> None:
        self.stream = stream
        counts = defaultdict[int, Counter[int]](Counter)
        for token, following in pairwise(stream):
            counts[token][following] += 1
        self._usual = {token: [one for one, _ in found.most_common(KEPT_TOKENS)] for token, found in counts.items()}

    def output(self, sequence: DecodingSequence, tree: TokenTree, begin: int) -> StepOutput:
        """What a backend returns for a tree of a sequence whose prompt begins at this index of the stream."""
        root = begin + len(sequence.tokens) - 1
        on_stream = [False] * len(tree)
        targets, top = list[int](), list[list[int]]()
        tokens, parents, depths = tree.tokens, tree.parents, tree.depths
        for node in range(len(tree)):
            above = node == 0 or on_stream[parents[node]]
            on_stream[node] = above and tokens[node] == self.stream[root + depths[node]]
        for node in tree.needed:
            usual = self._usual.get(tokens[node], self.stream[:1])
            target = self.stream[root + depths[node] + 1] if on_stream[node] else usual[0]
            likely = [target, *[one for one in usual if one != target]]
            likely += [one for one in self.stream[: 2 * KEPT_TOKENS] if one not in likely]
            targets.append(target)
            top.append([*likely[:KEPT_TOKENS], *LEVELS])
        return StepOutput(targets, np.array(top, dtype=np.int32) if sequence.wants_top else None)

    def run(self, sequence: DecodingSequence, tree: TokenTree, begin: int) -> int:
        """Let a sequence absorb a step. Returns how many tokens it gained."""
        verdict = sequence.absorb(tree, self.output(sequence, tree, begin))
        sequence.count(tree, verdict)
        sequence.learn_while_running()
        return len(verdict.tokens)
