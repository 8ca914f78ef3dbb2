"""What was measured, on disk: JSON lines, appended one by one, so that a run that ends early loses nothing.

Every line is an object with a `kind`. `about` says what the lines after it were measured on; all others have a `key`,
made of everything that decides their value: a line whose key is there already need not be measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FIXED = ("model", "dtype", "device", "backend", "lookahead", "torch", "transformers", "revision")
"""Facts of `about` that may not change within a file: times of two machines or two versions are not one result."""


def key_of(facts: Mapping[str, Any]) -> str:
    """A short name for these facts; equal facts have equal names."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Results:
    """One file of results. `rows` are those read and those added, by key; a later one takes an earlier one's place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self.about: Row | None = None
        self.dropped = False
        self._read()

    def begin(self, about: Row) -> None:
        """Refuse a file of another machine, model or version; say in it what comes now."""
        self.check(about)
        if self.about != about:
            self.about = about
            self._write({"kind": "about", **about})

    def check(self, facts: Row) -> None:
        """Refuse facts that are not those of the file, as far as they are given."""
        for name in FIXED if self.about is not None else ():
            if name in facts and self.about is not None and self.about.get(name) != facts[name]:
                raise ValueError(
                    f"{self.path} holds results with {name} {self.about.get(name)!r}, and this is "
                    f"{facts[name]!r}: give another --out, or remove the file"
                )

    def add(self, row: Row) -> None:
        """On disk when this returns."""
        self._write(row)
        self.rows[row["key"]] = row

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def get(self, keys: Iterable[str]) -> list[Row]:
        return [self.rows[key] for key in keys if key in self.rows]

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValueError(f"cannot read {self.path}: {error.strerror}; give another --out") from error
        whole, _, torn = data.rpartition(b"\n")
        if torn:  # the end of a line that was never finished: the machine went down in the middle of it
            self.dropped = True
            with self._named(), self.path.open("r+b") as file:
                file.truncate(len(data) - len(torn))
        for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
            if line.strip():
                self._take(line, number)

    def _take(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
            if row["kind"] == "about":
                self.about = {name: value for name, value in row.items() if name != "kind"}
            else:
                self.rows[row["key"]] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}, line {number} is no result ({type(error).__name__}: {error}): remove that line to "
                "measure it again, or give another --out"
            ) from error

    def _write(self, row: Row) -> None:
        """The whole line or nothing: a full disk must not leave half of one."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with self._named():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    view = memoryview(line)
                    while view:
                        view = view[file.write(view) or 0 :]
                    os.fsync(file.fileno())
                except BaseException:
                    file.truncate(size)
                    raise

    def _named(self) -> _DiskErrors:
        return _DiskErrors(self.path)


class _DiskErrors:
    """Errors of the disk, in one line that says that nothing is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, OSError):
            raise ValueError(
                f"cannot write {self.path}: {error.strerror or error}; what was measured before is kept: make room, "
                "or give another --out, and run the same command again"
            ) from error
