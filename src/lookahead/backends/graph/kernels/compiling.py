"""Compiles the kernels of many launches in several threads, and launches none of them.

Triton compiles a kernel when it is first launched, for up to seconds, while the host waits: the 54 kernels of a 7B
Llama one after the other. Most of that is spent in MLIR, LLVM and ptxas, outside of Python's global lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from importlib import import_module
from pkgutil import walk_packages
from threading import Lock, get_ident
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from lookahead.backends.graph import kernels as package

_one_at_a_time = Lock()


def compile_launched(work: Callable[[], object], threads: int) -> None:
    """Run `work`, where launches of this package's kernels by this thread only compile them. Returns when all are
    compiled. A kernel that does not compile raises its error when it is launched later.

    Nothing may be read from what the kernels should have written.
    """

    def compile_all() -> None:
        with (
            ThreadPoolExecutor(threads, "compile") as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
            _without_launches(),
        ):
            work()

    with _one_at_a_time:
        copy_context().run(compile_all)  # the mode is of this context alone, even if it fails to end


def package_kernels() -> list[Any]:
    """All Triton functions of this package and its subpackages."""
    modules = [import_module(found.name) for found in walk_packages(package.__path__, f"{package.__name__}.")]
    found = {id(value): value for module in modules for value in vars(module).values() if type(value) is JITFunction}
    return list(found.values())


@contextmanager
def _without_launches() -> Iterator[None]:
    """Launches by this thread only compile. Those of other threads are not changed."""
    here, kernels = get_ident(), package_kernels()

    def compiling(run: Callable[..., Any]) -> Callable[..., Any]:
        def compile_here(*args: Any, warmup: bool, **options: Any) -> Any:
            if get_ident() != here:
                return run(*args, warmup=warmup, **options)
            made = run(*args, warmup=True, **options)
            future = getattr(made, "future", None)
            if future is not None and future.done():
                made.result(ignore_errors=True)  # Triton then finds it sooner, which matters if all are in its cache
            return made

        return compile_here

    try:
        for kernel in kernels:
            kernel.run = compiling(kernel.run)
        yield
    finally:
        for kernel in kernels:
            vars(kernel).pop("run", None)  # the class's own is found again
