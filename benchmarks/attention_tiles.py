"""Times one layer's attention in the tiles in use, and in others: `python benchmarks/attention_tiles.py [16,8,256]`.

A shape is heads, K/V heads and head width. Every line is one choice of `kernels.tiles.Tiles`: first the one in use (see
`kernels.tiles.TUNED`), then those of `--tries`, as what they change: `--tries '{"warps": 8}' '{"splits": 31}'`; or
changes of one parameter each. `share`: of a copy's bandwidth, by the K/V that rows see. `bits`: whether the result is
bit for bit that of the tiles in use, as it must be in all steps that are used together. Most of the time is compiling:
several processes with `--contexts 70` fill Triton's cache in advance. Without a GPU it needs TRITON_INTERPRET=1 and
small sizes: `[4,2,64] --rows 1 --contexts 70 --windows 0 32 --tries '{"splits": 4}'`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from lookahead.backends.graph.kernels.rows import new_rows
from lookahead.backends.graph.kernels.tiles import HeadShape, Tiles
from lookahead.backends.graph.kinds import DeviceTraits, forward_kind
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.sizes import PAGE
from lookahead.backends.graph.state import most_tiles
from lookahead.bench.gpu.timing import copy_bandwidth, median_ms
from lookahead.loading.timing import timing_tree

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if CUDA else "cpu"), torch.bfloat16 if CUDA else torch.float16
COLD = 200e6  # bytes of K/V that are read in turn, so that none are in the L2 cache, as in a model of many layers


class Layers:
    """Layers of one shape with random K/V, and the queries of `sequences` trees of `rows` rows each."""

    def __init__(self, shape: HeadShape, rows: int, sequences: int, context: int) -> None:
        self.shape, self.rows, self.sequences, self.context = shape, rows, sequences, context
        self.ops = Ops(DEVICE, compiled=True, processors=None if CUDA else 132)
        pages = sequences * -(-(context + rows) // PAGE)
        page_bytes = 2 * shape.kv_heads * PAGE * shape.dim * DTYPE.itemsize
        layers = int(min(64, 1 + COLD // (pages * page_bytes))) if CUDA else 1
        self.cache = torch.randn(layers, 2, pages, shape.kv_heads, PAGE, shape.dim, dtype=DTYPE, device=DEVICE)
        self.tables = torch.randperm(pages, device=DEVICE).view(sequences, -1).int()
        self.q = torch.randn(rows * sequences, shape.heads, shape.dim, dtype=DTYPE, device=DEVICE)
        traits, trees = DeviceTraits((shape,), self.ops.processors, True), [rows] * sequences
        kind = forward_kind(trees, [0] * sequences, [context] * sequences, 1, traits)
        self.tiles = self.ops.tiles(kind.rows, shape, kind.tilings[0], invariant=True)
        self.bytes_seen = lambda window: min(context, window or context) * sequences * page_bytes / PAGE

    def attend(self, tiles: Tiles, window: int) -> tuple[float, torch.Tensor]:
        """Microseconds of a layer, and its result."""
        size, count, group = len(self.q), self.sequences, self.shape.group
        trees, most = [timing_tree(self.rows)] * count, most_tiles(size, group, tiles.block_m)
        packet = Packet(size, size, [most], 1, False)
        packet.begin()
        packet.write_rows(range(count), [self.context] * count, [[]] * count, trees, [(group, tiles.block_m)])
        packet.write_commits((), [()])
        rows = new_rows(packet.views(packet.host.to(DEVICE)), 0, self.tables, max(32, self.rows))
        self.ops.locate_rows(rows)
        tiles = replace(tiles, programs=max(tiles.programs, int(rows.counts[0])))
        work, out, scale = self.ops.workspace(), torch.empty_like(self.q), self.shape.dim**-0.5
        work.reserve(size, most, tiles, *self.shape)
        self.ops.list_paths(rows, work, tiles, group)

        def run() -> None:
            for keys, values in self.cache:
                self.ops.attend(self.q, keys, values, rows, out, work, tiles, scale=scale, window=window)

        run()
        if not CUDA:
            return median_ms(run) * 1e3, out
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return median_ms(graph.replay) * 1e3 / len(self.cache), out


def neighbours(tiles: Tiles) -> Iterator[dict[str, int]]:
    """Changes of one parameter that may be faster. A part divides a block, and near splits are splits."""
    steps = {"warps": (2, 4, 8), "stages": (1, 2, 3, 4), "part_n": (16, 32, 64), "near_splits": (2, 4, 8)}
    for name, values in (steps | {"splits": (8, 15, 31)}).items():
        for other in (replace(tiles, **{name: value}) for value in values if value != getattr(tiles, name)):
            if other.part_n <= other.block_n and other.near_splits <= other.splits:
                yield {name: getattr(other, name)}
    yield {"block_n": 96 - tiles.block_n, "part_n": 32}


def measure(case: tuple, tries: list[dict[str, int]] | None, bandwidth: float) -> None:
    """Print the table of one case."""
    shape, rows, sequences, context, window = case
    layers, usual = Layers(HeadShape(*shape), rows, sequences, context), None
    for change in ({}, *(neighbours(layers.tiles) if tries is None else tries)):
        tiles = replace(layers.tiles, **change)
        try:
            us, out = layers.attend(tiles, window)
        except Exception as error:  # it does not fit into shared memory
            print(*shape, change, str(error)[:90])
            continue
        usual = out if usual is None else usual
        share, bits = layers.bytes_seen(window) / us * 1e6 / bandwidth, "same" if torch.equal(out, usual) else "other"
        print(*shape, f"{rows:4} x {sequences:<3} {context:6} {window:5} {us:8.1f} us {share:5.0%} {bits:5}", end=" ")
        print(change or tiles.for_layer(shape[2], DTYPE, window), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=json.loads)
    lists = {"rows": [1, 16, 121], "sequences": [1], "contexts": [512, 8192, 32768], "windows": [0, 128, 1024, 4096]}
    for name, default in lists.items():
        parser.add_argument(f"--{name}", nargs="+", type=int, default=default)
    parser.add_argument("--tries", nargs="*", type=json.loads)
    args, bandwidth = parser.parse_args(), copy_bandwidth(DEVICE)
    for case in product(args.shapes, args.rows, args.sequences, args.contexts, args.windows):
        measure(case, args.tries, bandwidth)


if __name__ == "__main__":
    main()
