"""A step's matrix products: how many rows each is given, and which kernel computes it.

In half precision a row must get the same bits in steps of every size, but the order in which a kernel adds depends on
the number of rows. There are two ways to give a row the bits that it gets among INVARIANT_ROWS rows:

- Use cuBLASLt's kernels that do not split the sum over the inner dimension. On a Hopper GPU all of them were found to
  give the same bits, whatever their tiles, so we may take the fastest for each number of rows.
- Let torch choose the kernel, and give it more rows than the step has, until it adds in the same order.

We check both. A kernel is tested on inputs whose products cancel: the exact result is zero, so all that is left are
rounding errors, and any change in the order of adding changes them. Which of the kernels that pass is the fastest is
timed on the model's own weights. No result depends on that choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lookahead.backends.graph import cublaslt
from lookahead.backends.graph.sizes import INVARIANT_ROWS, ROW_SIZES

TIMED_CALLS = 8
"""Calls per timing. Each uses another layer's weights, so that large ones are read from memory and not from a cache."""
HEAD_START = 800_000
"""Clock ticks that the device sleeps before a timing, while the host queues all calls: 0.4 ms at 2 GHz."""
PIECES = (INVARIANT_ROWS, 2 * INVARIANT_ROWS)
"""Rows at a time that are tried for larger products. On an H200 the products of a 7B model take 4.74 ms for 256 rows,
11.1 for 512 and 25.2 for 1024: four times 256 is faster."""
FINALISTS = 4
"""How many of the fastest kernels of a first timing are timed again, more carefully."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""A function of (x [rows, inner], weight [outer, inner], out [rows, outer]) that computes out = x weight^T."""


@dataclass(frozen=True)
class Product:
    """How a step computes a product: `run` on the first `rows` rows.

    x [at least rows, inner], weight [outer, inner], out [at least rows, outer].
    """

    rows: int
    run: Run

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.run(x[: self.rows], weight, out[: self.rows])


def by_torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, outer] = x [rows, inner] weight [outer, inner]^T, with the kernel that torch chooses."""
    torch.mm(x, weight.t(), out=out)


@dataclass(frozen=True)
class Pieces:
    """A product that runs `rows` rows at a time, where a product of all rows is slower or adds in another order.

    x [a multiple of rows, inner]: `run` is right for so many rows, and not for less.
    """

    run: Run
    rows: int

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, len(x), self.rows):
            piece = slice(start, start + self.rows)
            self.run(x[piece], weight, out[piece])


@cache
def products_of(device: torch.device, dtype: torch.dtype, invariant: bool) -> Products:
    """The `Products` that all models share: what was found for a matrix shape holds for every model that has it."""
    return Products(device, dtype, invariant)


class Products:
    """Plans the products of one dtype on one device.

    `library` is cuBLASLt where it was found to help, in half precision on Hopper GPUs. Elsewhere it is None, and torch
    chooses the kernels.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, invariant: bool) -> None:
        self.device, self.dtype, self.invariant = device, dtype, invariant
        known = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
        self.library: Any = cublaslt.library(device) if known and dtype in cublaslt.TYPES else None
        self._fastest: dict[tuple[torch.Size, int], Run | None] = {}
        self._rows: dict[tuple[torch.Size, int], int] = {}

    def plan(self, weights: Sequence[torch.Tensor], size: int) -> Product:
        """How to multiply `size` rows with any of these matrices [outer, inner]: the layers' matrices of one kind."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        if self.device.type != "cuda" or (size > INVARIANT_ROWS and not (self.invariant and half)):
            return Product(size, by_torch)
        if self.library is not None and all(cublaslt.takes(weight) for weight in weights):
            for rows in tried(size):
                kernel = self._fastest_of(weights, rows)
                if kernel is not None:
                    return Product(rows, kernel)
        if not self.invariant:
            return Product(size, by_torch)
        if size <= INVARIANT_ROWS:
            return Product(self._torch_rows(weights[0], size), by_torch)
        piece = self.plan(weights, INVARIANT_ROWS).run
        if piece is by_torch and same_bits(by_torch, *self._expected(weights[0], by_torch), size):
            return Product(size, by_torch)
        return Product(-(-size // INVARIANT_ROWS) * INVARIANT_ROWS, Pieces(piece, INVARIANT_ROWS))

    def _torch_rows(self, weight: torch.Tensor, size: int) -> int:
        """How many rows to give torch's product, so that each row gets the bits that it gets among INVARIANT_ROWS.

        On an H200 with the weights of a 7B model, one row becomes 64 in `out` and 32 in `down`, which is faster than
        one, and stays one elsewhere.
        """
        key = weight.shape, size
        if key not in self._rows:
            x, other, whole = self._expected(weight, by_torch)
            self._rows[key] = next(rows for rows in tried(size) if same_bits(by_torch, x, other, whole, rows))
        return self._rows[key]

    def _expected(self, weight: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x and a matrix whose products cancel (see `cancelling`), and what `run` makes of INVARIANT_ROWS rows."""
        x, other = cancelling(weight)
        whole = x.new_empty(INVARIANT_ROWS, len(weight))
        run(x, other, whole)
        return x, other, whole

    def _fastest_of(self, weights: Sequence[torch.Tensor], rows: int) -> Run | None:
        """The fastest kernel for so many rows that gives the right bits, or None; see `_same_bits`."""
        shape = weights[0].shape
        if (shape, rows) not in self._fastest:
            found = list(self._same_bits(weights[0], rows))
            for piece in PIECES:
                if rows > piece and rows % piece == 0 and (kernel := self._fastest_of(weights, piece)) is not None:
                    found.append(Pieces(kernel, piece))
            for times, keep in ((1, FINALISTS), (5, 1)):
                timed = [(self._time(run, weights, rows, times), place) for place, run in enumerate(found)]
                found = [found[place] for _, place in sorted(timed)[:keep]]
            self._fastest[shape, rows] = found[0] if found else None
        return self._fastest[shape, rows]

    def _same_bits(self, weight: torch.Tensor, rows: int) -> Iterator[Run]:
        """The kernels for so many rows that give the bits of cuBLASLt's first kernel for INVARIANT_ROWS rows."""
        for first in self._kernels(weight, INVARIANT_ROWS):
            try:
                x, other, whole = self._expected(weight, first)
            except RuntimeError:
                continue
            yield from (run for run in self._kernels(weight, rows) if same_bits(run, x, other, whole, rows))
            return

    def _kernels(self, weight: torch.Tensor, rows: int) -> list[cublaslt.Kernel]:
        """cuBLASLt's kernels for so many rows and this weight [outer, inner]."""
        try:
            outer, inner = weight.shape
            return cublaslt.Problem(self.library, rows, outer, inner, self.dtype).kernels()
        except RuntimeError:  # it has none for this shape
            return []

    def _time(self, run: Run, weights: Sequence[torch.Tensor], rows: int, times: int) -> float:
        """Milliseconds per call: the median of `times` rounds."""
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
    """The numbers of rows to try for a step of `size` rows: its own, then the larger captured sizes."""
    return [size, *(rows for rows in ROW_SIZES if size < rows <= INVARIANT_ROWS)]


def cancelling(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x [INVARIANT_ROWS, inner] and a matrix like `weight` [outer, inner] whose product is all rounding errors.

    Every term of a sum comes a second time, negated and at another place. So a sum in another order has other rounding
    errors. The numbers are the same in every call, and come from a generator of their own.
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
    """Whether `run` on `rows` rows of x at a time, from several places, gives the bits of `whole`.

    x [INVARIANT_ROWS, inner], weight [outer, inner], whole [INVARIANT_ROWS, outer]. For more rows than x has, x is
    repeated.
    """
    times = -(-rows // INVARIANT_ROWS)
    if times > 1:
        x, whole = x.repeat(times, 1), whole.repeat(times, 1)
    for start in range(0, len(x) - rows + 1, max(rows, INVARIANT_ROWS // 4)):
        out = whole.new_full((rows, len(weight)), torch.nan)
        try:
            run(x[start : start + rows].clone(), weight, out)
        except RuntimeError:
            return False
        if not torch.equal(out, whole[start : start + rows]):
            return False
    return True
