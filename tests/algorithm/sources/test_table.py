"""The table of sources and the names in configs say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lookahead.algorithm.sources.calibration import SOURCE_NAMES
from lookahead.algorithm.sources.memory import SharedMemory
from lookahead.algorithm.sources.pool import NGramPool
from lookahead.algorithm.sources.table import TABLE, Row, build_sources, check_names, wants_top
from lookahead.config import OTHER_SOURCES, SOURCES, LookaheadConfig


def test_every_name_of_a_config_has_one_row() -> None:
    check_names(TABLE)
    assert {row.name for row in TABLE} == {*SOURCES, *OTHER_SOURCES}
    for broken in (TABLE[1:], (*TABLE, TABLE[0]), (*TABLE, replace(TABLE[0], name="new"))):
        with pytest.raises(RuntimeError, match="rows in sources"):
            check_names(broken)


def test_origins_keep_their_order() -> None:
    """Saved memories have rates by origin, so the order of the names is part of their format."""
    assert SOURCE_NAMES == ("jacobi", "prompt", "suffix", "recycle", "fixed-point", "prediction")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_config_with_one_source_makes_that_one(row: Row) -> None:
    config = LookaheadConfig(window=0, sources=(row.name,))
    assert wants_top(config) == row.needs_top == (row.name == "recycle")
    assert len(build_sources(config, SharedMemory())) == 1
    source = row.make(config, SharedMemory(), NGramPool(config.guesses))
    source.start([1, 2, 3])
