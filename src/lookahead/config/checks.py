"""Checks that all settings share. An error names the value and says what to change."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def at_least(name: str, value: int, least: int) -> int:
    """The value, which must be a whole number of at least this."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return value


def reject_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword argument, and suggest the known one with the most similar name."""
    for name in unknown:
        near = get_close_matches(name, list(known), n=1, cutoff=0.5)
        raise TypeError(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
