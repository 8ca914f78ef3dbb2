"""The table of sources: one row for each, the most reliable first. `source` says how to add one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lookahead.algorithm.sources.fixed_point import FixedPointSource
from lookahead.algorithm.sources.memory import SharedMemory
from lookahead.algorithm.sources.pool import JacobiSource, NGramPool, PromptSource
from lookahead.algorithm.sources.recycle import RecycleSource
from lookahead.algorithm.sources.source import Source
from lookahead.algorithm.sources.suffix import SuffixSource
from lookahead.algorithm.sources.text import join_text_sources
from lookahead.config import OTHER_SOURCES, SOURCES, LookaheadConfig


@dataclass(frozen=True)
class Row:
    """A source by its name in configs: how it is created for a request, and whether it needs the top tokens of every
    step from the backend. `jacobi` and `prompt` share the request's n-gram pool."""

    name: str
    make: Callable[[LookaheadConfig, SharedMemory, NGramPool], Source]
    needs_top: bool = False


TABLE = (
    Row(
        "suffix",
        lambda config, memory, pool: SuffixSource(
            memory.calibration,
            config.suffix_key,
            config.suffix_branches,
            max(1, min(config.suffix_length, config.deepest)),
            config.suffix_oldest,
        ),
    ),
    Row("prompt", lambda config, memory, pool: PromptSource(pool, memory.calibration, config.ngram)),
    Row("jacobi", lambda config, memory, pool: JacobiSource(pool, memory.calibration, config.ngram)),
    Row(
        "recycle",
        lambda config, memory, pool: RecycleSource(
            memory.drafter.new_table,
            memory.successors if config.recycle_scope == "model" else None,
            memory.calibration,
            memory.bigrams,
        ),
        needs_top=True,
    ),
    Row("fixed-point", lambda config, memory, pool: FixedPointSource(memory.calibration, config.budget - 1)),
)


def check_names(table: Iterable[Row]) -> None:
    """Raise RuntimeError unless the table has exactly one row for each name that a config may have."""
    rows, names = [row.name for row in table], (*SOURCES, *OTHER_SOURCES)
    for name in {*rows, *names}:
        if rows.count(name) != 1 or name not in names:
            raise RuntimeError(
                f"source {name!r} has {rows.count(name)} rows in sources.table.TABLE, and config.SOURCES and "
                f"OTHER_SOURCES name it {names.count(name)} times; both must be once"
            )


check_names(TABLE)


def build_sources(config: LookaheadConfig, memory: SharedMemory) -> list[Source]:
    """The config's sources, the most reliable first."""
    pool = NGramPool(config.guesses)
    sources = [row.make(config, memory, pool) for row in TABLE if row.name in config.active_sources]
    return join_text_sources(sources, memory.drafter)


def wants_top(config: LookaheadConfig) -> bool:
    """Whether the backend must return the top tokens of the needed nodes."""
    return any(row.needs_top and row.name in config.active_sources for row in TABLE)
