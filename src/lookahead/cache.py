"""The cache folder: it keeps what is downloaded, converted, measured or compiled once per machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def cache_dir(env: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """The folder that `LOOKAHEAD_CACHE` names, or `lookahead` in the user's cache folder."""
    if chosen := env.get("LOOKAHEAD_CACHE"):
        return Path(chosen).expanduser().absolute()
    if platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif platform == "win32":
        base = Path(env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lookahead"


def key_of(facts: Mapping[str, Any]) -> str:
    """The file name, without suffix, of what was found with these facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader finds all of it or none, even if several processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as parts:
        part = Path(parts) / path.name
        part.write_text(json.dumps(content))
        os.replace(part, path)
