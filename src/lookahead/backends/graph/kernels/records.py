"""Loads the fields of a packet's records in kernels; `backends.graph.records` documents them.

A kernel can use a global only if it is a constexpr: hence the second set of names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.records import Draw, Rule, SequenceRecord, Tile, Walk

SEQUENCE_SIZE = tl.constexpr(len(SequenceRecord))
SEQUENCE_SLOT = tl.constexpr(int(SequenceRecord.SLOT))
SEQUENCE_LENGTH = tl.constexpr(int(SequenceRecord.LENGTH))
SEQUENCE_FIRST_ROW = tl.constexpr(int(SequenceRecord.FIRST_ROW))
SEQUENCE_CHUNK_ROWS = tl.constexpr(int(SequenceRecord.CHUNK_ROWS))

TILE_SIZE = tl.constexpr(len(Tile))
TILE_SLOT = tl.constexpr(int(Tile.SLOT))
TILE_END = tl.constexpr(int(Tile.END))
TILE_FIRST_ROW = tl.constexpr(int(Tile.FIRST_ROW))
TILE_ROWS = tl.constexpr(int(Tile.ROWS))
TILE_BLOCK = tl.constexpr(int(Tile.BLOCK))
TILE_IS_TREE = tl.constexpr(int(Tile.IS_TREE))

DRAW_SIZE = tl.constexpr(len(Draw))
TEMPERATURE = tl.constexpr(int(Draw.TEMPERATURE))
TOP_K = tl.constexpr(int(Draw.TOP_K))
TOP_P = tl.constexpr(int(Draw.TOP_P))
MIN_P = tl.constexpr(int(Draw.MIN_P))
UNIFORM = tl.constexpr(int(Draw.UNIFORM))

WALK_SIZE = tl.constexpr(len(Walk))
WALK_SLOT = tl.constexpr(int(Walk.SLOT))
WALK_FRESH = tl.constexpr(int(Walk.FRESH))
WALK_BEGIN = tl.constexpr(int(Walk.BEGIN))
WALK_COUNT = tl.constexpr(int(Walk.COUNT))
WALK_WRITE_FROM = tl.constexpr(int(Walk.WRITE_FROM))

RULE_SIZE = tl.constexpr(len(Rule))
REPETITION = tl.constexpr(int(Rule.REPETITION))
PRESENCE = tl.constexpr(int(Rule.PRESENCE))
FREQUENCY = tl.constexpr(int(Rule.FREQUENCY))
HAS_BIAS = tl.constexpr(int(Rule.HAS_BIAS))


@triton.jit
def load_sequence(sequences, sequence, used):
    """Page-table slot, cached tokens, rows of the prompt chunk and first row of the sequences `sequence` [n], each [n];
    0 where `used` [n] is false."""
    record = sequences + sequence * SEQUENCE_SIZE
    slot = tl.load(record + SEQUENCE_SLOT, mask=used, other=0)
    length = tl.load(record + SEQUENCE_LENGTH, mask=used, other=0)
    chunk = tl.load(record + SEQUENCE_CHUNK_ROWS, mask=used, other=0)
    first_row = tl.load(record + SEQUENCE_FIRST_ROW, mask=used, other=0)
    return slot, length, chunk, first_row


@triton.jit
def load_root(sequences, sequence):
    """The row of a sequence's root, which comes after its chunk."""
    record = sequences + sequence * SEQUENCE_SIZE
    return tl.load(record + SEQUENCE_FIRST_ROW) + tl.load(record + SEQUENCE_CHUNK_ROWS)


@triton.jit
def load_tile(tiles, tile, BLOCK_M: tl.constexpr):
    """End, first row, rows, first query, is_tree and page-table slot of a tile of BLOCK_M queries."""
    record = tiles + TILE_SIZE * tile
    end, first_row = tl.load(record + TILE_END), tl.load(record + TILE_FIRST_ROW)
    rows, first_query = tl.load(record + TILE_ROWS), tl.load(record + TILE_BLOCK) * BLOCK_M
    is_tree, slot = tl.load(record + TILE_IS_TREE), tl.load(record + TILE_SLOT)
    return end, first_row, rows, first_query, is_tree, slot


@triton.jit
def load_walk(walks, walk):
    """Slot, freshness, begin, number of tokens and first written token of a walk."""
    record = walks + WALK_SIZE * walk
    slot, fresh = tl.load(record + WALK_SLOT), tl.load(record + WALK_FRESH)
    begin, count = tl.load(record + WALK_BEGIN), tl.load(record + WALK_COUNT)
    return slot, fresh, begin, count, tl.load(record + WALK_WRITE_FROM)


@triton.jit
def store_walk(walks, walk, slot, fresh, begin, count, write_from, mask):
    """Write the walks of these numbers [n], each field [n], where `mask` is true."""
    record = walks + WALK_SIZE * walk
    tl.store(record + WALK_SLOT, slot, mask=mask)
    tl.store(record + WALK_FRESH, fresh, mask=mask)
    tl.store(record + WALK_BEGIN, begin, mask=mask)
    tl.store(record + WALK_COUNT, count, mask=mask)
    tl.store(record + WALK_WRITE_FROM, write_from, mask=mask)


@triton.jit
def draw_setting(settings, row, FIELD: tl.constexpr):
    """A sampling parameter of a row: TEMPERATURE, TOP_K, TOP_P, MIN_P or UNIFORM."""
    return tl.load(settings + row * DRAW_SIZE + FIELD)


@triton.jit
def adjusting_rule(rules, sequence, FIELD: tl.constexpr):
    """A penalty of a sequence, REPETITION, PRESENCE or FREQUENCY, or HAS_BIAS."""
    return tl.load(rules + sequence * RULE_SIZE + FIELD)
