"""Random steps for tests of the attention kernel, and its errors against fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from flat import Part, random_parents, rows_of, tables_of

from lookahead.backends.graph.kernels import reference
from lookahead.backends.graph.kernels.attention import Workspace, attend
from lookahead.backends.graph.kernels.depths import order_by_depth
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.kernels.tiles import Tiles
from lookahead.backends.graph.sizes import PAGE


class Step:
    """Random queries, keys and values of a step. K/V that no row may see is huge, so that it would show."""

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
            order_by_depth(rows, work.order, tiles, group)
        out = torch.full_like(self.q, float("nan")) if out is None else out
        return attend(self.q, self.keys, self.values, rows, out, work, tiles, scale=self.scale, window=window)

    def plain(self, dtype: torch.dtype, window: int = 0) -> torch.Tensor:
        """The results by PyTorch's operations, in another dtype. Rows that pad the step are zeros."""
        parts = [part.to(dtype) for part in (self.q, self.keys, self.values)]
        return reference.attend(*parts, self.rows((1, 16)), torch.zeros_like(parts[0]), scale=self.scale, window=window)

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
