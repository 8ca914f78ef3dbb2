"""The latest status report of every process. An ingress reads all metrics and the number of live replicas from it.

Ray Serve's router sends a call to one replica of its choice, so replicas cannot be polled. Instead each posts reports.
"""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

PERIOD = 1.0
"""Seconds between two reports of a replica."""
STALE = 5.0
"""Seconds after which a report expires: its replica is gone."""


class Report(NamedTuple):
    """A process's kind (replica or ingress), name, and metrics in Prometheus' text format."""

    kind: str
    name: str
    text: bytes


class ReportStore:
    """A deployment of one process. If it dies, all reports are renewed within a second."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], tuple[Report, float]] = {}

    async def post(self, kind: str, name: str, text: bytes) -> None:
        self._reports[kind, name] = Report(kind, name, text), monotonic()

    async def read(self) -> list[Report]:
        """The reports that have not expired."""
        now = monotonic()
        self._reports = {key: (report, when) for key, (report, when) in self._reports.items() if now - when < STALE}
        return [report for report, _ in self._reports.values()]
