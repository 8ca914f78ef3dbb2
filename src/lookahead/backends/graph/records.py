"""What the numbers of a packet's records mean: each field is named once, for the host and for the kernels.

A record is one line of a table, of as many numbers as its enum has fields. `kernels.records` reads them on the device.
"""

from __future__ import annotations

from enum import IntEnum


class Entry(IntEnum):
    """One sequence's part of a step, int32."""

    LINE = 0
    """its line in the page tables"""
    LENGTH = 1
    """its cached tokens"""
    FIRST_ROW = 2
    """its first row in the step"""
    CHUNK_ROWS = 3
    """how many rows its prompt chunk has, which come first"""
    NODES = 4
    """how many rows its tree has, which come next"""


class Tile(IntEnum):
    """A block of queries of one entry, all of its prompt chunk or all of its tree, int32.

    A tile repeats what its entry says, because a program that has to look up one after the other waits.
    """

    LINE = 0
    """its sequence's line in the page tables"""
    END = 1
    """the tokens before its sequence's tree, those of the prompt chunk included"""
    FIRST_ROW = 2
    """the first row of the prompt chunk or tree that it is part of"""
    ROWS = 3
    """how many rows that prompt chunk or tree has"""
    BLOCK = 4
    """which block of the chunk's or tree's queries it is"""
    IS_TREE = 5
    """1 for a tree, 0 for a prompt chunk"""


class Draw(IntEnum):
    """How a needed row's target is drawn, float64."""

    TEMPERATURE = 0
    """0 for the argmax"""
    TOP_K = 1
    """0 for all tokens"""
    TOP_P = 2
    """1 for all tokens"""
    MIN_P = 3
    """0 for all tokens"""
    UNIFORM = 4
    """the random number that decides, -1 for the argmax"""


class Rule(IntEnum):
    """How an entry's logits are adjusted, float32."""

    REPETITION = 0
    """the repetition penalty, 1 for none"""
    PRESENCE = 1
    """the presence penalty, 0 for none"""
    FREQUENCY = 2
    """the frequency penalty, 0 for none"""
    HAS_BIAS = 3
    """1 if its line of the table of biases is added, else 0"""
