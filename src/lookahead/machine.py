"""What the machine and its software are, found without torch: reports name them, and caches depend on them."""

from __future__ import annotations

import math
import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = {
    "lookahead": "lookahead-decoding",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "onnxruntime": "onnxruntime",
}
"""The packages on which speed and texts depend: short names, and those of their distributions."""


def processor() -> str:
    """The CPU's name, or the machine's type if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use; in a container these are fewer than the machine has."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return count


def available_memory() -> int | None:
    """Bytes of memory that this process may still take: of the machine, or of its container. None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        most, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        return found if most == "max" else max(0, min(found, int(most) - int(used)))
    except (OSError, ValueError):
        return found


def package_version(name: str) -> str | None:
    """The installed version of a distribution, found without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
