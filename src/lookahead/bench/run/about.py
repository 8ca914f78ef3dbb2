"""What a record was measured on: versions, hardware, when, and the revision of the code."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lookahead.machine import PACKAGES, package_version, processor

PACKAGE = Path(__file__).parents[2]
NOT_TIMED = ("cli", "serve", "transformers_hook", "bench")
TIMED_OF_BENCH = ("bench/run/runner.py", "bench/run/stock.py", "bench/workloads/measure.py")
"""Of the package all files but these folders decide an answer or its time; of `bench` these do."""


def about(model: Any) -> dict[str, Any]:
    """The facts of a loaded model and this machine, as `Results.begin` wants them."""
    return {
        "model": plain_name(model.name),
        "dtype": model.weights,
        "device": f"{model.device.type}: {device_name(model.device)}",
        "backend": model.backend.capabilities.name,
        **machine(),
        **versions(),
        "begun": datetime.now(timezone.utc).isoformat(timespec="minutes"),
    }


def plain_name(name: str) -> str:
    """The name of a file or folder without its path, which another machine has elsewhere; a hub's name as it is."""
    is_path = name.startswith(("/", "./", "../", "~")) or Path(name.partition(" in ")[0]).exists()
    return name.rstrip("/").rpartition("/")[2] if is_path else name


def machine() -> dict[str, Any]:
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.system(),
    }


def versions() -> dict[str, Any]:
    found = {short: package_version(package) for short, package in PACKAGES.items()}
    return {**found, "revision": revision(), "code": code()}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def code() -> str:
    """A hash of the files that decide an answer or its time, on any machine, with or without git."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix in (".py", ".c", ".h") and (name.split("/")[0] not in NOT_TIMED or name in TIMED_OF_BENCH):
            found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def revision() -> str | None:
    """The last commit to the code that runs, marked if the code was changed since; None outside of a checkout."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(PACKAGE), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if git("ls-files", "__init__.py") == "":  # some other project's checkout that we are installed in
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("log", "-1", "--format=%h", "--abbrev=12", "--", ".") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
