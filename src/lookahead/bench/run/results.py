"""Records on disk: JSON lines, appended one by one, so that a run that ends early loses nothing.

Every line is an object with a `kind`. `about` says what the lines after it were measured on; all others are records
and have a `key`, made of everything that decides their value: a record whose key is there is not measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""One measured answer, step cost or margin."""
FIXED = ("model", "dtype", "device", "backend", "torch", "transformers", "code")
"""Facts of `about` that may not change within a file: times of two devices or two versions are not one result. `code`
is a hash of what is timed; the revision may change with what is not."""


def key_of(facts: Mapping[str, Any]) -> str:
    """A short name for these facts; equal facts have equal names."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _differences(known: Record, given: Record) -> Iterator[tuple[str, Any, Any]]:
    """The fixed facts in which these differ: name, known and given value."""
    for name in FIXED if known else ():
        if name in given and known.get(name) != given[name]:
            yield name, known.get(name), given[name]


def compact(record: Record, texts: bool) -> Record:
    """A record with a hash of each turn's tokens instead of the tokens, and without its texts unless they are kept."""
    hidden = {"tokens"} if texts else {"tokens", "texts"}
    kept = {name: value for name, value in record.items() if name not in hidden}
    return {**kept, "hashes": hashes(record["tokens"])} if "tokens" in record else kept


def outputs(record: Record, other: Record) -> list[tuple[Any, Any]]:
    """What two records answered, turn by turn: tokens, or hashes where one of them has no tokens."""
    both = record, other
    if all("tokens" in one for one in both):
        return list(zip(*(one["tokens"] for one in both), strict=True))
    return list(zip(*(one["hashes"] if "hashes" in one else hashes(one["tokens"]) for one in both), strict=True))


def hashes(turns: Sequence[Sequence[int]]) -> list[str]:
    return [key_of({"tokens": list(turn)}) for turn in turns]


def same(record: Record, other: Record) -> bool:
    return all(ours == theirs for ours, theirs in outputs(record, other))


class Results:
    """One file of records. `records` are those read and those added, by key; a later one replaces an earlier one.

    `runs` are the facts of every run that added records, and `run_of` says by key which of them added it.
    """

    def __init__(self, path: Path, *, mend: bool = True) -> None:
        self.path, self._mend = path, mend
        self.records: dict[str, Record] = {}
        self.runs: list[Record] = []
        self.run_of: dict[str, int] = {}
        self.about: Record | None = None
        self.dropped = False
        self._read()

    def begin(self, about: Record) -> None:
        """Refuse a file of another device, model or version; the next records are measured on these facts."""
        self.check(about)
        self.about = about

    def merge(self, paths: Sequence[Path]) -> list[str]:
        """Take over what other files have and this one lacks. All are refused if one does not belong here.

        Returns the keys of answers that were measured twice and are not the same text.
        """
        others = [Results(path, mend=False) for path in paths]
        first = next((one for one in (self, *others) if one.about is not None), self)
        for other in others:
            if other.about is None:
                raise ValueError(f"{other.path} has no results to merge")
            for name, ours, theirs in _differences(first.about or {}, other.about):
                raise ValueError(
                    f"{other.path} does not belong to {first.path}: its {name} is {theirs!r}, and there it is {ours!r}"
                )
        differ = []
        for other in others:
            for key, record in other.records.items():
                own = self.records.get(key)
                if own is None or "error" in own:
                    self.about = other.runs[other.run_of[key]]
                    self.add(record)
                elif {"tokens", "hashes"} & set(record) and not same(own, record):
                    differ.append(key)
        return differ

    def check(self, facts: Record) -> None:
        """Refuse facts that differ from those of the file; facts that are not given are not compared."""
        for name, known, given in _differences(self.about or {}, facts):
            raise ValueError(
                f"{self.path} holds results with {name} {known!r}, and this is {given!r}: give another --out, or "
                "remove the file"
            )

    def add(self, record: Record) -> None:
        """The record is on disk when this returns, after the facts that it was measured on."""
        if self.about is not None and (not self.runs or self.runs[-1] != self.about):
            self._write({"kind": "about", **self.about})
            self.runs.append(self.about)
        self._write(record)
        self._keep(record)

    def _keep(self, record: Record) -> None:
        self.records[record["key"]] = record
        if self.runs:
            self.run_of[record["key"]] = len(self.runs) - 1

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
        if torn and self._mend:
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
                self.runs.append(self.about)
            else:
                self._keep(record)
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
