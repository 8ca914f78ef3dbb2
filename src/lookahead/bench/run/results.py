"""Records on disk: JSON lines, appended one by one, so that a run that ends early loses nothing.

Every line is an object with a `kind`. `about` says what the lines after it were measured on; all others are records
and have a `key`, made of everything that decides their value: a record whose key is there is not measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""One measured answer, step cost or margin."""
FIXED = ("model", "dtype", "device", "backend", "lookahead", "torch", "transformers", "revision")
"""Facts of `about` that may not change within a file: times of two machines or two versions are not one result."""


def key_of(facts: Mapping[str, Any]) -> str:
    """A short name for these facts; equal facts have equal names."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Results:
    """One file of records. `records` are those read and those added, by key; a later one replaces an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self.about: Record | None = None
        self.dropped = False
        self._read()

    def begin(self, about: Record) -> None:
        """Refuse a file of another machine, model or version; note in it what the next records are measured on."""
        self.check(about)
        if self.about != about:
            self.about = about
            self._write({"kind": "about", **about})

    def check(self, facts: Record) -> None:
        """Refuse facts that differ from those of the file; facts that are not given are not compared."""
        known = self.about or {}
        for name in FIXED if known else ():
            if name in facts and known.get(name) != facts[name]:
                raise ValueError(
                    f"{self.path} holds results with {name} {known.get(name)!r}, and this is {facts[name]!r}: "
                    "give another --out, or remove the file"
                )

    def add(self, record: Record) -> None:
        """The record is on disk when this returns."""
        self._write(record)
        self.records[record["key"]] = record

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValueError(f"cannot read {self.path}: {error.strerror}; give another --out") from error
        whole, _, torn = data.rpartition(b"\n")
        if torn:  # the machine went down in the middle of this line
            self.dropped = True
            with self._writing(), self.path.open("r+b") as file:
                file.truncate(len(data) - len(torn))
        for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
            if line.strip():
                self._take(line, number)

    def _take(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line)
            if record["kind"] == "about":
                self.about = {name: value for name, value in record.items() if name != "kind"}
            else:
                self.records[record["key"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}, line {number} is no result ({type(error).__name__}: {error}): remove that line to "
                "measure it again, or give another --out"
            ) from error

    def _write(self, record: Record) -> None:
        """Write the whole line or nothing: a full disk must not leave half of one."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with self._writing():
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

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn errors of the disk into one line that says that nothing is lost."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot write {self.path}: {error.strerror or error}; what was measured before is kept: make room, "
                "or give another --out, and run the same command again"
            ) from error
