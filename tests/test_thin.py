"""The combinations of parameters that `make test` keeps."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from order import LONGEST, TESTS, longest_first
from thin import cover


@pytest.mark.parametrize(
    ("sizes", "strength", "most"),
    [
        ((5,), 1, 5),
        ((5,), 2, 5),
        ((2, 3), 1, 3),
        ((2, 3), 2, 6),
        ((3, 2, 7), 1, 7),
        ((3, 2, 7), 2, 24),
        ((4, 3, 2, 2), 2, 14),
    ],
)
def test_every_value_or_pair_is_kept(sizes: tuple[int, ...], strength: int, most: int) -> None:
    rows = list(product(*map(range, sizes)))
    kept = [rows[number] for number in cover(rows, strength)]

    def has(some: list[tuple[int, ...]]) -> set[object]:
        return {part for row in some for part in combinations(enumerate(row), min(strength, len(sizes)))}

    assert has(kept) == has(rows)
    assert len(kept) <= most


def test_at_most_so_many_are_kept_and_they_lie_apart() -> None:
    assert cover([(number,) for number in range(9)], 1, most=3) == [0, 4, 8]
    rows = list(product(range(4), range(3)))
    kept = [rows[number] for number in cover(rows, 1, most=3)]
    assert len({row[0] for row in kept}) == len({row[1] for row in kept}) == 3
    assert cover(rows, 1, most=99) == cover(rows, 1, most=len(rows))


def test_the_longest_files_come_first_and_stay_whole() -> None:
    missing = [name for name in LONGEST if not (TESTS / name).is_file()]
    assert not missing
    paths = [TESTS / name for name in ("a.py", "b.py", "b.py", LONGEST[1], "a.py", LONGEST[0], "b.py")]
    items: list[Any] = [SimpleNamespace(path=path, number=number) for number, path in enumerate(paths)]
    longest_first(items)
    assert [item.number for item in items] == [5, 3, 1, 2, 6, 0, 4]
