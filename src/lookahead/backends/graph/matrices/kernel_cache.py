"""The fastest kernels found on this machine, cached on disk so that they need not be searched for again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lookahead.cache import cache_dir, key_of, read_json, write_json

VERSION = 1
"""Version of the file format. Raise it also when the stored values change their meaning."""


class KernelCache:
    """A number or string for each problem name. The `facts` are what all of them depend on.

    A file that is missing, damaged, of another version or not writable is no error: the search runs again. Without
    facts nothing is written to disk.
    """

    def __init__(self, facts: Mapping[str, str] | None) -> None:
        self._facts = facts
        self._path = None if facts is None else cache_dir() / "products" / f"{key_of(facts)}.json"
        self._values: dict[str, Any] = self._read()

    def get(self, name: str) -> int | str | None:
        """The value stored by this process or an earlier one."""
        return self._values.get(name)

    def store(self, name: str, value: int | str) -> None:
        """Store a value, without losing what other processes have written in the meantime."""
        self._values = {**self._read(), **self._values, name: value}
        if self._path is not None:
            with suppress(OSError):
                write_json(self._path, {"of": dict(self._facts or {}), "found": self._values}, VERSION)

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            values = read_json(self._path, VERSION)["found"]
            return {name: value for name, value in values.items() if isinstance(value, (int, str))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
