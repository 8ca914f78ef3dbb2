"""The cache folder for what is downloaded, converted, measured or compiled once per machine.

Every kind of file that is read back carries the version of its format (`write_json`, `read_json`, `check_version`). A
file of another version, or of none, is never read: its owner measures, tunes or learns again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[Any]]


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


def write_json(path: Path, content: Mapping[str, Any], version: int) -> None:
    """Write a JSON file atomically, even if several processes write it at once.

    `version` is that of the content's format. Raise it whenever the same fields mean something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as temporary:
        unfinished = Path(temporary) / path.name
        unfinished.write_text(json.dumps({"version": version, **content}), encoding="utf-8")
        os.replace(unfinished, path)


def read_json(path: Path, version: int) -> dict[str, Any]:
    """What `write_json` wrote with this version.

    Raises OSError if the file cannot be read, and ValueError if it holds no JSON object or has another version.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    check_version(content.get("version"), version)
    return content


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an `.npz` file atomically. Only the user can read a folder that is made for it."""
    import numpy as np  # here, because `lookahead --help` must be fast

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as part:
        try:
            np.savez_compressed(part, **arrays)  # type: ignore[arg-type]
            part.flush()
            os.fsync(part.fileno())
            os.replace(part.name, path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an `.npz` file, after verifying all checksums. NumPy and zipfile each raise their own errors on
    damage."""
    import numpy as np

    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged!r} is wrong")
    with np.load(path, allow_pickle=False) as found:
        return dict(found)


def check_version(found: object, expected: int) -> None:
    """Raise ValueError unless a file's version is the expected one."""
    if found != expected or isinstance(found, bool):
        raise ValueError(f"its format has version {found}, and this is version {expected}")
