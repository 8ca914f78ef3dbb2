"""The message that ranks exchange after a step: targets and top tokens of each share, in one fixed-size tensor."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import StepInput
from lookahead.parallel.group import Numbers
from lookahead.parallel.partition import Share

HEADER = 4
"""Integers before a rank's rows: step number, checksum of the inputs, number of rows, and the latest command batch."""
ROWS = 64
"""The fewest rows of the exchanged tensor, one row per needed node. A larger share gets the next power of two. 64 rows
with their top-8 tokens are 4.4 kB per rank, and the size almost never changes."""


@dataclass
class SharedStep:
    """A step in flight: its inputs, the shares of each, and the result of the inner backend's `launch`."""

    inputs: list[StepInput]
    shares: list[list[Share]]
    inner: Any


def pack(shared_step: SharedStep, results: Sequence[StepOutput], share: int, step: int, top: int) -> Numbers:
    """This rank's results: [HEADER + rows * (1 + 2 top)] integers, a row per needed node, then zeros."""
    width = 1 + 2 * top
    counts = [sum(len(one[rank].needed) for one in shared_step.shares) for rank in range(len(shared_step.shares[0]))]
    rows = max(ROWS, 1 << (max(counts) - 1).bit_length())
    packed = np.zeros(HEADER + rows * width, dtype=np.int32)
    packed[:3] = step & 0x7FFFFFFF, _checksum(shared_step.inputs), counts[share]
    body = packed[HEADER:].reshape(rows, width)
    start = 0
    for step_input, shares, result in zip(shared_step.inputs, shared_step.shares, results, strict=True):
        count = len(shares[share].needed)
        body[start : start + count, 0] = result.targets[:count]
        if step_input.top and count:
            assert result.top is not None
            body[start : start + count, 1 : 1 + result.top.shape[1]] = result.top[:count]
        start += count
    return packed


def unpack(shared_step: SharedStep, gathered: Numbers, top: int, vocabulary: int) -> list[StepOutput]:
    """The targets and top tokens of every input, each node's from its owner."""
    width = 1 + 2 * top
    bodies = gathered[:, HEADER:].reshape(len(gathered), -1, width)
    starts = [0] * len(gathered)
    outputs = []
    for step_input, shares in zip(shared_step.inputs, shared_step.shares, strict=True):
        index = {node: i for i, node in enumerate(step_input.tree.needed)}
        rows = np.empty((len(index), width), dtype=np.int32)
        for rank, share in enumerate(shares):
            count = len(share.needed)
            rows[[index[node] for node in share.needed]] = bodies[rank, starts[rank] : starts[rank] + count]
            starts[rank] += count
        top_tokens = rows[:, 1 : 1 + 2 * len_top(step_input, vocabulary)] if step_input.top else None
        outputs.append(StepOutput(rows[:, 0].tolist(), top_tokens))
    return outputs


def len_top(step_input: StepInput, vocabulary: int) -> int:
    """How many top tokens each needed node of this input has."""
    return min(step_input.top, vocabulary)


def _checksum(inputs: Sequence[StepInput]) -> int:
    """A 31-bit checksum of everything that determines the shares and targets. It takes a few microseconds."""
    crc = 0
    for step_input in inputs:
        tree = step_input.tree
        crc = zlib.crc32(array("q", [step_input.slot, *tree.tokens, *tree.parents, *tree.needed]), crc)
        crc = zlib.crc32(array("d", step_input.uniforms), crc)
    return crc & 0x7FFFFFFF
