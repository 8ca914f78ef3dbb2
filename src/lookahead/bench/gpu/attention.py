"""attention: the kernel against SDPA with a dense mask, and against the device's copy bandwidth. Needs triton, CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kernels import attention, depths, fused, tiles
from lookahead.backends.graph.kernels.rows import Rows, new_rows
from lookahead.backends.graph.kernels.tiles import HeadShape
from lookahead.backends.graph.kinds import Device, kind_of
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.sizes import PAGE, bucket
from lookahead.backends.graph.state import most_tiles
from lookahead.bench.gpu.timing import copy_bandwidth, graphed, median_ms, tree_of
from lookahead.config import SamplingParams

HEADS = ((64, 64, 64), (32, 32, 128), (32, 8, 128))
"""(heads, K/V heads, dimension)."""
COUNTS, CONTEXTS = (1, 121), (1024, 2048, 16384)
"""Rows of one sequence, and its prefixes."""
SEVERAL, SEVERAL_CONTEXTS = ((16, 1), (16, 8)), (1024, 2048)
"""Several sequences and the rows of each, and their prefixes."""
CACHED = 2e8
"""Bytes of K/V that are read in turn, so that none of it is in the device's own cache."""


@dataclass(frozen=True)
class Case:
    """`sequences` trees of `count` nodes each, every one behind its own prefix of `context` tokens."""

    heads: int
    kv_heads: int
    dim: int
    sequences: int
    count: int
    context: int

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.dim)

    @property
    def bytes(self) -> int:
        """The K/V that a step reads, in bf16."""
        return 2 * self.sequences * self.kv_heads * (self.context + self.count) * self.dim * 2


def attention_records() -> Iterator[dict[str, Any]]:
    """Kernel, SDPA with a dense mask over the live prefix, and the floor: K/V read once at copy bandwidth."""
    bandwidth = copy_bandwidth()
    for heads in HEADS:
        for count in COUNTS:
            for context in CONTEXTS:
                yield from _records(Case(*heads, 1, count, context), bandwidth)
        for sequences, count in SEVERAL:
            for context in SEVERAL_CONTEXTS:
                yield from _records(Case(*heads, sequences, count, context), bandwidth)


def _records(case: Case, bandwidth: float) -> Iterator[dict[str, Any]]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    sets, scale = max(2, int(CACHED // case.bytes) + 1), case.dim**-0.5
    size, each = bucket(case.sequences * case.count), -(-(case.context + case.count) // PAGE)
    q = torch.randn(size, case.heads, case.dim, device=device, dtype=dtype)
    sdpa = median_ms(graphed(_dense(case, q, sets, scale)), repeats=10) / sets * 1e3
    shape = (2, case.sequences * each + 1, case.kv_heads, PAGE, case.dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(sets)]
    # Pages in any order, as sequences take them when they grow.
    tables = (torch.randperm(case.sequences * each, device=device) + 1).to(torch.int32).view(case.sequences, each)
    out = torch.empty_like(q)

    def ours(rows: Rows, work: attention.Workspace, cut: tiles.Tiles) -> None:
        for keys, values in caches:
            attention.attend(q, keys, values, rows, out, work, cut, scale=scale)

    for invariant in (True, False):
        rows, work, cut = _planned(case, tables, invariant)
        us = median_ms(graphed(partial(ours, rows, work, cut)), repeats=10) / sets * 1e3
        yield {
            "heads": case.heads, "kv_heads": case.kv_heads, "dim": case.dim, "sequences": case.sequences,
            "K": case.count, "context": case.context, "invariant": invariant,
            "us": round(us, 1), "sdpa_us": round(sdpa, 1), "speedup": round(sdpa / us, 2),
            "of_copy_bandwidth": round(case.bytes / bandwidth * 1e6 / us, 2), "copy_tb_s": round(bandwidth / 1e12, 2),
        }  # fmt: skip


def _planned(case: Case, tables: torch.Tensor, invariant: bool) -> tuple[Rows, attention.Workspace, tiles.Tiles]:
    """What a captured step gives the kernel: the step's rows, the workspace, and how it is cut."""
    ops, lines, lengths = Ops(tables.device), range(case.sequences), [case.context] * case.sequences
    trees = [tree_of(case.count)] * case.sequences
    items = [StepInput(line, (), tree, SamplingParams(), ()) for line, tree in zip(lines, trees, strict=True)]
    shape = case.shape
    kind = kind_of(items, lengths, Device((shape,), ops.processors, invariant)).forward
    size, cut = kind.rows, ops.tiles(kind.rows, shape, kind.cuts[0], invariant=kind.invariant)
    count = most_tiles(size, shape.group, cut.block_m)
    packet = Packet(size, size, [count], 1, pinned=False)
    packet.begin()
    packet.put(lines, lengths, [()] * case.sequences, trees, [(shape.group, cut.block_m)])
    packet.end((), [()])
    rows = new_rows(packet.views(packet.host.to(tables.device)), 0, tables, size)
    fused.place_nodes(rows)
    work = attention.Workspace(tables.device)
    work.reserve(size, count, cut, *shape)
    if cut.reach:  # the trees' nodes by depth, once for all layers
        depths.order_by_depth(rows, work.order, cut, shape.group)
    return rows, work, cut


def _dense(case: Case, q: torch.Tensor, sets: int, scale: float) -> partial[None]:
    """SDPA over K/V in one piece per sequence, with a dense mask."""
    total, tree = case.context + case.count, tree_of(case.count)
    caches = [q.new_empty(2, case.sequences, case.kv_heads, total, case.dim).normal_() for _ in range(sets)]
    query = q[: case.sequences * case.count].view(case.sequences, case.count, case.heads, case.dim).transpose(1, 2)
    mask = q.new_zeros(1, 1, case.count, (total + 15) // 16 * 16)[..., :total]
    for node in range(case.count):
        seen, above = {node}, tree.parents[node]
        while above >= 0:
            seen.add(above)
            above = tree.parents[above]
        hidden = [case.context + other for other in range(case.count) if other not in seen]
        mask[0, 0, node, hidden] = float("-inf")

    def run() -> None:
        for keys, values in caches:
            torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=case.shape.group > 1, scale=scale
            )

    return partial(run)
