"""cuBLASLt through ctypes: lists the kernels for a matrix product, and runs any of them.

torch always takes the first one. Only kernels that do not split the sum over the inner dimension are listed here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# The library's codes of types, attributes and cluster shapes.
TYPES = {torch.bfloat16: 14, torch.float16: 2}
FP32, COMPUTE_FP32 = 0, 68
TRANSPOSE_A = 3
SPLITS, REDUCTION, CLUSTER = 2, 3, 8
CLUSTERS = (2, 3, 4, 5, 6, 7)
"""Clusters of multiprocessors that share what they load: 1, 2 x 1, 4 x 1, 1 x 2, 2 x 2 and 4 x 2 of them."""
MOST_SUGGESTIONS = 16
"""Number of suggestions to request; cuBLASLt 13 gives eight."""
ALIGNMENT = 256
"""Alignment of matrices in bytes that its kernels may rely on. torch's allocations have it."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Suggestion(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@cache
def library(device: torch.device) -> Library | None:
    """A handle of the cuBLASLt that torch has loaded, for this device; None without one."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        with torch.cuda.device(device):
            return Library(ctypes.CDLL(f"libcublasLt.so.{version}"))
    except (OSError, RuntimeError):
        return None


def is_aligned(weight: torch.Tensor) -> bool:
    """Whether a weight [outer, inner] has the memory layout that the kernels expect."""
    return weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0


class Library:
    """A handle of cuBLASLt. Called with a function's name, it runs that function; RuntimeError if that fails."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls
        self.handle = ctypes.c_void_p()
        self("Create", ctypes.byref(self.handle))

    def __call__(self, name: str, *args: Any) -> None:
        status = getattr(self.calls, f"cublasLt{name}")(*args)
        if status:
            raise RuntimeError(f"cublasLt{name} failed with status {status}")

    def version(self) -> int:
        """The library's version, such as 130200."""
        self.calls.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(self.calls.cublasLtGetVersion())

    def accepts(self, name: str, *args: Any) -> bool:
        """Run a function, and return whether it succeeded."""
        return not getattr(self.calls, f"cublasLt{name}")(*args)


class Problem:
    """out [rows, outer] = x [rows, inner] weight [outer, inner]^T, row-major, in half precision, accumulated in fp32.

    Rows of `out` are `stride` numbers apart, without it next to one another.
    cuBLASLt's matrices are column-major, so to it the problem is out^T = weight x^T.
    """

    def __init__(
        self, library: Library, rows: int, outer: int, inner: int, dtype: torch.dtype, stride: int = 0
    ) -> None:
        self.library = library
        self.about, transposed = ctypes.c_void_p(), ctypes.c_int(1)
        library("MatmulDescCreate", ctypes.byref(self.about), COMPUTE_FP32, FP32)
        library("MatmulDescSetAttribute", self.about, TRANSPOSE_A, *_value(transposed))
        self.weight, self.x = self._layout(dtype, inner, outer), self._layout(dtype, inner, rows)
        self.out = self._layout(dtype, outer, rows, stride)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def _layout(self, dtype: torch.dtype, height: int, width: int, stride: int = 0) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(stride or height)
        self.library("MatrixLayoutCreate", ctypes.byref(layout), TYPES[dtype], *sizes)
        return layout

    def suggestions(self) -> list[bytes]:
        """The algorithms that cuBLASLt suggests for this problem, the best first."""
        wish, found, given = ctypes.c_void_p(), (_Suggestion * MOST_SUGGESTIONS)(), ctypes.c_int()
        self.library("MatmulPreferenceCreate", ctypes.byref(wish))
        self.library(
            "MatmulAlgoGetHeuristic", self.library.handle, self.about, self.weight, self.x, self.out, self.out, wish,
            MOST_SUGGESTIONS, found, ctypes.byref(given),
        )  # fmt: skip
        self.library("MatmulPreferenceDestroy", wish)
        return [bytes(suggestion.algorithm) for suggestion in found[: given.value]]

    def kernels(self, suggestions: Iterable[bytes]) -> list[list[Kernel]]:
        """Suggested algorithms, also those for other numbers of rows, as kernels of this problem: each with all cluster
        shapes that the library accepts."""
        known, kernels = set[bytes](), list[list[Kernel]]()
        for suggestion in suggestions:
            family = []
            for cluster in CLUSTERS:
                algorithm = _Algorithm.from_buffer_copy(suggestion)
                if self._set(algorithm, cluster) and self._runs(algorithm) and bytes(algorithm) not in known:
                    known.add(bytes(algorithm))
                    family.append(Kernel(self, algorithm))
            if family:
                kernels.append(family)
        return kernels

    def kernel(self, algorithm: bytes) -> Kernel:
        """A kernel of an earlier process, by its `algorithm`. RuntimeError if the library does not take it."""
        if len(algorithm) != ctypes.sizeof(_Algorithm):
            raise RuntimeError(f"an algorithm of {len(algorithm)} bytes")
        known = _Algorithm.from_buffer_copy(algorithm)
        if not self._runs(known):
            raise RuntimeError("cuBLASLt does not take this algorithm here")
        return Kernel(self, known)

    def _set(self, algorithm: _Algorithm, cluster: int) -> bool:
        """Set an algorithm's cluster, and that it must not split the sum. False if it cannot do that."""
        values = {SPLITS: ctypes.c_uint32(1), REDUCTION: ctypes.c_uint32(0), CLUSTER: ctypes.c_uint16(cluster)}
        return all(
            self.library.accepts("MatmulAlgoConfigSetAttribute", ctypes.byref(algorithm), name, *_value(value))
            for name, value in values.items()
        )

    def _runs(self, algorithm: _Algorithm) -> bool:
        """Whether an algorithm can compute the problem without a workspace."""
        result = _Suggestion()
        accepted = self.library.accepts(
            "MatmulAlgoCheck", self.library.handle, self.about, self.weight, self.x, self.out, self.out,
            ctypes.byref(algorithm), ctypes.byref(result),
        )  # fmt: skip
        return accepted and result.state == 0 and result.workspace == 0

    def run(self, algorithm: _Algorithm, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """x [rows, inner], weight [outer, inner], out [rows, outer], on the current stream."""
        weight_at, x_at, out_at = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, out))
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        self.library(
            "Matmul", self.library.handle, self.about, ctypes.byref(self._one), weight_at, self.weight, x_at, self.x,
            ctypes.byref(self._zero), out_at, self.out, out_at, self.out, ctypes.byref(algorithm),
            ctypes.c_void_p(), ctypes.c_size_t(0), stream,
        )  # fmt: skip


def _value(value: Any) -> tuple[Any, ctypes.c_size_t]:
    """An attribute's value as cuBLASLt takes it: its address and its size."""
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute a problem."""

    problem: Problem
    algorithm: _Algorithm

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """x [rows, inner], weight [outer, inner], out [rows, outer].

        x and weight are contiguous, out has the problem's stride, and all are aligned as allocations are
        (`ALIGNMENT`). Rows of x and out beyond the problem's are ignored.
        """
        self.problem.run(self.algorithm, x, weight, out)
