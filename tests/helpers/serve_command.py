"""`lookahead serve` in this process: what the command does, without the seconds in which a new one imports torch."""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lookahead
from lookahead.cli import main
from lookahead.serve import life


class ProcessEnd(BaseException):
    """In place of `os._exit`."""


def run_serve_command(
    model: Any, cache: Path, client: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, *options: str
) -> int | str | None:
    """Serve this model until the command ends, with `client(url)` in a thread. Returns the exit code.

    The server handles real signals, as it runs in the main thread.
    """
    addresses, ready_line, failures = queue.Queue[str](), life.ready_line, list[BaseException]()

    def noted(address: str, service: Any) -> str:
        addresses.put(address)
        return ready_line(address, service)

    def end(code: int) -> None:
        raise ProcessEnd(code)

    def ask() -> None:
        url = addresses.get()
        try:
            client(url)
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)  # the command ends, and the test fails

    monkeypatch.setenv("LOOKAHEAD_CACHE", str(cache))
    monkeypatch.setattr(lookahead, "load", lambda *args, **options: model)
    monkeypatch.setattr(life, "ready_line", noted)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)
    thread, code = threading.Thread(target=ask, daemon=True), None
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for a signal that comes before or after the server's time
    thread.start()
    try:
        main(["serve", "--port", "0", *options])
    except SystemExit as ended:
        code = ended.code
    except ProcessEnd as ended:
        code = ended.args[0]
    finally:
        signal.signal(signal.SIGTERM, handler)
    thread.join(20)
    if failures:
        raise failures[0]
    assert not thread.is_alive()
    return code
