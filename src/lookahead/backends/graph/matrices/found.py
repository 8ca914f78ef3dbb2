"""What a search on this machine has found, kept in the cache folder so that it need not be searched for again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lookahead.cache import cache_dir, key_of, read_json, write_json

VERSION = 1
"""Of the file's format. Raise it also when the numbers of a kernel come to mean something else."""


class Found:
    """Names and what was found for each: a number or a string. The `facts` say what all of them depend on.

    A file that is missing, damaged, of another version or not writable is no error: the search runs again. Without
    facts nothing is kept.
    """

    def __init__(self, facts: Mapping[str, str] | None) -> None:
        self._facts = facts
        self._path = None if facts is None else cache_dir() / "products" / f"{key_of(facts)}.json"
        self._found: dict[str, Any] = self._read()

    def get(self, name: str) -> int | str | None:
        """What was found under this name, by this process or an earlier one."""
        return self._found.get(name)

    def put(self, name: str, value: int | str) -> None:
        """Keep what was found. What other processes have written in the meantime stays."""
        self._found = {**self._read(), **self._found, name: value}
        if self._path is not None:
            with suppress(OSError):
                write_json(self._path, {"of": dict(self._facts or {}), "found": self._found}, VERSION)

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            found = read_json(self._path, VERSION)["found"]
            return {name: value for name, value in found.items() if isinstance(value, (int, str))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
