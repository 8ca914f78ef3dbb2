"""Failures of devices and compilers: told apart, and said in one line."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lookahead
from lookahead.backends import choose
from lookahead.backends.choose import check_triton, graph_backend, make_backend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.failures import (
    CompilerError,
    DeviceError,
    DeviceMemoryError,
    clear_errors,
    compiler_error,
    device_error,
    memory_error,
    out_of_memory,
)
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.ops import Ops
from lookahead.loading.embedded import ModelError
from lookahead.models.facts import UnsupportedModelError
from lookahead.parallel import RankError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LOST = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' ...\n"
FULL = "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 139.80 GiB ..."


class CompilationError(Exception):
    """As Triton raises it: its text begins with a place and the source, and the reason comes last."""

    __module__ = "triton.compiler.errors"

    def __init__(self, reason: str) -> None:
        self.src = "def attend_rows(q, k):\n    x = q + k"
        self.error_message = reason
        super().__init__(f"at 2:8:\n{self.src}\n        ^\n{reason}")


class JITFunction:
    """A kernel that is compiled when it is first run."""

    def __init__(self, fn: Any, error: Exception) -> None:
        self.fn, self.error = fn, error

    def run(self) -> None:
        raise self.error


def attend_near() -> None: ...


def raised(error: Exception) -> Exception:
    """The error with a traceback through the kernel that it comes from."""
    with pytest.raises(type(error)) as caught:
        JITFunction(attend_near, error).run()
    return caught.value


# Out of memory.


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError(FULL), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError(LOST), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, full: bool) -> None:
    assert out_of_memory(error) is full
    later = RuntimeError("the end of a capture fails, too")
    later.__context__ = error
    assert out_of_memory(later) is full


def test_a_memory_error_says_what_was_needed_what_is_free_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 29, 80 << 30))
    error = memory_error(torch.OutOfMemoryError(FULL), "a step of 512 tokens", CUDA, slot=3)
    assert str(error).startswith(
        "a step of 512 tokens needs 20.50 MiB of memory, and 1.50 of 80.00 GiB are free on cuda; run fewer sequences "
    )
    assert "\n" not in str(error)
    assert isinstance(error, torch.OutOfMemoryError)
    assert out_of_memory(error)
    assert error.slot == 3
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (_ for _ in ()).throw(RuntimeError(LOST)))
    assert str(memory_error(RuntimeError("x"), "it", CUDA)).startswith("it needs more memory; run fewer sequences ")


# A lost device.


def test_a_lost_device_is_one_line_and_a_plain_error_is_none() -> None:
    lost = device_error(torch.AcceleratorError(LOST), CPU)
    assert isinstance(lost, DeviceError)
    assert lookahead.DeviceError is DeviceError
    assert str(lost) == (
        "the device cpu is lost (CUDA error: an illegal memory access was encountered); no call of this process can "
        "use it: start it again"
    )
    assert device_error(lost, CPU) is lost
    assert device_error(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), CPU) is not None
    for other in (RuntimeError("a rule of its own"), ZeroDivisionError("x"), torch.OutOfMemoryError(FULL)):
        assert device_error(other, CPU) is None


def test_an_error_that_quotes_a_lost_device_is_another_error() -> None:
    """A message may contain a client's schema, or what another rank has reported."""
    reported = RankError(f"rank 1 failed after step 3: AcceleratorError: {LOST}")
    for other in (ValueError(LOST), KeyError("CUDA error"), ModelError("no model '[CUDA]'"), reported):
        assert device_error(other, CPU) is None
    wrapped = ValueError("its forward pass fails")
    wrapped.__cause__ = RuntimeError(LOST)
    assert device_error(wrapped, CPU) is not None


def test_the_device_is_asked_whether_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert device_error(error, CUDA) is None

    def fail(device: Any) -> None:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert device_error(error, CUDA) is not None
    assert device_error(RuntimeError("of the host alone"), CUDA) is None


# Compilers.


def test_a_kernel_that_does_not_compile_is_named() -> None:
    reason = "incompatible types: fp16 and int1"
    by_source = compiler_error(CompilationError(reason))
    assert str(by_source) == f"the Triton kernel 'attend_rows' does not compile: {reason}"
    by_frame = compiler_error(raised(RuntimeError("Failed to find C compiler.\nPlease specify one")))
    assert str(by_frame) == "the Triton kernel 'attend_near' does not compile: Failed to find C compiler."
    assert isinstance(by_frame, UnsupportedModelError)
    assert compiler_error(RuntimeError("shapes do not fit")) is None
    assert compiler_error(raised(RuntimeError("Triton Error [CUDA]: an illegal memory access"))) is None
    assert compiler_error(raised(torch.OutOfMemoryError(FULL))) is None
    wrapped = ValueError("its forward pass fails")
    wrapped.__cause__ = CompilationError(reason)
    with pytest.raises(CompilerError, match="'attend_rows'"), clear_errors(CPU):
        raise wrapped


class Kernels:
    """In place of the ops of a step: the kernel that writes K/V fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *args: Any, **options: Any) -> Any:
        JITFunction(attend_near, self.error).run()


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a backend as on a GPU, with the kernels' slow twins."""
    monkeypatch.setattr(choose, "check_triton", lambda: None)
    real = choose.input_device
    monkeypatch.setattr(choose, "input_device", lambda model: SimpleNamespace(type="cuda", real=real(model)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CompilationError("no such type"), "the Triton kernel 'attend_near' does not compile: no such type"),
        (RuntimeError("Failed to find C compiler."), "the Triton kernel 'attend_near' does not compile: Failed to fi"),
        (torch.OutOfMemoryError(FULL), "needs 20.50 MiB of memory, and 1.00 of 80.00 GiB are free"),
    ],
)
@pytest.mark.usefixtures("on_cuda")
def test_without_kernels_or_memory_the_eager_backend_runs_the_model(
    error: Exception, line: str, make_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    monkeypatch.setattr(Ops, "tiles", Kernels(error))
    lines: list[str] = []
    assert type(make_backend(model, "auto", lines.append)) is EagerBackend
    assert len(lines) == 1
    assert line in lines[0]
    assert lines[0].endswith("; the eager backend runs it")
    assert "\n" not in lines[0]
    with caplog.at_level(logging.WARNING, "lookahead"):  # nobody asked for a log
        assert type(make_backend(model, "auto")) is EagerBackend
    assert [record.getMessage() for record in caplog.records if record.name == "lookahead"] == lines
    with pytest.raises((UnsupportedModelError, DeviceMemoryError)) as asked:
        make_backend(model, "graph")
    assert line in str(asked.value)
    assert "\n" not in str(asked.value)


def test_a_broken_triton_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lookahead.backends.graph.kernels.attention", None)
    with pytest.raises(CompilerError, match=r"^Triton, which the graph backend needs, does not work here: .+$"):
        check_triton()


@pytest.mark.usefixtures("on_cuda")
def test_a_device_that_is_lost_while_a_backend_is_made_is_no_reason_for_another_one(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: Any) -> None:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(Ops, "tiles", Kernels(torch.AcceleratorError(LOST)))
    with pytest.raises(DeviceError, match="illegal memory access"):
        make_backend(make_model(), "auto")


def test_a_kernel_that_fails_while_steps_are_captured_in_advance(
    make_model: Any, tokenizer: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the graph backend was chosen: larger steps have kernels of their own."""
    real = choose.make_backend

    def chosen(model: Any, name: str, *options: Any) -> Any:
        return graph_backend(model) if name == "auto" else real(model, name, *options)

    def fail(*args: Any) -> None:
        raise CompilerError("the Triton kernel 'attend_far' does not compile: too many registers")

    monkeypatch.setattr("lookahead.generate.make_backend", chosen)
    monkeypatch.setattr(GraphBackend, "prepare", fail)
    lines: list[str] = []
    pair = make_model(), tokenizer
    lm = lookahead.load(pair, config=settings, log=lines.append)
    assert type(lm.backend) is EagerBackend
    assert lines[0] == (
        "note: the Triton kernel 'attend_far' does not compile: too many registers; the eager backend runs it"
    )
    assert lm.generate("the fox", max_tokens=4).token_ids
    with pytest.raises(CompilerError, match="attend_far"):
        lookahead.load(pair, config=settings, backend="graph")
