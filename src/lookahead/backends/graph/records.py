"""The layout of a packet's records: each field is named once, for the host and for the kernels.

A record is one row of a table, with one number per member of its enum. `kernels.records` reads them on the device.
"""

from __future__ import annotations

from enum import IntEnum


class SequenceRecord(IntEnum):
    """One sequence of a step, int32."""

    SLOT = 0
    """its slot in the page tables"""
    LENGTH = 1
    """its cached tokens"""
    FIRST_ROW = 2
    """its first row in the step"""
    CHUNK_ROWS = 3
    """rows of its prompt chunk, which come first"""
    NODES = 4
    """rows of its tree, which follow"""


class Tile(IntEnum):
    """A block of queries of one sequence, all from its prompt chunk or all from its tree, int32.

    A tile repeats fields of its sequence's record, because dependent loads would stall the program.
    """

    SLOT = 0
    """the sequence's slot in the page tables"""
    END = 1
    """tokens before the sequence's tree, including its prompt chunk"""
    FIRST_ROW = 2
    """first row of the prompt chunk or tree"""
    ROWS = 3
    """rows of the prompt chunk or tree"""
    BLOCK = 4
    """index of this block among the queries of the chunk or tree"""
    IS_TREE = 5
    """1 for a tree, 0 for a prompt chunk"""


class Draw(IntEnum):
    """Sampling parameters of a needed row, float64."""

    TEMPERATURE = 0
    """0 for the argmax"""
    TOP_K = 1
    """0 for all tokens"""
    TOP_P = 2
    """1 for all tokens"""
    MIN_P = 3
    """0 for all tokens"""
    UNIFORM = 4
    """the uniform random number of the draw, -1 for the argmax"""


class Rule(IntEnum):
    """Penalties and bias of a sequence, float32."""

    REPETITION = 0
    """the repetition penalty, 1 for none"""
    PRESENCE = 1
    """the presence penalty, 0 for none"""
    FREQUENCY = 2
    """the frequency penalty, 0 for none"""
    HAS_BIAS = 3
    """1 if the sequence has a logit bias, else 0"""


class Walk(IntEnum):
    """Tokens that follow each other, through which a recurrent state is updated, int32."""

    SLOT = 0
    """the state's slot"""
    FRESH = 1
    """1 if the first of the tokens begins its text, so that the state before it is zero"""
    BEGIN = 2
    """index of the first token in the list of rows (`order`)"""
    COUNT = 3
    """number of tokens"""
    WRITE_FROM = 4
    """the first of the tokens whose outputs this walk writes; others are written by other walks, or not needed"""
