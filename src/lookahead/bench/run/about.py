"""What a record was measured on: versions, hardware, and the revision of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from lookahead.machine import PACKAGES, package_version, processor


def about(model: Any) -> dict[str, Any]:
    """The facts of a loaded model and this machine, as `Results.begin` wants them."""
    return {
        "model": model.name,
        "dtype": model.weights,
        "device": f"{model.device.type}: {device_name(model.device)}",
        "backend": model.backend.capabilities.name,
        **machine(),
        **versions(),
    }


def machine() -> dict[str, Any]:
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.system(),
    }


def versions() -> dict[str, Any]:
    return {**{short: package_version(package) for short, package in PACKAGES.items()}, "revision": revision()}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def revision() -> str | None:
    """The last commit to the code that runs, marked if the code was changed since; None outside of a checkout."""
    folder = Path(__file__).parents[2]

    def git(*args: str) -> str:
        command = ["git", "-C", str(folder), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if git("ls-files", "__init__.py") == "":  # some other project's checkout that we are installed in
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("log", "-1", "--format=%h", "--abbrev=12", "--", ".") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
