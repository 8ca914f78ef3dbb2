"""Rank 0 accepts requests from many threads, and the other ranks run the same steps.

Commands that rank 0 gets between two steps (submit, cancel) form a numbered batch, stored as JSON in the ranks' store.
All ranks apply the batches in order and before the same step, by a rule that needs no further communication:

- While the engine is idle, the next batch is applied as soon as it is written. The other ranks wait for it.
- Otherwise it is applied once a step's exchange has carried its number (`ParallelBackend.announced`). So a step needs
  no message besides its exchange, and a new request waits one step longer than in one process.

If a rank fails, the group ends: rank 0 does not continue without it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lookahead.engine.core import EngineCore
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.engine.request_stream import RequestStream
from lookahead.parallel.backend import ParallelBackend
from lookahead.parallel.group import Group
from lookahead.parallel.watchdog import RankError


@dataclass
class Recipe:
    """JSON-compatible data from which every rank builds the same request. Rank 0 assigns the numbers."""

    data: Any
    number: int = -1


class CommandSchedule:
    """When the next batch is due. The result is the same on all ranks before the same step."""

    def __init__(self, engine: Engine, backend: ParallelBackend) -> None:
        self._engine, self._backend = engine, backend
        self.applied = 0

    @property
    def due(self) -> bool:
        return not self._engine.running or self.applied < self._backend.received


class Leader(EngineCore):
    """The engine core of rank 0: it broadcasts commands before applying them. Every request needs a `Recipe`."""

    def __init__(self, engine: Engine, backend: ParallelBackend, group: Group) -> None:
        super().__init__(engine)
        self._backend, self._group = backend, group
        self._schedule = CommandSchedule(engine, backend)
        self._recipes = 0
        self._fresh: list[tuple[list[Any], Callable[[], None]]] = []  # commands for the others, and their local twins
        self._batches: deque[list[Callable[[], None]]] = deque()  # broadcast, but not applied yet
        self._written = self._erased = 0
        self._before = (0, 0)  # passes, and batches applied, before the last step

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._batches)

    def submit(self, stream: RequestStream) -> None:
        recipe = stream.request.recipe
        if self.dead or not isinstance(recipe, Recipe):
            error = None if self.dead else ValueError("a request without a recipe cannot run on several ranks")
            self._end(stream, error or self.failure)
            return
        recipe.number, self._recipes = self._recipes, self._recipes + 1
        self._fresh.append((["submit", recipe.number, recipe.data], partial(super().submit, stream)))

    def cancel(self, stream: RequestStream) -> None:
        if isinstance(stream.request.recipe, Recipe):
            number = stream.request.recipe.number
            self._fresh.append((["cancel", number, None], partial(super().cancel, stream)))

    def run_commands(self) -> None:
        super().run_commands()
        self._erase()
        self._broadcast()
        while self._batches and self._schedule.due:
            self._schedule.applied += 1
            for command in self._batches.popleft():
                command()
        self._before = self._backend.passes, self._schedule.applied

    def _broadcast(self) -> None:
        """Write new commands for the other ranks."""
        if not self._fresh:
            return
        commands, local = zip(*self._fresh, strict=True)
        self._fresh = []
        self._batches.append(list(local))
        self._group.write_note(self._written, json.dumps(commands).encode())
        self._written += 1
        self._backend.announced = self._written

    def _erase(self) -> None:
        """Delete the batches that all ranks have read: a rank that reaches a step's exchange has applied those before
        it."""
        passes, applied = self._before
        if self._backend.passes > passes:
            for number in range(self._erased, applied):
                self._group.erase_note(number)
            self._erased = applied

    def recover(self, error: BaseException) -> None:
        """A step has failed. The ranks are no longer in sync, so report the error to the others and exit."""
        if self.stop.is_set():
            self._group.close()
        elif not isinstance(error, RankError):
            self._group.fail(error)
        raise self.device_error(error) or error

    def shut_down(self, error: BaseException) -> None:
        self.dead, self.failure = True, error
        while self._batches:
            for command in self._batches.popleft():
                command()
        super().shut_down(error)


def run_follower(engine: Engine, backend: ParallelBackend, group: Group, make: Callable[[Any], Request]) -> None:
    """Apply rank 0's batches and run its steps, until it leaves.

    `make` builds a request from the data of its recipe. Raises RankError if another rank fails.
    """
    schedule = CommandSchedule(engine, backend)
    requests: dict[int, Request] = {}
    while True:
        while schedule.due:
            text = group.read_note(schedule.applied)
            if text is None:
                return
            schedule.applied += 1
            running = set(engine.running)
            requests = {number: request for number, request in requests.items() if request.id in running}
            with group.guarded():
                for what, number, data in json.loads(text):
                    _apply(engine, requests, make, what, number, data)
        with group.guarded():
            engine.step()


def _apply(
    engine: Engine, requests: dict[int, Request], make: Callable[[Any], Request], what: str, number: int, data: Any
) -> None:
    if what == "submit":
        request = make(data)
        try:
            engine.submit(request)
            requests[number] = request
        except ValueError:  # refused by rank 0's engine, too
            pass
    elif number in requests:
        engine.cancel(requests.pop(number).id)
