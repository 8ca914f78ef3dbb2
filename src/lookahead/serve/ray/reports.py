"""The board: what every replica last said of itself. An ingress reads from it all metrics, and how many replicas live.

Ray Serve's router sends a call to one replica of its choice, so nobody can ask all of them. Each posts its state here.
"""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

PERIOD = 1.0
"""Seconds between two posts of a replica."""
STALE = 5.0
"""Seconds after which a post no longer counts: its replica has gone."""


class Report(NamedTuple):
    """What a process said of itself: its kind (replica or ingress), its name, and its metrics in Prometheus' text."""

    kind: str
    name: str
    text: bytes


class ReportStore:
    """A deployment of one process. If it dies, the posts are back within a second."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], tuple[Report, float]] = {}

    async def post(self, kind: str, name: str, text: bytes) -> None:
        self._reports[kind, name] = Report(kind, name, text), monotonic()

    async def read(self) -> list[Report]:
        """The posts that still count."""
        now = monotonic()
        self._reports = {key: (report, when) for key, (report, when) in self._reports.items() if now - when < STALE}
        return [report for report, _ in self._reports.values()]
