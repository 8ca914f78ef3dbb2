"""Load the fields of a packet's records in kernels; `backends.graph.records` says what they mean.

A kernel can use a global only if it is a constexpr: hence the second names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.records import Draw, Entry, Rule, Tile

ENTRY_SIZE = tl.constexpr(len(Entry))
ENTRY_LINE = tl.constexpr(int(Entry.LINE))
ENTRY_LENGTH = tl.constexpr(int(Entry.LENGTH))
ENTRY_FIRST_ROW = tl.constexpr(int(Entry.FIRST_ROW))
ENTRY_CHUNK_ROWS = tl.constexpr(int(Entry.CHUNK_ROWS))

TILE_SIZE = tl.constexpr(len(Tile))
TILE_LINE = tl.constexpr(int(Tile.LINE))
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

RULE_SIZE = tl.constexpr(len(Rule))
REPETITION = tl.constexpr(int(Rule.REPETITION))
PRESENCE = tl.constexpr(int(Rule.PRESENCE))
FREQUENCY = tl.constexpr(int(Rule.FREQUENCY))
HAS_BIAS = tl.constexpr(int(Rule.HAS_BIAS))


@triton.jit
def load_entry(entries, entry, used):
    """Of the entries `entry` [n]: their line in the page tables, cached tokens, rows of the prompt chunk and first row,
    each [n]; 0 where `used` [n] says that there is no entry."""
    record = entries + entry * ENTRY_SIZE
    line = tl.load(record + ENTRY_LINE, mask=used, other=0)
    length = tl.load(record + ENTRY_LENGTH, mask=used, other=0)
    chunk = tl.load(record + ENTRY_CHUNK_ROWS, mask=used, other=0)
    first_row = tl.load(record + ENTRY_FIRST_ROW, mask=used, other=0)
    return line, length, chunk, first_row


@triton.jit
def load_root(entries, entry):
    """The row of an entry's root, which comes after its chunk."""
    record = entries + entry * ENTRY_SIZE
    return tl.load(record + ENTRY_FIRST_ROW) + tl.load(record + ENTRY_CHUNK_ROWS)


@triton.jit
def load_tile(tiles, tile, BLOCK_M: tl.constexpr):
    """Of a tile of BLOCK_M queries: its end, first row, rows, first query, whether it is a tree's, and its line in the
    page tables."""
    record = tiles + TILE_SIZE * tile
    end, first_row = tl.load(record + TILE_END), tl.load(record + TILE_FIRST_ROW)
    rows, first_query = tl.load(record + TILE_ROWS), tl.load(record + TILE_BLOCK) * BLOCK_M
    is_tree, line = tl.load(record + TILE_IS_TREE), tl.load(record + TILE_LINE)
    return end, first_row, rows, first_query, is_tree, line


@triton.jit
def draw_setting(settings, row, FIELD: tl.constexpr):
    """One of the settings by which a row's target is drawn: TEMPERATURE, TOP_K, TOP_P, MIN_P or UNIFORM."""
    return tl.load(settings + row * DRAW_SIZE + FIELD)


@triton.jit
def adjusting_rule(rules, entry, FIELD: tl.constexpr):
    """One of the rules by which an entry's logits are adjusted: REPETITION, PRESENCE, FREQUENCY or HAS_BIAS."""
    return tl.load(rules + entry * RULE_SIZE + FIELD)
