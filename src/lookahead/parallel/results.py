"""What ranks exchange after a step: the targets and top tokens of each rank's share, in one tensor of a fixed size."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import StepInput
from lookahead.parallel.deal import Share
from lookahead.parallel.group import Numbers

HEADER = 4
"""Integers before a rank's rows: the step's number, a checksum of its inputs, the number of rows, and a word."""
ROWS = 64
"""The fewest rows of the exchanged tensor, one row per needed node. A larger share gets the next power of two. 64 rows
with their top-8 tokens are 4.4 kB per rank, and the size almost never changes."""


@dataclass
class SharedStep:
    """A step that is running: its inputs, the shares of each, and what the inner backend's `launch` returned."""

    inputs: list[StepInput]
    shares: list[list[Share]]
    inner: Any


def pack(shared_step: SharedStep, results: Sequence[StepOutput], share: int, step: int, top: int) -> Numbers:
    """This rank's results: [HEADER + rows * (1 + 2 top)] integers, a row per needed node, then zeros."""
    width = 1 + 2 * top
    counts = [sum(len(part[rank].needed) for part in shared_step.shares) for rank in range(len(shared_step.shares[0]))]
    rows = max(ROWS, 1 << (max(counts) - 1).bit_length())
    packed = np.zeros(HEADER + rows * width, dtype=np.int32)
    packed[:3] = step & 0x7FFFFFFF, _checksum(shared_step.inputs), counts[share]
    body = packed[HEADER:].reshape(rows, width)
    start = 0
    for item, shares, result in zip(shared_step.inputs, shared_step.shares, results, strict=True):
        count = len(shares[share].needed)
        body[start : start + count, 0] = result.targets[:count]
        if item.top and count:
            assert result.top is not None
            body[start : start + count, 1 : 1 + result.top.shape[1]] = result.top[:count]
        start += count
    return packed


def unpack(shared_step: SharedStep, gathered: Numbers, top: int, vocabulary: int) -> list[StepOutput]:
    """The targets and top tokens of every input, each node's from the rank that answers for it."""
    width = 1 + 2 * top
    bodies = gathered[:, HEADER:].reshape(len(gathered), -1, width)
    starts = [0] * len(gathered)
    outputs = []
    for item, shares in zip(shared_step.inputs, shared_step.shares, strict=True):
        place = {node: i for i, node in enumerate(item.tree.needed)}
        rows = np.empty((len(place), width), dtype=np.int32)
        for rank, share in enumerate(shares):
            count = len(share.needed)
            rows[[place[node] for node in share.needed]] = bodies[rank, starts[rank] : starts[rank] + count]
            starts[rank] += count
        top_tokens = rows[:, 1 : 1 + 2 * len_top(item, vocabulary)] if item.top else None
        outputs.append(StepOutput(rows[:, 0].tolist(), top_tokens))
    return outputs


def len_top(item: StepInput, vocabulary: int) -> int:
    """How many top tokens each needed node of this input has."""
    return min(item.top, vocabulary)


def _checksum(inputs: Sequence[StepInput]) -> int:
    """A 31-bit checksum of all that decides the shares and the targets. It takes a few microseconds."""
    crc = 0
    for item in inputs:
        tree = item.tree
        crc = zlib.crc32(array("q", [item.slot, *tree.tokens, *tree.parents, *tree.needed]), crc)
        crc = zlib.crc32(array("d", item.uniforms), crc)
    return crc & 0x7FFFFFFF
