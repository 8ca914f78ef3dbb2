"""Launch the ranks of one machine, and make sure that none outlives the others.

Every rank runs the same command, with torchrun's environment variables set. Only rank 0 writes to the terminal. The
stderr of the others is captured, and shown only if rank 0 did not report the failure. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

END_SECONDS = 6.0
"""Seconds for the other ranks to exit by themselves after one has failed."""
FAILED, INTERRUPTED = 1, 130
"""Exit codes."""


@dataclass
class Child:
    """A rank's process. `stderr` captures its errors; None for rank 0, which writes to the terminal."""

    rank: int
    process: subprocess.Popen[bytes]
    stderr: IO[bytes] | None


LOOKAHEAD = (sys.executable, "-m", "lookahead")
"""The command of a rank, without its arguments."""


def launch(
    command: Sequence[str],
    ranks: int,
    stdin: str | None,
    say: Callable[[str], None],
    forwarded: Sequence[signal.Signals] = (),
) -> int:
    """Run a command on `ranks` ranks, with the text `stdin` for rank 0. `say` prints a line. Returns the exit code.

    The `forwarded` signals are sent to rank 0, which decides when to exit.
    """
    port = free_port()
    children: list[Child] = []

    def forward(number: int, frame: Any) -> None:
        if children:
            children[0].process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in forwarded}
    try:
        for rank in range(ranks):
            children.append(_start(command, rank, ranks, port, stdin is not None))
        if stdin is not None:
            _feed(children[0], stdin)
        return _supervise(children, say)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    finally:
        _end(children)
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _start(command: Sequence[str], rank: int, ranks: int, port: int, fed: bool) -> Child:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), **rank_variables()}
    stderr = None if rank == 0 else tempfile.TemporaryFile()  # noqa: SIM115, it is read when the rank has ended
    process = subprocess.Popen(
        list(command),
        env={**defaults, **os.environ, **variables},
        stdin=subprocess.PIPE if fed and rank == 0 else subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # so that Ctrl-C reaches the launcher only
        preexec_fn=_bound_to_parent(),
    )
    return Child(rank, process, stderr)


def rank_variables() -> dict[str, str]:
    """Default environment variables for ranks of one machine."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # we report a lost rank ourselves, once
    return {**quiet, "GLOO_SOCKET_IFNAME": loopback} if loopback else quiet


def _bound_to_parent() -> Callable[[], None] | None:
    """A pre-exec function that makes Linux kill the rank when the launcher dies, even by SIGKILL."""
    if sys.platform != "linux":
        return None
    prctl: Any = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1
    return lambda: prctl(set_parent_death_signal, signal.SIGKILL)


def _feed(child: Child, text: str) -> None:
    assert child.process.stdin is not None
    try:
        child.process.stdin.write(text.encode())
        child.process.stdin.close()
    except BrokenPipeError:  # the rank ended before it read; `_supervise` reports why
        pass


def _supervise(children: Sequence[Child], say: Callable[[str], None]) -> int:
    """Wait for all ranks to end; once one has failed, at most `END_SECONDS`. Returns the exit code."""
    first: Child | None = None
    end = 0.0
    while any(child.process.poll() is None for child in children):
        failed = next((child for child in children if child.process.poll()), None)
        if failed is not None and first is None:
            first, end = failed, time.monotonic() + END_SECONDS
        if first is not None and (time.monotonic() > end or children[0].process.poll()):
            break
        time.sleep(0.05)
    first = first or next((child for child in children if child.process.poll()), None)
    if first is None:
        return 0
    code = children[0].process.poll()
    if code is not None and code > 0:  # rank 0 has printed the reason
        return code
    say(f"error: {_describe_end(first)}")
    return FAILED


def _describe_end(child: Child) -> str:
    """One line: how a rank ended, with the last line of its stderr."""
    code = child.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    reason = ""
    if child.stderr is not None:
        child.stderr.seek(0)
        lines = child.stderr.read().decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1].removeprefix('error: ')}" if lines and code >= 0 else ""
    return f"rank {child.rank} {how}{reason}; the other ranks were ended"


def _end(children: Sequence[Child]) -> None:
    """Terminate the processes that still run, and kill those that do not exit within two seconds."""
    running = [child.process for child in children if child.process.poll() is None]
    for process in running:
        process.terminate()
    end = time.monotonic() + 2.0
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in children:
        if child.stderr is not None:
            child.stderr.close()
