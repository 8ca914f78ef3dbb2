"""Which of a test's many parameter combinations `make test` runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, groupby
from typing import Any

import pytest


def cover(rows: Sequence[Sequence[Any]], strength: int, most: int | None = None) -> list[int]:
    """Numbers of rows in which every value occurs (strength 1), or every pair of values of two columns (strength 2).

    Greedy: always the row that adds most. Of several the one whose values were chosen least, so that they alternate.
    With `most`, no more rows than that; then, of several, the one that is farthest from those chosen.
    """
    has = [set(combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing, chosen, times = set[Any]().union(*has), list[int](), Counter[Any]()

    def worth(number: int) -> tuple[int, int, int]:
        distance = min((abs(number - other) for other in chosen), default=0) if most else 0
        return len(has[number] & missing), -sum(times[value] for value in enumerate(rows[number])), distance

    while missing and len(chosen) < (most or len(rows)):
        best = max(range(len(rows)), key=worth)
        missing -= has[best]
        times.update(enumerate(rows[best]))
        chosen.append(best)
    return sorted(chosen)


def values(item: Any) -> list[tuple[int, ...]]:
    """A combination's value of each `parametrize`, and of each fixture with parameters; equal values are one object."""
    params = dict(item.callspec.params)
    groups = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [group.replace(" ", "").split(",") if isinstance(group, str) else list(group) for group in groups]
    found = [tuple(id(params.pop(name)) for name in group) for group in names]
    return [*found, *((id(value),) for _, value in sorted(params.items()))]


def mark_the_rest_slow(items: Sequence[pytest.Item]) -> None:
    """Of each test that is marked `thinned(strength)`: all combinations but a covering few, at most `most`."""
    thinned = [item for item in items if item.get_closest_marker("thinned") and hasattr(item, "callspec")]

    def group(item: Any) -> tuple[str, str]:
        """A test on one device."""
        return item.nodeid.split("[")[0], str(item.callspec.params.get("device"))

    for _, members in groupby(sorted(thinned, key=group), key=group):
        own: list[Any] = [item for item in members if not any(map(item.get_closest_marker, ("slow", "skip")))]
        if not own:
            continue
        mark: Any = own[0].get_closest_marker("thinned")
        kept = set(cover([values(item) for item in own], *mark.args, **mark.kwargs))
        for number, item in enumerate(own):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
