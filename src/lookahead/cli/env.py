"""`lookahead env`: the installed versions and the machine's devices."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import typer

from lookahead.cache import cache_dir
from lookahead.cli.common import Host
from lookahead.loading.embedded import EMBEDDED, MANIFEST
from lookahead.machine import PACKAGES, cores, package_version, processor


def env(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Print versions, devices and the cache folder, for bug reports."""
    host = ctx.ensure_object(Host)
    found = collect()
    host.write(json.dumps(found, indent=2) + "\n" if as_json else lines(found))


def collect() -> dict[str, Any]:
    """The object that `--json` prints."""
    folder = cache_dir() / EMBEDDED
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(package) for name, package in PACKAGES.items()},
        },
        "platform": platform.platform(),
        "cores": cores(),
        "devices": devices(),
        "cache": str(cache_dir()),
        "embedded_model": {"name": EMBEDDED, "present": (folder / MANIFEST).is_file()},
    }


def lines(found: dict[str, Any]) -> str:
    """The collected facts as text."""
    model = found["embedded_model"]
    rows = [
        *((name, version or "not installed") for name, version in found["versions"].items()),
        ("platform", found["platform"]),
        ("cores", str(found["cores"])),
        *((device["name"], device["description"]) for device in found["devices"]),
        ("cache", found["cache"]),
        (
            "model",
            f"{model['name']}, {'present' if model['present'] else 'absent: `lookahead pull` fetches it'}",
        ),
    ]
    return "".join(f"{name:<14}{value}\n" for name, value in rows)


def devices() -> list[dict[str, str]]:
    """The CPU and every GPU that torch can use."""
    cpu = {"name": "cpu", "description": processor()}
    try:
        import torch
    except (ImportError, OSError) as error:  # this verb is run to find broken installs
        return [cpu, {"name": "cuda", "description": f"unknown: torch cannot be imported: {error}"}]
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        described = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor}"
        gpus.append({"name": f"cuda:{index}", "description": described})
    return [cpu, *gpus]
