"""A step's matrix products: how many rows each is given, and which kernel computes it.

In half precision a row must get the same bits whatever K is, and which order a kernel adds in depends on the shape of
the product. There are two ways to the same bits as among INVARIANT_ROWS rows:

- cuBLASLt's kernels that do not split the sum over the inner dimension. Whatever their tiles, on a Hopper GPU they were
  found to give the same bits, so the fastest may be taken for every number of rows.
- torch's own choice, with as many rows as it needs to add up as it does for INVARIANT_ROWS.

Neither is taken on trust: numbers whose products cancel tell, bit for bit, since nothing is left of their sums but what
was rounded away on the way. Which kernel is the fastest is timed, on the model's own weights; no result depends on it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lookahead.backends.graph import cublaslt
from lookahead.backends.graph.sizes import INVARIANT_ROWS, STEP_SIZES

TIMED_CALLS = 8
"""Calls of which a timing takes the mean, on the weights of as many layers: large ones then come from memory."""
HEAD_START = 800_000
"""Clock ticks that the device waits before a timing, while the host calls ahead of it: 0.4 ms at 2 GHz."""
FINALISTS = 4
"""The fastest of a first look are timed again, more carefully."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Computes out = x weight^T."""


@dataclass(frozen=True)
class Product:
    """A product as a step computes it: of so many rows, in this way."""

    rows: int
    run: Run

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.run(x[: self.rows], weight, out[: self.rows])


def by_torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


@cache
def products_of(device: torch.device, dtype: torch.dtype, invariant: bool) -> Products:
    """One for all models: what is found for a shape holds for the next model that has it."""
    return Products(device, dtype, invariant)


class Products:
    """Plans the products of one dtype on one device.

    `library` is cuBLASLt where it was found to help: in half precision on Hopper GPUs. Elsewhere torch chooses.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, invariant: bool) -> None:
        self.device, self.dtype, self.invariant = device, dtype, invariant
        known = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
        self.library: Any = cublaslt.library(device) if known and dtype in cublaslt.TYPES else None
        self._fastest: dict[tuple[torch.Size, int], Run | None] = {}
        self._rows: dict[tuple[torch.Size, int], int] = {}

    def plan(self, weights: Sequence[torch.Tensor], size: int) -> Product:
        """How to multiply `size` rows with matrices of this shape, one of each layer."""
        if size > INVARIANT_ROWS or self.device.type != "cuda":
            return Product(size, by_torch)
        if self.library is not None and all(cublaslt.takes(weight) for weight in weights):
            for rows in tried(size):
                kernel = self._fastest_of(weights, rows)
                if kernel is not None:
                    return Product(rows, kernel)
        return Product(self._torch_rows(weights[0], size) if self.invariant else size, by_torch)

    def _torch_rows(self, weight: torch.Tensor, size: int) -> int:
        """The rows to give torch's product, so that each has the bits that it has among INVARIANT_ROWS rows.

        On an H200 with a 7B shape's weights one row becomes 64 in `out` and 32 in `down`, which is faster than one, and
        stays one elsewhere.
        """
        key = weight.shape, size
        if key not in self._rows:
            x, other = cancelling(weight)
            whole = x.new_empty(INVARIANT_ROWS, len(weight))
            by_torch(x, other, whole)
            self._rows[key] = next(rows for rows in tried(size) if same_bits(by_torch, x, other, whole, rows))
        return self._rows[key]

    def _fastest_of(self, weights: Sequence[torch.Tensor], rows: int) -> Run | None:
        """The fastest kernel for so many rows that gives the bits of the first one for INVARIANT_ROWS rows, if there is one."""
        shape = weights[0].shape
        if (shape, rows) not in self._fastest:
            found = list(self._same_bits(weights[0], rows))
            for times, keep in ((1, FINALISTS), (5, 1)):
                timed = [(self._time(run, weights, rows, times), place) for place, run in enumerate(found)]
                found = [found[place] for _, place in sorted(timed)[:keep]]
            self._fastest[shape, rows] = found[0] if found else None
        return self._fastest[shape, rows]

    def _same_bits(self, weight: torch.Tensor, rows: int) -> Iterator[Run]:
        x, other = cancelling(weight)
        whole = x.new_empty(INVARIANT_ROWS, len(weight))
        for first in self._kernels(weight, INVARIANT_ROWS):
            try:
                first(x, other, whole)
            except RuntimeError:
                continue
            yield from (run for run in self._kernels(weight, rows) if same_bits(run, x, other, whole, rows))
            return

    def _kernels(self, weight: torch.Tensor, rows: int) -> list[cublaslt.Kernel]:
        try:
            outer, inner = weight.shape
            return cublaslt.Problem(self.library, rows, outer, inner, self.dtype).kernels()
        except RuntimeError:  # it has none for this shape
            return []

    def _time(self, run: Run, weights: Sequence[torch.Tensor], rows: int, times: int) -> float:
        """Milliseconds of a call, the median of so many rounds."""
        x = weights[0].new_zeros(rows, weights[0].shape[1])
        out = weights[0].new_empty(rows, len(weights[0]))
        rounds = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START)
            begin.record()
            for call in range(TIMED_CALLS):
                run(x, weights[call % len(weights)], out)
            end.record()
            end.synchronize()
            rounds.append(begin.elapsed_time(end) / TIMED_CALLS)
        return statistics.median(rounds)


def tried(size: int) -> list[int]:
    """How many rows a product of this size may be given."""
    return [size, *(rows for rows in STEP_SIZES if size < rows <= INVARIANT_ROWS)]


def cancelling(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [INVARIANT_ROWS, inner] and a matrix like `weight`, random, whose product is zero but for rounding.

    Every term comes a second time, negative and elsewhere. So a sum in another order leaves something else. They are
    the same every time, and nobody else's random numbers change.
    """
    source = torch.Generator(weight.device).manual_seed(0)
    inner = weight.shape[1]
    half = inner // 2
    places = torch.randperm(half, generator=source, device=weight.device)
    x, other = weight.new_zeros(INVARIANT_ROWS, inner), torch.zeros_like(weight)
    x[:, :half].normal_(generator=source)
    other[:, :half].normal_(generator=source)
    x[:, half : 2 * half] = x[:, places]
    other[:, half : 2 * half] = -other[:, places]
    return x, other


def same_bits(run: Run, x: torch.Tensor, weight: torch.Tensor, whole: torch.Tensor, rows: int) -> bool:
    """Whether so many rows at a time, from several places, come out as they are in `whole`."""
    for start in range(0, INVARIANT_ROWS - rows + 1, max(rows, INVARIANT_ROWS // 4)):
        out = whole.new_full((rows, len(weight)), torch.nan)
        try:
            run(x[start : start + rows].clone(), weight, out)
        except RuntimeError:
            return False
        if not torch.equal(out, whole[start : start + rows]):
            return False
    return True
