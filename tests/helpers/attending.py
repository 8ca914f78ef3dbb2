"""Random steps for tests of the attention kernel, and its errors against fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from flat import Part, random_parents, rows_of, tables_of

from lookahead.backends.graph.kernels import reference
from lookahead.backends.graph.kernels.attention import attend
from lookahead.backends.graph.kernels.paths import list_paths
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.kernels.tiles import Grid, HeadShape, Tiles, TileSize, Tiling, tiles_for
from lookahead.backends.graph.kernels.workspace import Workspace
from lookahead.backends.graph.sizes import PAGE


class Step:
    """Random queries, keys and values of a step. K/V that no row may see is huge, so that it would show.

    `options` are further arguments of `attend`. If they are to include sinks, there are some for all heads.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        parts: Sequence[Part],
        heads: int,
        kv_heads: int,
        dim: int,
        padding: int = 0,
    ) -> None:
        self.device, self.parts, self.heads, self.kv_heads = device, parts, heads, kv_heads
        self.padding, self.scale = padding, dim**-0.5
        self.options: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(len(parts) + 31 * parts[0].end)
        self.tables, pages = tables_of(parts, device)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        rows = self.rows((heads // kv_heads, 16))
        self.q = normal(len(rows.positions), heads, dim)
        self.keys, self.values = (normal(pages, kv_heads, PAGE, dim) for _ in range(2))
        own = torch.zeros(pages, PAGE, dtype=torch.bool, device=device)
        for slot, part in enumerate(parts):
            at = torch.arange(part.end, device=device)
            own[self.tables[slot, at // PAGE].long(), at % PAGE] = True
        for cache in (self.keys, self.values):
            cache.transpose(1, 2)[~own] = 1e4

    def rows(self, queries: tuple[int, int]) -> Rows:
        return rows_of(self.parts, self.tables, queries, padding=self.padding)

    def run(self, tiles: Tiles, window: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        rows, group = self.rows((self.heads // self.kv_heads, tiles.block_m)), self.heads // self.kv_heads
        assert tiles.unsplit or int(rows.counts[0]) <= tiles.programs
        work = Workspace(self.device)
        work.reserve(len(self.q), len(rows.tiles), tiles, self.heads, self.kv_heads, self.q.shape[-1])
        if tiles.near_keys:
            list_paths(rows, work.paths, tiles, group)
        out = torch.full_like(self.q, float("nan")) if out is None else out
        return attend(self.q, self.keys, self.values, rows, out, work, tiles, **self.arguments(window))

    def plain(self, dtype: torch.dtype, window: int = 0) -> torch.Tensor:
        """The results by PyTorch's operations, in another dtype. Rows that pad the step are zeros."""
        parts = [part.to(dtype) for part in (self.q, self.keys, self.values)]
        return reference.attend(*parts, self.rows((1, 16)), torch.zeros_like(parts[0]), **self.arguments(window))

    def arguments(self, window: int) -> dict[str, Any]:
        """The options of `attend`, with a sink for every head: some far below most scores, some far above."""
        options = {"scale": self.scale, "window": window} | self.options
        if options.get("sinks"):
            options["sinks"] = torch.linspace(5, -3, self.heads, device=self.device).to(self.q.dtype)
        return options

    def errors(self, tiles: Tiles, window: int = 0) -> tuple[float, float]:
        """Relative errors against fp64: of the kernel, and of PyTorch's operations in the same dtype."""
        exact, rounded = (self.plain(dtype, window) for dtype in (torch.float64, self.q.dtype))
        ours = self.run(tiles, window, torch.zeros_like(self.q))
        return relative_error(ours, exact), relative_error(rounded, exact)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of all numbers together."""
    return float((found.double() - exact).norm() / exact.norm())


def parts_of(*shapes: tuple[int, int, int]) -> list[Part]:
    """Parts of (length, chunk, nodes), with random trees."""
    rng = random.Random(repr(shapes))
    return [
        Part(length, chunk, random_parents(nodes, rng)) if nodes else Part(length, chunk, ())
        for length, chunk, nodes in shapes
    ]


def check_invariance(
    device: torch.device,
    dtype: torch.dtype,
    shape: HeadShape,
    length: int,
    options: dict[str, Any],
    *,
    ahead: int = 64,
    nodes: int = 100,
    spread: float = 1,
) -> None:
    """Bit for bit: a text's last tokens one step each, against the same tokens scattered over one tree, and against the
    same tokens as part of a prompt. Other sequences run in the same steps, or not."""
    rng = random.Random(length)
    # The tree: node 0 and `ahead` more form the text, the other nodes hang somewhere.
    text = [0, *sorted(rng.sample(range(1, nodes), ahead))]
    parents = [-1, *(rng.randrange(i) for i in range(1, nodes))]
    for before, node in pairwise(text):
        parents[node] = before
    tree = Step(device, dtype, [Part(length, 0, parents), Part(33, 0, (-1, 0))], *shape)
    tree.q *= spread

    def run(step: Step, small: bool, unsplit: bool = False) -> torch.Tensor:
        step.options = options
        grid = Grid.UNSPLIT if unsplit else Grid.SINGLE if len(step.parts) == 1 else Grid.SPLIT
        tiling = Tiling(TileSize.SMALL if small else TileSize.LARGE, grid)
        tiles = tiles_for(len(step.q), shape, tiling, invariant=True)
        tiles = replace(tiles, splits=5, near_splits=3, processors=1, programs=16 if unsplit else 128)
        out = torch.full_like(step.q, float("nan"), dtype=torch.float32)  # unrounded: no bit is hidden
        return step.run(tiles, out=out)

    in_tree = run(tree, False)
    # The same K/V with the text's tokens next to each other behind the prefix.
    keys, values = tree.keys.clone(), tree.values.clone()
    table = tree.tables[0].long()

    def at(index: int) -> tuple[torch.Tensor, slice, int]:
        return table[index // PAGE], slice(None), index % PAGE

    for depth, node in enumerate(text):
        for ours, its in ((keys, tree.keys), (values, tree.values)):
            ours[at(length + depth)] = its[at(length + node)]

    def lined(part: Part, q: torch.Tensor, small: bool) -> torch.Tensor:
        step = Step(device, dtype, [part], *shape)
        step.tables, step.keys, step.values, step.q = tree.tables, keys, values, q.contiguous()
        return run(step, small, unsplit=small)

    for small in (True, False):
        for depth in {0, 1, 2, 7, 15, 16, 40, ahead} & set(range(ahead + 1)):
            node = text[depth]
            alone = lined(Part(length + depth), tree.q[node : node + 1], small)
            assert torch.equal(alone[0], in_tree[node]), depth
        prompt = lined(Part(length, ahead + 1, ()), tree.q[text], small)
        assert torch.equal(prompt, in_tree[text])
        prompt = lined(Part(length + 1, 2, ()), tree.q[text[1:3]], small)
        assert torch.equal(prompt, in_tree[text[1:3]])
    assert torch.equal(run(tree, False, unsplit=True), in_tree)  # as a batch with large trees is tiled
    assert torch.equal(run(tree, True), in_tree)  # as a few small trees are
