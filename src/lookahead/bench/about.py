"""What a result was measured on: versions, hardware, and the revision of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = {"lookahead": "lookahead-decoding", "torch": "torch", "transformers": "transformers", "triton": "triton"}


def about(model: Any) -> dict[str, Any]:
    """The facts of a loaded model and this machine, as `results.begin` wants them."""
    from lookahead.loading.step_cost import processor

    device = model.device
    cuda = device.type == "cuda"
    if cuda:
        import torch

        name = torch.cuda.get_device_name(device)
    else:
        name = processor()
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": f"{device.type}: {name}",
        "backend": type(getattr(model.backend, "inner", model.backend)).__name__,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": _threads(),
        "python": platform.python_version(),
        "platform": platform.system(),
        **versions(),
    }


def versions() -> dict[str, Any]:
    """What is known without a model."""
    return {**{short: version(package) for short, package in PACKAGES.items()}, "revision": revision()}


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def revision() -> str | None:
    """The last commit to the code that runs, with a mark where it was changed since; None outside of a checkout."""
    folder = Path(__file__).parents[1]

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


def _threads() -> int:
    import torch

    return torch.get_num_threads()
