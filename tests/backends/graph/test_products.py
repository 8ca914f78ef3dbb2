"""Which rows and kernels a step's products get: those that give the right bits, and of these the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from lookahead.backends.graph.matrices import cublaslt
from lookahead.backends.graph.matrices.kernel_cache import VERSION, KernelCache
from lookahead.backends.graph.matrices.lowering import Matrices
from lookahead.backends.graph.matrices.products import Pieces, Product, Products, by_torch, cancelling
from lookahead.backends.graph.ops import Ops
from lookahead.models.matrix import Matrix

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture
def weights() -> list[torch.Tensor]:
    return [torch.randn(24, 16) for _ in range(2)]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """As on a GPU without cuBLASLt, but computed on the CPU."""
    made = Products(torch.device("cpu"), torch.float32, invariant=True)
    monkeypatch.setattr(made, "device", torch.device("cuda"))
    return made


def test_torch_is_given_the_rows_that_make_it_invariant(
    products: Products, weights: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here torch adds products of fewer than 30 rows, of 64, and of more than 200 in another order. No step may use
    those. A larger step runs in pieces."""

    def mm(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        FakeKernel(0, usual=30 <= len(x) != 64 and len(x) < 200)(x, y.t(), out)

    monkeypatch.setattr(torch, "mm", mm)
    rows = [products.plan(weights[0], size, weights).rows for size in (1, 2, 16, 32, 64, 96, 128)]
    assert rows == [32, 32, 32, 32, 96, 96, 128]
    assert products.plan(weights[0], 256, weights) == Product(256, by_torch)  # in fp32 it does not matter
    monkeypatch.setattr(products, "dtype", torch.bfloat16)
    assert products.plan(weights[0], 192, weights) == Product(192, by_torch)
    assert_pieces(products.plan(weights[0], 256, weights), weights[0], 256)
    assert_pieces(products.plan(weights[0], 768, weights), weights[0], 768)
    monkeypatch.setattr(products, "invariant", False)
    assert [products.plan(weights[0], size, weights) for size in (1, 64, 256)] == [
        Product(k, by_torch) for k in (1, 64, 256)
    ]


def assert_pieces(plan: Product, weight: torch.Tensor, rows: int) -> None:
    """The plan is for so many rows, and each of them gets the bits that it gets among 128."""
    assert plan.rows == rows
    assert plan.run is not by_torch
    x, out = torch.randn(rows, weight.shape[1]), torch.full((rows, len(weight)), torch.nan)
    plan(x, weight, out)
    assert torch.equal(out, (x[:, None] * weight).sum(-1))


class FakeKernel:
    """A kernel that takes so long, and adds in the usual order or in another one."""

    def __init__(self, milliseconds: float, usual: bool = True) -> None:
        self.milliseconds, self.usual = milliseconds, usual

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((x[:, None] * weight).sum(-1) + (not self.usual))


Kernels = dict[int, list[FakeKernel]]


@pytest.fixture
def with_kernels(products: Products, monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernels], Products]:
    def make(kernels: Kernels) -> Products:
        def time(run: Any, rows: int) -> float:
            if isinstance(run, Pieces):
                return rows / run.rows * time(run.run, run.rows)
            milliseconds: float = run.milliseconds
            return milliseconds

        def times(runs: Sequence[Any], weights: Any, rows: int, rounds: int) -> dict[int, float]:
            return {place: time(run, rows) for place, run in enumerate(runs)}

        products._fastest.clear()
        products._first.clear()
        monkeypatch.setattr(products, "library", object())
        monkeypatch.setattr(products, "_kernels", lambda weight, rows: [[kernel] for kernel in kernels.get(rows, [])])
        monkeypatch.setattr(products, "_times", times)
        monkeypatch.setattr(cublaslt, "is_aligned", lambda weight: True)
        return products

    return make


def test_the_fastest_kernel_of_the_same_bits_is_taken(
    with_kernels: Callable[[Kernels], Products], weights: Sequence[torch.Tensor]
) -> None:
    slow, other, fast = FakeKernel(3), FakeKernel(1, usual=False), FakeKernel(2)
    many = [FakeKernel(9), *(FakeKernel(8 - i / 10) for i in range(6)), FakeKernel(5)]
    products = with_kernels({1: [slow, other, fast], 16: [slow], 32: [other], 128: many})
    assert products.plan(weights[0], 1, weights) == Product(1, fast)
    assert products.plan(weights[0], 16, weights) == Product(16, slow)
    assert products.plan(weights[0], 32, weights) == products.plan(weights[0], 64, weights) == Product(128, many[-1])
    assert products.plan(weights[0], 256, weights) == Product(256, by_torch)


def test_the_clusters_of_the_fastest_families_are_timed(
    with_kernels: Callable[[Kernels], Products], weights: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second kernel of the third family is the fastest; the fastest of all is in a family that is not tried."""
    families = [[FakeKernel(1), FakeKernel(7)], [FakeKernel(2)], [FakeKernel(3), FakeKernel(0.5)]]
    products = with_kernels({})
    monkeypatch.setattr(products, "_kernels", lambda weight, rows: [*families, [FakeKernel(4), FakeKernel(0)]])
    assert products.plan(weights[0], 1, weights).run is families[2][1]


def test_the_time_to_load_a_kernel_is_not_counted(
    products: Products, weights: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's first call takes 1,000 ms here, and its others a few. One kernel refuses to run."""
    clock, loaded = 0.0, set[float]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = 0.0

        def record(self) -> None:
            self.time = clock

        def elapsed_time(self, later: Event) -> float:
            return later.time - self.time

    def kernel(milliseconds: float) -> Callable[..., None]:
        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal clock
            if milliseconds < 0:
                raise RuntimeError
            clock += milliseconds + 1000 * (milliseconds not in loaded)
            loaded.add(milliseconds)

        return run

    for name, fake in (("Event", Event), ("_sleep", lambda ticks: None), ("synchronize", lambda device: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    assert products._times([kernel(3), kernel(-1), kernel(2)], weights, 16, 1) == {0: 3, 2: 2}


def test_the_first_kernel_for_128_rows_says_which_bits(
    with_kernels: Callable[[Kernels], Products], weights: Sequence[torch.Tensor]
) -> None:
    usual, other = FakeKernel(1), FakeKernel(2, usual=False)
    products = with_kernels({1: [usual], 64: [other], 128: [FakeKernel(9, usual=False), usual]})
    assert products.plan(weights[0], 1, weights) == Product(64, other)


def test_a_large_step_has_the_bits_of_a_small_one(
    with_kernels: Callable[[Kernels], Products], weights: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kernel of its own, or else in pieces of 128 rows, the last of which may hold more rows than the step has."""
    whole, other, slow, fast = FakeKernel(9), FakeKernel(1, usual=False), FakeKernel(3), FakeKernel(2)
    products = with_kernels({128: [whole], 256: [other, slow, fast], 192: [other]})
    monkeypatch.setattr(products, "dtype", torch.bfloat16)
    assert products.plan(weights[0], 256, weights) == Product(256, fast)
    calls: list[int] = []
    monkeypatch.setattr(FakeKernel, "__call__", noting(FakeKernel.__call__, whole, calls))
    assert_pieces(products.plan(weights[0], 192, weights), weights[0], 256)
    assert calls[-2:] == [128, 128]
    monkeypatch.setattr(products, "invariant", False)
    assert products.plan(weights[0], 256, weights) == Product(256, by_torch)


def noting(call: Callable[..., None], which: FakeKernel, calls: list[int]) -> Callable[..., None]:
    """The call, which notes the rows that this kernel is given."""

    def run(kernel: FakeKernel, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        if kernel is which:
            calls.append(len(x))
        call(kernel, x, weight, out)

    return run


def test_torch_is_asked_where_there_is_no_kernel(
    with_kernels: Callable[[Kernels], Products], weights: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    products = with_kernels({})
    assert products.plan(weights[0], 1, weights).run is by_torch
    products = with_kernels({128: [FakeKernel(1)]})
    monkeypatch.setattr(cublaslt, "is_aligned", lambda weight: weight is not weights[1])
    assert products.plan(weights[0], 128, weights).run is not by_torch
    assert products.plan(weights[1], 128, weights).run is by_torch


class KnownKernel(cublaslt.Kernel):
    """As cuBLASLt's kernels: it is known by the bytes of its algorithm."""

    def __init__(self, number: int, usual: bool = True) -> None:
        super().__init__(None, cublaslt._Algorithm((number,)))  # type: ignore[arg-type]
        object.__setattr__(self, "fake", FakeKernel(number, usual))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.fake(x, weight, out)  # type: ignore[attr-defined]

    @property
    def milliseconds(self) -> int:
        number: int = self.algorithm.data[0]
        return number


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, "one both sixteen many"), (64, "both sixteen many"), (256, "large")]
)
def test_kernels_for_other_numbers_of_rows_are_tried(
    rows: int, expected: str, weights: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind those for its own, each once, where a step has few rows. cuBLASLt may have none for a number of rows."""
    suggested = {1: "one both", 16: "both sixteen", 128: "many both", 256: "large"}

    class Problem:
        def __init__(self, size: int) -> None:
            self.size = size

        def suggestions(self) -> list[str]:
            if self.size not in suggested:
                raise RuntimeError("none")
            return suggested[self.size].split()

        def kernels(self, given: Iterable[str]) -> list[str]:
            return [f"{name} for {self.size}" for name in given]

    products: Any = Products(torch.device("cpu"), torch.bfloat16, invariant=True)
    monkeypatch.setattr(products, "_problem", lambda shape, size: Problem(size))
    assert products._kernels(weights[0], rows) == [f"{name} for {rows}" for name in expected.split()]


def test_what_was_found_is_not_timed_again(
    with_kernels: Callable[[Kernels], Products],
    weights: Sequence[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A later process takes the kernel from the file, if that has the right bits, and pieces likewise."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    kernels = {number: KnownKernel(number) for number in (3, 4, 5)} | {2: KnownKernel(2, usual=False)}
    restored: list[int] = []

    class Problem:
        def kernel(self, algorithm: bytes) -> KnownKernel:
            restored.append(algorithm[0])
            return kernels[algorithm[0]]

    def later() -> Products:
        products = with_kernels({1: [kernels[4], kernels[3]], 128: [kernels[5]], 512: [KnownKernel(99)]})  # type: ignore[list-item]
        monkeypatch.setattr(products, "dtype", torch.bfloat16)
        monkeypatch.setattr(products, "kernel_cache", KernelCache({"device": "a"}))
        monkeypatch.setattr(products, "_problem", lambda shape, rows: Problem())
        return products

    first = later()
    assert first.plan(weights[0], 1, weights).run is kernels[3]
    assert first.plan(weights[0], 512, weights).run == Pieces(kernels[5], 128)
    assert not restored
    again = later()
    with monkeypatch.context() as only:
        only.setattr(again, "_by_speed", None)  # nothing is timed
        assert again.plan(weights[0], 1, weights).run is kernels[3]
        assert again.plan(weights[0], 512, weights).run == Pieces(kernels[5], 128)
    assert restored == [3, 5]
    first.kernel_cache.store("24 x 16 x 1", bytes(kernels[2].algorithm).hex())  # it has other bits
    assert later().plan(weights[0], 1, weights).run is kernels[3]
    for broken in ("?", bytes([7] * 64).hex()):
        first.kernel_cache.store("24 x 16 x 1", broken)
        monkeypatch.setattr(Problem, "kernel", lambda self, algorithm: cublaslt.Problem.kernel(self, algorithm[:5]))
        assert later().plan(weights[0], 1, weights).run is kernels[3]


def test_found_things_outlive_their_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    one, other = KernelCache({"device": "a"}), KernelCache({"device": "a"})
    one.store("x", 1)
    other.store("y", "z")
    both = KernelCache({"device": "a"})
    assert (both.get("x"), both.get("y"), both.get("w")) == (1, "z", None)
    assert KernelCache({"device": "b"}).get("x") is None
    nowhere = KernelCache(None)
    nowhere.store("x", 2)
    assert nowhere.get("x") == 2
    for file in (tmp_path / "products").iterdir():
        for text in ("", "[]", '{"found": 3}', '{"found": {"x": []}}'):
            file.write_text(text.replace("{", f'{{"version": {VERSION}, ', 1))
            assert KernelCache({"device": "a"}).get("x") is None
        for version in ("", f'"version": {VERSION + 1}, '):
            file.write_text(f'{{{version}"found": {{"x": 1}}}}')
            assert KernelCache({"device": "a"}).get("x") is None
        file.unlink()
    (tmp_path / "products").rmdir()
    (tmp_path / "products").write_text("in the way")
    one.store("v", 3)
    assert one.get("v") == 3


@pytest.mark.parametrize("fault", ["other bits from row 96 on", "writes nothing", "refuses"])
def test_a_kernel_with_a_fault_is_not_taken(
    fault: str, with_kernels: Callable[[Kernels], Products], weights: Sequence[torch.Tensor]
) -> None:
    class Faulty(FakeKernel):
        calls = 0

        def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            self.calls += 1
            if fault == "refuses":
                raise RuntimeError("cublasLtMatmul failed with status 15")
            if fault != "writes nothing":
                super().__call__(x, weight, out)
                out += self.calls == 4

    right = FakeKernel(2)
    products = with_kernels({1: [Faulty(1), right], 128: [right]})
    assert products.plan(weights[0], 1, weights) == Product(1, right)


def test_inputs_that_cancel_tell_orders_apart() -> None:
    """Sums in one go, in halves, and backwards differ. With bf16 inputs that do not cancel, hardly one result would."""
    x, weight = cancelling(torch.empty(64, 576, dtype=torch.bfloat16))
    terms = x[:, None].float() * weight.float()
    assert terms.double().sum(-1).abs().max() == 0

    def added(places: Sequence[int]) -> torch.Tensor:
        return reduce(torch.add, (terms[..., place] for place in places))

    whole = added(range(576)).bfloat16()
    for other in (added(range(288)) + added(range(288, 576)), added(range(575, -1, -1))):
        assert (other.bfloat16() != whole).float().mean() > 0.5
    assert torch.equal(cancelling(torch.empty(64, 576, dtype=torch.bfloat16))[0], x)


def test_a_product_computes_its_rows_and_no_more(weights: Sequence[torch.Tensor]) -> None:
    x, out = torch.randn(5, 16), torch.zeros(5, 24)
    Product(3, by_torch)(x, weights[0], out)
    assert torch.equal(out[:3], x[:3] @ weights[0].t())
    assert not out[3:].any()


def test_matrices_that_cublaslt_takes() -> None:
    memory = torch.zeros(64 * 64 + 512)
    start = -memory.data_ptr() % 256 // 4
    matrix = memory[start : start + 64 * 64].view(64, 64)
    assert cublaslt.is_aligned(matrix)
    assert not cublaslt.is_aligned(matrix[:, :32])
    assert not cublaslt.is_aligned(memory[start + 1 : start + 1 + 64 * 64].view(64, 64))


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 11008), (960, 576), (576, 1536), (2048, 512)])
def test_rows_have_the_same_bits_in_every_size(shape: tuple[int, int], dtype: torch.dtype) -> None:
    products = Products(torch.device("cuda"), dtype, invariant=True)
    torch.manual_seed(1)
    weights = [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(3)]
    x, out = (
        torch.randn(128, shape[1], dtype=dtype, device="cuda"),
        torch.zeros(1024, shape[0], dtype=dtype, device="cuda"),
    )
    state = torch.cuda.get_rng_state()
    plans = {size: products.plan(weights[0], size, weights) for size in (1, 2, 8, 16, 32, 64, 96, 128)}
    large = {size: products.plan(weights[0], size, weights) for size in (192, 256, 768, 1024)}
    assert torch.equal(torch.cuda.get_rng_state(), state)
    exact = x.double() @ weights[0].double().t()
    plans[128](x, weights[0], out)
    assert (out[:128] - exact).abs().max() <= 2 * (torch.mm(x, weights[0].t()) - exact).abs().max()
    x, weights[0] = (part[:, torch.arange(shape[1]).flip(0)].contiguous() for part in cancelling(weights[0]))
    plans[128](x, weights[0], out)
    whole = out[:128].clone()
    for size, plan in plans.items():
        assert size <= plan.rows <= 128
        for start in range(0, 129 - plan.rows, 13):
            out.fill_(torch.nan)
            plan(x[start : start + plan.rows].clone(), weights[0], out)
            assert torch.equal(out[:size], whole[start : start + size]), (size, start)
    for size, plan in large.items():
        out.fill_(torch.nan)
        plan(x.repeat(8, 1), weights[0], out)
        assert torch.equal(out[:size], whole.repeat(8, 1)[:size]), size
    if products.library is not None:
        assert all(plan.run is not by_torch for plan in plans.values())


@pytest.mark.parametrize(("columns", "stride"), [(128, 128), (131, 192), (61, 64)])
def test_rows_of_odd_widths_are_aligned(columns: int, stride: int) -> None:
    """As those of logits; where the width is odd, the last columns have a kernel of their own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    linear = torch.nn.Linear(256, columns, bias=False, device=device, dtype=dtype)
    matrices = Matrices(Products(device, dtype, invariant=True), Ops(device))
    matrix = matrices.lower(Matrix((linear,)), 64)
    out = matrix.new_out(192)
    assert out.shape == (192, columns)
    assert out.stride() == (stride, 1)
    x = torch.randn(192, 256, device=device, dtype=dtype)
    for rows in (1, 3, 128, 192):
        out.fill_(torch.nan)
        matrix.plan(rows)(x, out)
        expected = x[:rows].float() @ linear.weight.float().T
        torch.testing.assert_close(out[:rows].float(), expected, atol=2e-2, rtol=2e-2)
