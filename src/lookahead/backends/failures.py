"""One-line errors for failures of a device or a compiler.

Three kinds, because each is handled differently:

- *Out of memory* (`DeviceMemoryError`): the request that needed the memory fails, and the others continue.
- *A kernel that does not compile* (`CompilerError`): another backend runs the model.
- *A lost device* (`DeviceError`): after an illegal address, an uncorrectable memory error or a GPU that fell off the
  bus, CUDA answers every further call of the process with the same error. Only a new process can use the device again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lookahead.models.facts import UnsupportedModelError

DEVICE_TEXTS = ("CUDA error", "CUDA driver error", "[CUDA]", "HIP error", "cublasLt", "CUBLAS_STATUS")
"""Substrings of device errors, as raised by torch, Triton and our own calls."""

LONGEST = 240
"""Maximum length of a quoted message, in characters."""


class DeviceError(RuntimeError):
    """The device is lost: no call of this process can use it any more. All later calls raise this error, too."""


class DeviceMemoryError(torch.OutOfMemoryError):
    """The device has too little memory for a step, which has not started. `slot` is that of the sequence that needs it;
    None if the step as such needs it."""

    slot: int | None = None


class CompilerError(UnsupportedModelError):
    """A kernel does not compile, or its compiler is missing; the message names it."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: list[BaseException] = []
    while error not in seen:
        seen.append(error)
        yield error
        following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if following is None:
            return
        error = following


def brief(error: BaseException) -> str:
    """The first line of an error's own message."""
    text = getattr(error, "error_message", None) or str(error).strip()
    return (str(text).strip().splitlines() or [type(error).__name__])[0].strip()[:LONGEST]


# Memory.


def out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory, according to torch's allocator, CUDA or cuBLAS.

    A capture that ran out of memory may raise another error at its end, with this one as its context.
    """
    return any(isinstance(one, torch.OutOfMemoryError) or _says_out_of_memory(one) for one in chain(error))


def _says_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text.lower() or "STATUS_ALLOC_FAILED" in text)


def memory_error(error: BaseException, what: str, device: torch.device, slot: int | None = None) -> DeviceMemoryError:
    """The one-line error for `what`, which does not fit into device memory."""
    tried = [found[1] for one in chain(error) if (found := re.search(r"Tried to allocate ([\d.]+ \wi?B)", str(one)))]
    needs = f"{what} needs {tried[0]} of memory" if tried else f"{what} needs more memory"
    made = DeviceMemoryError(f"{needs}{free_memory(device)}; {ADVICE}")
    made.slot = slot
    return made


ADVICE = "run fewer sequences at once or shorter prompts, lower GraphBackend's kv_tokens, or end other programs there"


def free_memory(device: torch.device) -> str:
    """The free memory of a GPU, as the end of a clause. Empty where it is not known."""
    if device.type != "cuda":
        return ""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return ""
    return f", and {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free on {device}"


# Compilers.


def compiler_error(error: BaseException) -> CompilerError | None:
    """The one-line error for a kernel that Triton could not compile; None if `error` is something else."""
    if any(isinstance(one, CompilerError) for one in chain(error)) or out_of_memory(error) or _of_device(error):
        return None
    for one in chain(error):
        kernel = _kernel_of(one)
        if kernel or _in_triton(one):
            what = f"the Triton kernel {kernel!r} does not compile" if kernel else "Triton does not work here"
            return CompilerError(f"{what}: {brief(one)}")
    return None


def _in_triton(error: BaseException) -> bool:
    """Whether Triton has raised the error: it is of its own types, or comes from its code."""
    if type(error).__module__.partition(".")[0] == "triton":
        return True
    return any(frame.f_globals.get("__name__", "").partition(".")[0] == "triton" for frame in _frames(error))


def _kernel_of(error: BaseException) -> str | None:
    """The kernel that was being compiled when the error was raised."""
    for frame in _frames(error):
        running = frame.f_locals.get("self")
        if type(running).__name__ == "JITFunction":
            return str(getattr(getattr(running, "fn", None), "__name__", None) or "unknown")
    source = getattr(error, "src", None) if _in_triton(error) else None
    named = re.search(r"def (\w+)", source) if isinstance(source, str) else None
    return named[1] if named else None


def _frames(error: BaseException) -> list[Any]:
    """The frames of an error's traceback, innermost first."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


@contextmanager
def named_kernels() -> Iterator[None]:
    """Turn errors of Triton's compiler into one-line errors that name the kernel."""
    try:
        yield
    except Exception as error:
        clear = compiler_error(error)
        if clear is None:
            raise
        raise clear from error


# A lost device.


def device_error(error: BaseException, device: Any) -> DeviceError | None:
    """The one-line error if the device is lost; None if `error` is something else.

    Some errors of a device concern one call only, such as a capture that was not allowed. So the device is asked: a
    lost one answers with an error again. (In a process without GPUs there is no device to ask.)
    """
    for one in chain(error):
        if isinstance(one, DeviceError):
            return one
    if out_of_memory(error) or not (found := _of_device(error)):
        return None
    if getattr(device, "type", None) == "cuda":
        try:
            torch.cuda.synchronize(device)
            return None
        except (RuntimeError, AssertionError):
            pass
    reason = brief(found)
    return DeviceError(f"the device {device} is lost ({reason}); no call of this process can use it: start it again")


def _of_device(error: BaseException) -> BaseException | None:
    """The error among its causes that a device has raised.

    Only torch's and Triton's errors and plain RuntimeErrors are recognised by their text: others may quote anything,
    such as a client's schema or what another rank has reported.
    """
    for one in chain(error):
        named = type(one) is RuntimeError or type(one).__module__.partition(".")[0] in ("torch", "triton")
        if isinstance(one, torch.AcceleratorError) or (named and any(text in str(one) for text in DEVICE_TEXTS)):
            return one
    return None


# All of them.


@contextmanager
def clear_errors(device: torch.device, what: str | None = None) -> Iterator[None]:
    """Turn failures of a device or a compiler into one-line errors. `what` names the allocation in memory errors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (DeviceError, DeviceMemoryError, CompilerError)):
            raise
        clear: Exception | None = device_error(error, device) or compiler_error(error)
        if clear is None and what is not None and out_of_memory(error):
            clear = memory_error(error, what, device)
        if clear is None:
            raise
        raise clear from error
