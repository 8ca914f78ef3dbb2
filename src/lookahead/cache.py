"""The cache folder: it keeps what is downloaded, converted, measured or compiled once per machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


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
