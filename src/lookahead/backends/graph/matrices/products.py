"""Matrix products in fp32, fp16 or bf16: the kernel for each number of rows, and its padding.

In half precision a row must get the same bits in steps of every size, but a kernel's order of summation depends on the
number of rows. There are two ways to give a row the bits that it gets among INVARIANT_ROWS rows:

- Use cuBLASLt's kernels that do not split the sum over the inner dimension. On a Hopper GPU all of them were found to
  give the same bits, whatever their tiles, so we may take the fastest for each number of rows.
- Let torch choose the kernel, and pad the step until torch sums in the same order.

Both are verified. A kernel is tested on inputs whose products cancel: the exact result is zero, so only rounding errors
are left, and any change in the order of summation changes them. The fastest of the kernels that pass is found by timing
them on the model's own weights; no result depends on that choice. It is cached on disk, so that later processes need
not time it again; they verify its bits all the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lookahead.backends.graph.matrices import cublaslt
from lookahead.backends.graph.matrices.kernel_cache import KernelCache
from lookahead.backends.graph.sizes import INVARIANT_ROWS, ROW_SIZES

TIMED_CALLS = 8
"""Calls per timing, each with another layer's weights; a quarter of them for large products."""
HEAD_START = 400_000
"""Clock ticks that the device sleeps before a timing, while the host queues all calls: 0.2 ms at 2 GHz."""
PIECES = (INVARIANT_ROWS, 2 * INVARIANT_ROWS)
"""Numbers of rows that larger products may be divided into. On an H200 the products of a 7B model take 4.74 ms for 256
rows, 11.1 for 512 and 25.2 for 1024: four times 256 is faster."""
FINALISTS = 4
"""Number of fastest kernels of a first timing that are timed again, more carefully."""
SUGGEST = (16, 64, 128)
"""Numbers of rows up to the largest of which a product also tries what cuBLASLt suggests for these. For one row of a 7B
model the fastest of them take 3.53 ms of a step on an H200, those that it suggests for one row 3.61."""
FAMILIES = 3
"""Number of kernels whose cluster shapes are all timed: those that are fastest with their first shape. A kernel takes
milliseconds to load, so few are tried."""

SEARCH = "3"
"""Version of the search. Results of an earlier version are not used: they may be slower."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""A function of (x [rows, inner], weight [outer, inner], out [rows, outer]) that computes out = x weight^T. Memory of
`out` is made by `Products.new_out`."""


@dataclass(frozen=True)
class Product:
    """A planned product: `run` on the first `rows` rows.

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
    """A product computed `rows` rows at a time, where one product of all rows is slower or sums in another order.

    x [a multiple of rows, inner], because `run` has the right bits for exactly `rows` rows.
    """

    run: Run
    rows: int

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, len(x), self.rows):
            piece = slice(start, start + self.rows)
            self.run(x[piece], weight, out[piece])


@cache
def products_of(device: torch.device, dtype: torch.dtype, invariant: bool, stride: int = 0) -> Products:
    """The `Products` shared by all models: the kernel for a matrix shape serves every model with that shape."""
    return Products(device, dtype, invariant, stride)


class Products:
    """Plans the products of one dtype on one device. Rows of a result are `stride` numbers apart, with 0 next to one
    another.

    `library` is cuBLASLt where it helps: in half precision on Hopper GPUs. Elsewhere it is None, and torch chooses the
    kernels.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, invariant: bool, stride: int = 0) -> None:
        self.device, self.dtype, self.invariant, self.stride = device, dtype, invariant, stride
        known = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
        self.library: Any = cublaslt.library(device) if known and dtype in cublaslt.TYPES else None
        self.kernel_cache = KernelCache(self._facts() if self.library is not None else None)
        self._fastest: dict[tuple[torch.Size, int], Run | None] = {}
        self._first: dict[torch.Size, Run] = {}  # the kernels that define the right bits
        self._rows: dict[tuple[torch.Size, int], int] = {}
        self._in_one_product: dict[tuple[torch.Size, int], bool] = {}

    def _facts(self) -> dict[str, str]:
        """What the fastest kernels depend on, including the version of the search."""
        name = torch.cuda.get_device_name(self.device)
        facts = {"device": name, "dtype": str(self.dtype), "library": str(self.library.version()), "search": SEARCH}
        return {**facts, "stride": str(self.stride)} if self.stride else facts

    def with_stride(self, stride: int) -> Products:
        """The same, with results whose rows are this far apart."""
        return products_of(self.device, self.dtype, self.invariant, stride)

    def new_out(self, weight: torch.Tensor, rows: int) -> torch.Tensor:
        """Memory [rows, outer] for a product with this weight [outer, inner]."""
        return weight.new_empty(rows, self.stride or len(weight))[:, : len(weight)]

    def plan(self, weight: torch.Tensor, size: int, like: Sequence[torch.Tensor] = ()) -> Product:
        """Plan the product of `size` rows with this weight [outer, inner]. `like`: the model's weights of the same
        shape. Kernels are timed on these in turn, so that large ones are read from memory and not from a cache."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        if self.device.type != "cuda" or (size > INVARIANT_ROWS and not (self.invariant and half)):
            return Product(size, by_torch)
        if self.library is not None and cublaslt.is_aligned(weight):
            for rows in padded_sizes(size):
                kernel = self._fastest_of(weight, rows, like)
                if kernel is not None:
                    return Product(rows, kernel)
        if not self.invariant:
            return Product(size, by_torch)
        if size <= INVARIANT_ROWS:
            return Product(self._torch_rows(weight, size), by_torch)
        piece = self.plan(weight, INVARIANT_ROWS, like).run
        if piece is by_torch and self._same_as_pieces(weight, size):
            return Product(size, by_torch)
        return Product(-(-size // INVARIANT_ROWS) * INVARIANT_ROWS, Pieces(piece, INVARIANT_ROWS))

    def _torch_rows(self, weight: torch.Tensor, size: int) -> int:
        """The rows to pad torch's product to, so that each row gets the bits that it gets among INVARIANT_ROWS.

        On an H200 with the weights of a 7B model, one row becomes 64 in `out` and 32 in `down`, which is faster than
        one, and stays one elsewhere.
        """
        key = weight.shape, size
        if key not in self._rows:
            x, other, expected = self._expected(weight, by_torch)
            self._rows[key] = next(rows for rows in padded_sizes(size) if same_bits(by_torch, x, other, expected, rows))
        return self._rows[key]

    def _same_as_pieces(self, weight: torch.Tensor, size: int) -> bool:
        """Whether torch's product of `size` rows at once has the bits of INVARIANT_ROWS rows at a time."""
        key = weight.shape, size
        if key not in self._in_one_product:
            self._in_one_product[key] = same_bits(by_torch, *self._expected(weight, by_torch), size)
        return self._in_one_product[key]

    def _expected(self, weight: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x and a matrix whose products cancel (see `cancelling`), and the result of `run` on INVARIANT_ROWS rows."""
        x, other = cancelling(weight)
        expected = self.new_out(weight, INVARIANT_ROWS)
        run(x, other, expected)
        return x, other, expected

    def _fastest_of(self, weight: torch.Tensor, rows: int, like: Sequence[torch.Tensor]) -> Run | None:
        """The fastest kernel for `rows` rows that gives the right bits, or None."""
        key = weight.shape, rows
        if key not in self._fastest:
            timed = [weight, *(other for other in like if other is not weight and cublaslt.is_aligned(other))]
            self._fastest[key] = self._search(timed, rows)
        return self._fastest[key]

    def _search(self, weights: Sequence[torch.Tensor], rows: int) -> Run | None:
        """See `_fastest_of`. Kernels are timed first: nearly all have the right bits, so few have to be verified."""
        expected = self._expected_of_kernels(weights[0])
        if expected is None:
            return None
        cached = self._cached(weights, rows)
        if cached is not None and same_bits(cached, *expected, rows):
            return cached
        pieces = [
            Pieces(kernel, piece)
            for piece in PIECES
            if rows > piece
            and rows % piece == 0
            and (kernel := self._fastest_of(weights[0], piece, weights)) is not None
        ]
        families = self._kernels(weights[0], rows)
        first = self._by_speed([family[0] for family in families], weights, rows, rounds=1)[:FAMILIES]
        kernels = [kernel for family in families if family[0] in first for kernel in family]
        ranked = self._by_speed([*kernels, *pieces], weights, rows, rounds=1)
        ranked = self._by_speed(ranked[:FINALISTS], weights, rows, rounds=5) + ranked[FINALISTS:]
        best = next((run for run in ranked if same_bits(run, *expected, rows)), None)
        if best is not None:
            self._store(best, weights[0].shape, rows)
        return best

    def _expected_of_kernels(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """As `_expected`, with the first of cuBLASLt's kernels for INVARIANT_ROWS rows that runs. None if none does."""
        known = self._first.get(weight.shape)
        usual = [family[0] for family in self._kernels(weight, INVARIANT_ROWS)] if known is None else [known]
        for kernel in usual:
            try:
                expected = self._expected(weight, kernel)
            except RuntimeError:
                continue
            self._first[weight.shape] = kernel
            return expected
        return None

    def _kernels(self, weight: torch.Tensor, rows: int) -> list[list[cublaslt.Kernel]]:
        """cuBLASLt's kernels for `rows` rows and this weight [outer, inner], its own suggestions first; see
        `Problem.kernels`."""
        suggestions: dict[bytes, None] = {}
        for size in (rows, *SUGGEST) if rows <= max(SUGGEST) else (rows,):
            with suppress(RuntimeError):  # it has none for this shape
                suggestions |= dict.fromkeys(self._problem(weight.shape, size).suggestions())
        with suppress(RuntimeError):
            return self._problem(weight.shape, rows).kernels(suggestions)
        return []

    def _problem(self, shape: torch.Size, rows: int) -> cublaslt.Problem:
        outer, inner = shape
        return cublaslt.Problem(self.library, rows, outer, inner, self.dtype, self.stride)

    def _cached(self, weights: Sequence[torch.Tensor], rows: int) -> Run | None:
        """The fastest kernel that an earlier process has found."""
        stored = self.kernel_cache.get(_name(weights[0].shape, rows))
        if isinstance(stored, int):
            kernel = self._fastest_of(weights[0], stored, weights) if stored in PIECES and stored < rows else None
            return None if kernel is None else Pieces(kernel, stored)
        try:
            return None if stored is None else self._problem(weights[0].shape, rows).kernel(bytes.fromhex(stored))
        except (RuntimeError, ValueError):
            return None

    def _store(self, run: Run, shape: torch.Size, rows: int) -> None:
        if isinstance(run, Pieces):
            self.kernel_cache.store(_name(shape, rows), run.rows)
        elif isinstance(run, cublaslt.Kernel):
            self.kernel_cache.store(_name(shape, rows), bytes(run.algorithm).hex())

    def _by_speed(self, runs: Sequence[Run], weights: Sequence[torch.Tensor], rows: int, rounds: int) -> list[Run]:
        """The fastest first. Kernels that refuse to run are left out."""
        times = self._times(runs, weights, rows, rounds)
        return [runs[index] for index in sorted(times, key=lambda index: times[index])]

    def _times(self, runs: Sequence[Run], weights: Sequence[torch.Tensor], rows: int, rounds: int) -> dict[int, float]:
        """Milliseconds per call, by index in `runs`: the median of `rounds` timings, without those that refuse."""
        x = weights[0].new_zeros(rows, weights[0].shape[1])
        out = self.new_out(weights[0], rows)
        calls = TIMED_CALLS if rows <= PIECES[-1] else TIMED_CALLS // 4
        marks: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        for index, run in enumerate(runs):
            with suppress(RuntimeError):  # the kernel refuses to run
                run(x, weights[0], out)  # the first call loads the kernel, which takes longer than running it
                marks[index] = []
        for _ in range(rounds):
            for index in marks:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(HEAD_START)
                begin.record()
                for call in range(calls):
                    runs[index](x, weights[call % len(weights)], out)
                end.record()
                marks[index].append((begin, end))
        torch.cuda.synchronize(self.device)
        return {
            index: statistics.median(begin.elapsed_time(end) for begin, end in pairs) / calls
            for index, pairs in marks.items()
        }


def _name(shape: torch.Size, rows: int) -> str:
    return f"{shape[0]} x {shape[1]} x {rows}"


def padded_sizes(size: int) -> list[int]:
    """The numbers of rows to try for a step of `size` rows: its own, then larger captured sizes."""
    return [size, *(rows for rows in ROW_SIZES if size < rows <= INVARIANT_ROWS)]


def cancelling(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x [INVARIANT_ROWS, inner] and a matrix like `weight` [outer, inner] whose product is all rounding errors.

    Every term of a sum occurs a second time, negated and at another index, so a sum in another order has other rounding
    errors. The numbers are the same in every call, and come from a separate generator.
    """
    source = torch.Generator(weight.device).manual_seed(0)
    inner = weight.shape[1]
    half = inner // 2
    order = torch.randperm(half, generator=source, device=weight.device)
    x, other = weight.new_zeros(INVARIANT_ROWS, inner), torch.zeros_like(weight)
    x[:, :half].normal_(generator=source)
    other[:, :half].normal_(generator=source)
    x[:, half : 2 * half] = x[:, order]
    other[:, half : 2 * half] = -other[:, order]
    return x, other


def same_bits(run: Run, x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, rows: int) -> bool:
    """Whether `run` on `rows` rows of x at a time, from several offsets, gives the bits of `expected`.

    x [INVARIANT_ROWS, inner], weight [outer, inner], expected [INVARIANT_ROWS, outer]. For more rows than x has, x is
    repeated.
    """
    times, stride = -(-rows // INVARIANT_ROWS), expected.stride(0)
    if times > 1:
        x, expected = x.repeat(times, 1), expected.repeat(times, 1)
    for start in range(0, len(x) - rows + 1, max(rows, INVARIANT_ROWS // 4)):
        out = expected.new_full((rows, stride), torch.nan)[:, : len(weight)]
        try:
            run(x[start : start + rows].clone(), weight, out)
        except RuntimeError:
            return False
        if not torch.equal(out, expected[start : start + rows]):
            return False
    return True
