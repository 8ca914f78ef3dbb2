"""The products of matrices in fp32, fp16 or bf16: how many rows each is given, and which kernel computes it.

In half precision a row must get the same bits in steps of every size, but the order in which a kernel adds depends on
the number of rows. There are two ways to give a row the bits that it gets among INVARIANT_ROWS rows:

- Use cuBLASLt's kernels that do not split the sum over the inner dimension. On a Hopper GPU all of them were found to
  give the same bits, whatever their tiles, so we may take the fastest for each number of rows.
- Let torch choose the kernel, and give it more rows than the step has, until it adds in the same order.

We check both. A kernel is tested on inputs whose products cancel: the exact result is zero, so all that is left are
rounding errors, and any change in the order of adding changes them. Which of the kernels that pass is the fastest is
timed on the model's own weights. No result depends on that choice. What was found the fastest is kept on disk, so that
later processes need not time it again; they check its bits all the same.
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
from lookahead.backends.graph.matrices.found import Found
from lookahead.backends.graph.sizes import INVARIANT_ROWS, ROW_SIZES

TIMED_CALLS = 8
"""Calls per timing, a quarter of it for large products, each with another layer's weights."""
HEAD_START = 400_000
"""Clock ticks that the device sleeps before a timing, while the host queues all calls: 0.2 ms at 2 GHz."""
PIECES = (INVARIANT_ROWS, 2 * INVARIANT_ROWS)
"""Rows at a time that are tried for larger products. On an H200 the products of a 7B model take 4.74 ms for 256 rows,
11.1 for 512 and 25.2 for 1024: four times 256 is faster."""
FINALISTS = 4
"""How many of the fastest kernels of a first timing are timed again, more carefully."""
FAMILIES = 3
"""Of how many kernels every cluster is timed: those that are the fastest with their first one. A kernel takes
milliseconds to load, so few are tried. On an H200, the products of a 7B model are searched for in 0.1 to 0.3 s for each
number of rows, and miss the best by 2% at most."""

SEARCH = "2"
"""The version of the search. What an earlier version found is not used: it may be slower."""

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
        self.found = Found(self._facts()) if self.library is not None else Found(None)
        self._fastest: dict[tuple[torch.Size, int], Run | None] = {}
        self._first: dict[torch.Size, Run] = {}  # the kernels that say which bits are right
        self._rows: dict[tuple[torch.Size, int], int] = {}
        self._whole: dict[tuple[torch.Size, int], bool] = {}

    def _facts(self) -> dict[str, str]:
        """What the fastest kernels depend on, and which search found them."""
        name = torch.cuda.get_device_name(self.device)
        return {"device": name, "dtype": str(self.dtype), "library": str(self.library.version()), "search": SEARCH}

    def plan(self, weight: torch.Tensor, size: int, like: Sequence[torch.Tensor] = ()) -> Product:
        """How to multiply `size` rows with this weight [outer, inner]. `like`: the model's weights of the same shape.
        Kernels are timed on these in turn, so that large ones are read from memory and not from a cache."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        if self.device.type != "cuda" or (size > INVARIANT_ROWS and not (self.invariant and half)):
            return Product(size, by_torch)
        if self.library is not None and cublaslt.takes(weight):
            for rows in tried(size):
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
        """How many rows to give torch's product, so that each row gets the bits that it gets among INVARIANT_ROWS.

        On an H200 with the weights of a 7B model, one row becomes 64 in `out` and 32 in `down`, which is faster than
        one, and stays one elsewhere.
        """
        key = weight.shape, size
        if key not in self._rows:
            x, other, whole = self._expected(weight, by_torch)
            self._rows[key] = next(rows for rows in tried(size) if same_bits(by_torch, x, other, whole, rows))
        return self._rows[key]

    def _same_as_pieces(self, weight: torch.Tensor, size: int) -> bool:
        """Whether torch's product of `size` rows at once has the bits of INVARIANT_ROWS rows at a time."""
        key = weight.shape, size
        if key not in self._whole:
            self._whole[key] = same_bits(by_torch, *self._expected(weight, by_torch), size)
        return self._whole[key]

    def _expected(self, weight: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x and a matrix whose products cancel (see `cancelling`), and what `run` makes of INVARIANT_ROWS rows."""
        x, other = cancelling(weight)
        whole = x.new_empty(INVARIANT_ROWS, len(weight))
        run(x, other, whole)
        return x, other, whole

    def _fastest_of(self, weight: torch.Tensor, rows: int, like: Sequence[torch.Tensor]) -> Run | None:
        """The fastest kernel for so many rows that gives the right bits, or None if there is none."""
        key = weight.shape, rows
        if key not in self._fastest:
            timed = [weight, *(other for other in like if other is not weight and cublaslt.takes(other))]
            self._fastest[key] = self._search(timed, rows)
        return self._fastest[key]

    def _search(self, weights: Sequence[torch.Tensor], rows: int) -> Run | None:
        """See `_fastest_of`. The kernels are timed first: nearly all have the right bits, so few have to be checked."""
        expected = self._expected_of_kernels(weights[0])
        if expected is None:
            return None
        kept = self._kept(weights, rows)
        if kept is not None and same_bits(kept, *expected, rows):
            return kept
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
        found = self._by_speed([*kernels, *pieces], weights, rows, rounds=1)
        found = self._by_speed(found[:FINALISTS], weights, rows, rounds=5) + found[FINALISTS:]
        best = next((run for run in found if same_bits(run, *expected, rows)), None)
        if best is not None:
            self._keep(best, weights[0].shape, rows)
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
        """cuBLASLt's kernels for so many rows and this weight [outer, inner]; see `Problem.kernels`."""
        try:
            return self._problem(weight.shape, rows).kernels()
        except RuntimeError:  # it has none for this shape
            return []

    def _problem(self, shape: torch.Size, rows: int) -> cublaslt.Problem:
        outer, inner = shape
        return cublaslt.Problem(self.library, rows, outer, inner, self.dtype)

    def _kept(self, weights: Sequence[torch.Tensor], rows: int) -> Run | None:
        """What an earlier process found to be the fastest."""
        found = self.found.get(_name(weights[0].shape, rows))
        if isinstance(found, int):
            kernel = self._fastest_of(weights[0], found, weights) if found in PIECES and found < rows else None
            return None if kernel is None else Pieces(kernel, found)
        try:
            return None if found is None else self._problem(weights[0].shape, rows).kernel(bytes.fromhex(found))
        except (RuntimeError, ValueError):
            return None

    def _keep(self, run: Run, shape: torch.Size, rows: int) -> None:
        if isinstance(run, Pieces):
            self.found.put(_name(shape, rows), run.rows)
        elif isinstance(run, cublaslt.Kernel):
            self.found.put(_name(shape, rows), bytes(run.algorithm).hex())

    def _by_speed(self, runs: Sequence[Run], weights: Sequence[torch.Tensor], rows: int, rounds: int) -> list[Run]:
        """The fastest first. Kernels that refuse to run are left out."""
        times = self._times(runs, weights, rows, rounds)
        return [runs[place] for place in sorted(times, key=lambda place: times[place])]

    def _times(self, runs: Sequence[Run], weights: Sequence[torch.Tensor], rows: int, rounds: int) -> dict[int, float]:
        """Milliseconds per call of each that runs, by its place: the median of so many rounds."""
        x = weights[0].new_zeros(rows, weights[0].shape[1])
        out = weights[0].new_empty(rows, len(weights[0]))
        calls = TIMED_CALLS if rows <= PIECES[-1] else TIMED_CALLS // 4
        marks: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        for place, run in enumerate(runs):
            with suppress(RuntimeError):  # the kernel refuses to run
                run(x, weights[0], out)  # the first call loads it, for longer than it runs
                marks[place] = []
        for _ in range(rounds):
            for place in marks:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(HEAD_START)
                begin.record()
                for call in range(calls):
                    runs[place](x, weights[call % len(weights)], out)
                end.record()
                marks[place].append((begin, end))
        torch.cuda.synchronize(self.device)
        return {
            place: statistics.median(begin.elapsed_time(end) for begin, end in pairs) / calls
            for place, pairs in marks.items()
        }


def _name(shape: torch.Size, rows: int) -> str:
    return f"{shape[0]} x {shape[1]} x {rows}"


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
