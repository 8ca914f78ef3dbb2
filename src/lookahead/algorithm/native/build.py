"""Compile and load the library in C: the drafter, and the writer of packets.

It is compiled at first use with the machine's C compiler (Triton needs one for its launchers, so machines that run our
kernels have one) and stored in the cache. Without a compiler, or with `LOOKAHEAD_NATIVE=0`, the Python drafter runs
instead; also, with a warning, if the compiler fails or if the library's structs differ from those that Python packs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lookahead.algorithm.native.layout import check_layout
from lookahead.cache import cache_dir

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h")))
FLAGS = ("-std=gnu99", "-O2", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
"""Without fused multiply-adds, so that doubles are rounded as in Python."""

logger = logging.getLogger(__name__)

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "table_new": (_POINTER, []),
    "table_free": (None, [_POINTER]),
    "table_length": (_LONG, [_POINTER]),
    "table_clear": (None, [_POINTER]),
    "table_put": (_INT, [_POINTER, _POINTER, _POINTER, _INT]),
    "table_put_tokens": (_INT, [_POINTER, _POINTER, _INT, _INT]),
    "table_get": (_INT, [_POINTER, _POINTER, _POINTER]),
    "table_next": (_LONG, [_POINTER, _LONG, _POINTER]),
    "table_evict": (None, [_POINTER, _LONG]),
    "table_store_step": (_INT, [_POINTER, _POINTER, _POINTER, _POINTER]),
    "text_new": (_POINTER, [_POINTER]),
    "text_free": (None, [_POINTER]),
    "text_extend": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _INT]),
    "draft_search": (_INT, [_POINTER, _POINTER]),
    "draft_trees": (_INT, [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER]),
    "draft_accept": (None, [_POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER]),
    "packet_write_rows": (_INT, [_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER]),
    "workers_new": (_POINTER, [_INT]),
    "workers_wake": (None, [_POINTER]),
}


class NoCompilerError(RuntimeError):
    """The machine has no C compiler. This is not an error: the Python drafter runs."""


@lru_cache(maxsize=1)
def library() -> Any:
    """The compiled functions, or None if the Python drafter must be used.

    They run with the GIL held (`PyDLL`): a call takes microseconds, and threads may share a table. An interpreter
    without a GIL gets the Python drafter.
    """
    if os.environ.get("LOOKAHEAD_NATIVE") == "0":
        return None
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        logger.info("using the Python drafter instead of the C one: this Python has no GIL")
        return None
    try:
        return load(cache_dir() / "native")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        level = logging.INFO if isinstance(error, NoCompilerError) else logging.WARNING
        logger.log(level, "using the Python drafter instead of the C one: %s", error)
        return None


def load(folder: Path) -> Any:
    """Load the library in this folder. Compile it first if it is missing or does not load."""
    path = folder / f"{fingerprint()}{'.dll' if sys.platform == 'win32' else '.so'}"
    if not path.exists() or not ours(path):
        build(path)
    try:
        return bind(path)
    except OSError:
        build(path)
        return bind(path)


def bind(path: Path) -> Any:
    """Open a compiled library. Raises RuntimeError if its structs differ from those that Python packs."""
    loaded = ctypes.PyDLL(str(path))
    check_layout(loaded)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def check_result(result: int) -> int:
    """Return C's result, or raise the exception of a negative one."""
    if result == -2:
        raise IndexError("a node, a parent or an origin that does not exist")
    if result < 0:
        raise MemoryError
    return result


def fingerprint() -> str:
    """The library's file name: it depends on the sources, the flags, the interpreter and the user."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    parts = (FLAGS, sys.implementation.cache_tag, sysconfig.get_platform(), user)
    text = b"".join(path.read_bytes() for path in SOURCES)
    return hashlib.sha256(text + repr(parts).encode()).hexdigest()[:24]


def ours(path: Path) -> bool:
    """Whether only this user can have written the file. Loading a library runs its code."""
    if not hasattr(os, "getuid"):
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def build(path: Path) -> None:
    """Compile in a temporary folder and rename the result, so that no process loads an incomplete file."""
    compiler = shlex.split(os.environ.get("CC", "")) or [c for c in ("cc", "gcc", "clang") if shutil.which(c)][:1]
    if not compiler:
        raise NoCompilerError("no C compiler was found (cc, gcc, clang or $CC)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        files = [str(path) for path in SOURCES if path.suffix == ".c"]
        command = [*compiler, *FLAGS, "-o", str(made), *files]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
        if ran.returncode or not made.exists():
            lines = ran.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ran.returncode}"]
            message = next((line for line in lines if "error" in line), lines[0])
            raise RuntimeError(f"{compiler[0]} did not compile the drafter: {message}")
        made.chmod(0o755)
        os.replace(made, path)
