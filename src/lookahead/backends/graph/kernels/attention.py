"""Tree attention over paged prefixes: FlashAttention, split over the keys (Flash-Decoding), masked by ancestor bits.

A dense mask would be as long as the context, and nearly all ones. Here the prefix needs no mask, because every node
sees all of it. Only the K nodes of a tree need one: K x K bits, packed into words, 2 KB at K = 128.

    keys      | prefix block 0 | 1 | 2 | 3 | ... | tree |
    programs  |  split 0       | 1 | 0 | 1 | ... |  1   |   (two splits)

The prefix lies in pages, listed in a page table per sequence; a block of keys never crosses a page. A *tile* is a block
of queries of one sequence. The programs of the grid share a list of tiles on the device.

The work of a tile is divided into splits that run in parallel. Of n splits, each takes every n-th block of the prefix,
so that the end of a block does not depend on the context length. The last split takes the tree as well. In a long
context more splits take part after the first blocks (`tiles.NEAR_BLOCKS`). The last split waits for the others and
joins all partial sums by their log-sum-exp. With many tiles, one program handles all splits of a tile, one after the
other; in an invariant step with the same bits. The prefix's length is read on the device, so that one captured graph
serves all lengths. With a sliding window, or in chunks, a tile starts at the block of the lowest key that one of its
rows sees. Earlier blocks would add exact zeros, and their pages may belong to another sequence by now. A logit without
a value (an attention sink) is added by the last split, after all keys.

Invariant steps: a token that is decoded alone finds its ancestors in the prefix, not in a tree. Sums are rounded, so
adding its keys in another order would change bits, and in half precision soon the text. An *invariant* step
(`Tiles.near_keys`) therefore adds every row's keys in one order:

    keys      | prefix block 0 | 1 | ... | 64 keys before the row's block of 16 positions; that block up to the row |
    programs  |  split 0       | 1 | ... |  one more                                                                |

The matrix units add 16 keys at once, so the order is that of blocks of 16 positions. The first part's end, the
*border*, depends on the row's position only, and lies within the prefix, because no draft token is deeper than 64. The
second part may lie in the prefix, in the tree, or in both. Of a block that reaches into the tree the keys are collected
along the row's path, each at the offset of its position (see `paths`), so that it does not matter where it is stored. A
prompt chunk's rows are treated alike: their keys are written before attention begins, so the keys before a row are its
prefix, regardless of the pass that computed them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.near import add_near, add_tree
from lookahead.backends.graph.kernels.paths import LENGTH, list_size, most_blocks_of, most_nodes_of, most_paths_of
from lookahead.backends.graph.kernels.prefix import add_all_splits, add_bounded_splits, add_split, splits_in_use
from lookahead.backends.graph.kernels.records import load_tile
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.kernels.softmax import LOG2E, LOWEST, add_sink, join, no_keys, oldest_key
from lookahead.backends.graph.kernels.tiles import Tiles
from lookahead.backends.graph.kernels.workspace import Workspace, padded_dim

STAGGER_FROM = tl.constexpr(6)
"""From this many programs per multiprocessor on, staggering them pays (see `_add_unsplit`)."""


@triton.jit
def _add_unsplit(
    prefix_last, query, text, rows, cut, tree, listed, scoring,
    HEAD: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr, BOUNDED: tl.constexpr, NEAR_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """A tile in one program: the sums over the prefix, and those over near keys and the tree.

    With `prefix_last` the prefix comes second. The prefix is memory-bound and the near keys are compute-bound, so it is
    faster if some programs work on the one while others work on the other.
    """
    _end, _first_row, _row, _count, is_tree, _token, _position, _border, _oldest = rows
    BLOCK_M: tl.constexpr = query.shape[0]
    DIM: tl.constexpr = query.shape[1]
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    own_top, own_total, own_acc = no_keys(BLOCK_M, DIM)
    for turn in range(0, 2):
        if turn == prefix_last:
            if BOUNDED:
                top, mass, acc = add_bounded_splits(
                    query, text, rows, cut, scoring, HEAD, BLOCK_N, PART_N, NEAR_KEYS > 0, PAGE
                )
            else:
                top, mass, acc = add_all_splits(
                    query, text, rows, cut, scoring, HEAD, BLOCK_N, PART_N, NEAR_KEYS > 0, PAGE
                )
        elif NEAR_KEYS > 0:
            own_top, own_total, own_acc = add_near(query, text, rows, listed, scoring, HEAD, PART_N, BOUNDED, PAGE)
        elif is_tree == 1:
            own_top, own_total, own_acc = add_tree(
                query, text, rows, tree, scoring, (own_top, own_total, own_acc), HEAD, BOUNDED, PAGE
            )
    return top, mass, acc, own_top, tl.max(own_total, 1), own_acc


@triton.jit
def _attend_tile(
    tile, prefix_last, q, cache, step, lists, sinks, out, work, scoring, sizes,
    GROUP: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PART_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, NEAR_KEYS: tl.constexpr, PAGE: tl.constexpr,
    UNSPLIT: tl.constexpr,
):  # fmt: skip
    """This program's part of a tile: one K/V head, and one split or (with UNSPLIT) all of them.

    Arguments of `prefix` and `near` are passed in tuples. `text`: the location of the sequence's K/V. `rows`: the
    tile's BLOCK_M pairs of row and head, and what they see. `cut`: the blocks of the prefix, and the splits that share
    them.
    """
    BOUNDED: tl.constexpr = WINDOW + CHUNK > 0
    head, split = tl.program_id(0), tl.program_id(2)
    keys, values = cache
    _counts, tiles, tables, positions, cells, bits = step
    part, part_top, arrived = work
    longest, kv_heads, splits, near_splits, words, list_length, most_paths, most_blocks = sizes
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD
    # 1. The tile's queries: pair i is row i // GROUP of a chunk or a tree, and head i % GROUP of the group that
    # shares these keys. A row sees the keys before `end` up to its own position.
    end, first_row, count, first_pair, is_tree, slot = load_tile(tiles, tile, BLOCK_M)
    table = tables + slot * longest
    pair = first_pair + tl.arange(0, BLOCK_M)
    token = pair // GROUP
    real = token < count
    token = tl.minimum(token, count - 1)
    row = first_row + token
    position = tl.load(positions + row)
    # Keys before `border` are the splits', later ones the last program's. It depends on the row's position only.
    border = tl.minimum(position + 1, end)
    if NEAR_KEYS > 0:
        border = tl.minimum(tl.maximum(position // LENGTH * LENGTH - NEAR_KEYS, 0), end // LENGTH * LENGTH)
    blocks = tl.cdiv(tl.max(border, 0), BLOCK_N)
    live = splits_in_use(blocks, splits, near_splits)
    if NEAR_KEYS == 0:
        live = tl.maximum(live, 1)
    if UNSPLIT or (split < live) | (split >= splits):
        text = keys, values, table, longest, head, kv_heads
        rows = end, first_row, row, count, is_tree, token, position, border, oldest_key(position, WINDOW, CHUNK)
        cut, tree = (blocks, splits, near_splits), (cells, positions, bits, words)
        listed = lists + tile * list_length, most_paths, most_blocks, first_pair // GROUP
        query_index = (row * kv_heads + head) * GROUP + pair % GROUP
        query = tl.load(q + query_index[:, None] * HEAD + dim[None, :], mask=in_head[None, :], other=0.0)
        # 2. This program's keys: a split of the prefix, the near keys (in the program after all splits), or with
        # UNSPLIT everything. The last split of a step that is not invariant takes the tree as well.
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        own_top, own_mass, own_acc = top, mass, acc
        if UNSPLIT:
            top, mass, acc, own_top, own_mass, own_acc = _add_unsplit(
                prefix_last, query, text, rows, cut, tree, listed, scoring,
                HEAD, BLOCK_N, PART_N, BOUNDED, NEAR_KEYS, PAGE,
            )  # fmt: skip
        elif split < splits:
            own_top, total, own_acc = add_split(
                query, text, rows, cut, split, scoring, HEAD, BLOCK_N, BOUNDED, NEAR_KEYS > 0, PAGE
            )  # fmt: skip
            if NEAR_KEYS == 0:  # noqa: SIM102 (the outer condition is known at compile time)
                if (split == live - 1) & (is_tree == 1):
                    own_top, total, own_acc = add_tree(
                        query, text, rows, tree, scoring, (own_top, total, own_acc), HEAD, BOUNDED, PAGE
                    )  # fmt: skip
            own_mass = tl.max(total, 1)
        elif NEAR_KEYS > 0:
            own_top, total, own_acc = add_near(query, text, rows, listed, scoring, HEAD, PART_N, BOUNDED, PAGE)
            own_mass = tl.max(total, 1)
        # 3. All splits but the last store their partial sums. The last one waits for them and joins them, in the order
        # of the splits, and then its own. It must be the last to start: if waiting programs filled the device, it would
        # deadlock. (The other splits never wait.) A split without keys in a sliding window stores empty sums.
        others = 0 if UNSPLIT else (live if NEAR_KEYS > 0 else live - 1)
        first_part = query_index * tl.num_programs(2)
        counter = arrived + tile * kv_heads + head
        if split < others:
            tl.store(part + (first_part + split)[:, None] * DIM + dim[None, :], own_acc, mask=real[:, None])
            tl.store(part_top + (first_part + split) * 2, own_top, mask=real)
            tl.store(part_top + (first_part + split) * 2 + 1, own_mass, mask=real)
            tl.debug_barrier()
            tl.atomic_add(counter, 1, sem="release")
        else:
            if others > 0:
                while tl.atomic_add(counter, 0, sem="acquire") < others:
                    pass
                tl.store(counter, 0)
                for i in tl.range(0, others, loop_unroll_factor=2):
                    # `.cg` bypasses the L1 cache, which may hold stale data.
                    at = part_top + (first_part + i) * 2
                    its_top = tl.load(at, mask=real, other=LOWEST, cache_modifier=".cg")
                    its_mass = tl.load(at + 1, mask=real, other=0.0, cache_modifier=".cg")
                    at = part + (first_part + i)[:, None] * DIM + dim[None, :]
                    its_acc = tl.load(at, mask=real[:, None], other=0.0, cache_modifier=".cg")
                    top, mass, acc = join((top, mass, acc), (its_top, its_mass, its_acc))
            top, mass, acc = join((top, mass, acc), (own_top, own_mass, own_acc))
            if sinks is not None:
                sink = tl.load(sinks + head * GROUP + pair % GROUP).to(tl.float32) * LOG2E
                top, mass, acc = add_sink((top, mass, acc), sink, keys.dtype.element_ty)
            acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
            inside = real[:, None] & in_head[None, :]
            tl.store(out + query_index[:, None] * HEAD + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


# One kernel serves all numbers of rows. Specialized kernels would hardly be faster (4% for one token, nothing for 128),
# and each would take seconds to compile, 13 in fp32. (Triton specializes numbers in tuples regardless of
# `do_not_specialize`, so only tensors are passed in tuples.)
@triton.jit(
    do_not_specialize=[
        "longest", "kv_heads", "splits", "near_splits", "words", "list_length", "most_paths", "most_blocks",
        "processors",
    ]
)  # fmt: skip
def _attend(
    q, cache, step, lists, sinks, out, work,
    scale, longest, kv_heads, splits, near_splits, words, list_length, most_paths, most_blocks, processors,
    GROUP: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PART_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, NEAR_KEYS: tl.constexpr,
    PAGE: tl.constexpr, UNSPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: (kv_heads, tiles at a time, splits; with NEAR_KEYS one more; with UNSPLIT one).

    A query is a pair of row and head: each K/V head has GROUP of them per row. UNSPLIT: a program handles all splits of
    a tile, and then takes the next tile; without it there are no more tiles than programs. `cache`: keys and values.
    `step`: the rows' counts, tiles, tables, positions, cells and bits. `work`: memory for partial sums, their maxima
    and the number of splits that have stored them. See `attend` for the tensors.
    """
    count = tl.load(step[0])
    sizes = longest, kv_heads, splits, near_splits, words, list_length, most_paths, most_blocks
    if not UNSPLIT:
        tile = tl.program_id(1)
        if tile < count:
            _attend_tile(
                tile, 0, q, cache, step, lists, sinks, out, work, (scale, CAP), sizes,
                GROUP, HEAD, DIM, BLOCK_M, BLOCK_N, PART_N, WINDOW, CHUNK, NEAR_KEYS, PAGE, UNSPLIT,
            )  # fmt: skip
    else:
        # With enough programs, every other one of a multiprocessor takes its prefix last (see `_add_unsplit`).
        number, many = tl.program_id(1) * kv_heads + tl.program_id(0), count * kv_heads >= STAGGER_FROM * processors
        prefix_last = tl.where(many, number // processors % 2, 0)
        for tile in range(tl.program_id(1), count, tl.num_programs(1)):
            _attend_tile(
                tile, prefix_last, q, cache, step, lists, sinks, out, work, (scale, CAP), sizes,
                GROUP, HEAD, DIM, BLOCK_M, BLOCK_N, PART_N, WINDOW, CHUNK, NEAR_KEYS, PAGE, UNSPLIT,
            )  # fmt: skip


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    work: Workspace,
    tiles: Tiles,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a step's rows, each over its own text and tree, into `out`.

    q, out [R, H, D]; keys, values [pages, Hkv, PAGE, D], including the step's own. A chunk's row sees its text up to
    itself; a tree's row its text before the tree, and the nodes in its bits. With `tiles.near_keys`,
    `paths.list_paths` must have filled `work.paths`.

    `window`: tokens of the sliding window, 0 for none. `chunk`: tokens of an attention chunk, 0 for none; a row sees
    only keys whose position // chunk is its own. Not both are set. `softcap`: scores become
    softcap * tanh(score / softcap), 0 for none. `sinks` [H]: a logit per head that takes part in the softmax, but has
    no value.
    """
    size, heads, dim = q.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    group, nodes = heads // kv_heads, most_nodes_of(size)
    factor = scale / softcap if softcap else scale * LOG2E.value
    tiles = tiles.for_layer(dim, q.dtype, window or chunk)
    _attend[(kv_heads, min(tiles.programs, len(rows.tiles)), tiles.parts)](
        q, (keys, values), (rows.counts, rows.tiles, rows.tables, rows.positions, rows.cells, rows.bits),
        work.paths, sinks, out, (work.part, work.top, work.arrived),
        factor, rows.tables.shape[1], kv_heads, tiles.splits, tiles.near_splits or tiles.splits,
        rows.bits.shape[1], list_size(nodes, tiles, group), most_paths_of(nodes), most_blocks_of(nodes),
        tiles.processors,
        GROUP=group, HEAD=dim, DIM=padded_dim(dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        PART_N=tiles.part_n, WINDOW=window, CHUNK=chunk, CAP=float(softcap) * LOG2E.value, NEAR_KEYS=tiles.near_keys,
        PAGE=page, UNSPLIT=tiles.unsplit,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip
    return out
