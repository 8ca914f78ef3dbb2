"""Rank 0 takes requests from many threads, and the other ranks follow: all make the same steps.

What rank 0 is told between two steps (requests, cancels) becomes a numbered batch of commands, as JSON in the ranks'
store. All ranks obey the batches in their order and before the same step, by a rule that each can apply by itself:

- While nothing runs, the next batch is obeyed as soon as it is there. The other ranks wait for it.
- While something runs, it is obeyed once a step's exchange has told its number (`ParallelBackend.word`). So a step
  needs no message besides its exchange, and a new request waits one step longer than in one process.

A rank that fails ends the group: rank 0 does not go on without it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lookahead.engine.engine import Engine
from lookahead.engine.front import Core, Ticket
from lookahead.engine.request import Request
from lookahead.parallel.backend import ParallelBackend
from lookahead.parallel.group import Group
from lookahead.parallel.watch import RankError


@dataclass
class Recipe:
    """Plain data (as JSON knows it) from which every rank makes the same request. Rank 0 numbers its recipes."""

    data: Any
    number: int = -1


class Turns:
    """Tells when the next batch is due. All ranks come to the same answer before the same step."""

    def __init__(self, engine: Engine, backend: ParallelBackend) -> None:
        self._engine, self._backend = engine, backend
        self.obeyed = 0

    @property
    def due(self) -> bool:
        return not self._engine.running or self.obeyed < self._backend.heard


class Leader(Core):
    """The core of rank 0's front: it hands its commands on before it obeys them. Every request needs a `Recipe`."""

    def __init__(self, engine: Engine, backend: ParallelBackend, group: Group) -> None:
        super().__init__(engine)
        self._backend, self._group = backend, group
        self._turns = Turns(engine, backend)
        self._recipes = 0
        self._fresh: list[tuple[list[Any], Callable[[], None]]] = []  # what others are told, and what is done here
        self._batches: deque[list[Callable[[], None]]] = deque()  # handed on, and not obeyed yet
        self._written = self._erased = 0
        self._before = (0, 0)  # how many passes there were, and what was obeyed, before the last step

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._batches)

    def admit(self, ticket: Ticket) -> None:
        recipe = ticket.request.recipe
        if self.dead or not isinstance(recipe, Recipe):
            error = None if self.dead else ValueError("a request without a recipe cannot run on several ranks")
            self._end(ticket, error or self.failure)
            return
        recipe.number, self._recipes = self._recipes, self._recipes + 1
        self._fresh.append((["submit", recipe.number, recipe.data], partial(super().admit, ticket)))

    def dismiss(self, ticket: Ticket) -> None:
        if isinstance(ticket.request.recipe, Recipe):
            number = ticket.request.recipe.number
            self._fresh.append((["cancel", number, None], partial(super().dismiss, ticket)))

    def obey(self) -> None:
        super().obey()
        self._erase()
        self._hand_on()
        while self._batches and self._turns.due:
            self._turns.obeyed += 1
            for command in self._batches.popleft():
                command()
        self._before = self._backend.passes, self._turns.obeyed

    def _hand_on(self) -> None:
        """Write what is new for the other ranks."""
        if not self._fresh:
            return
        told, done = zip(*self._fresh, strict=True)
        self._fresh = []
        self._batches.append(list(done))
        self._group.write_note(self._written, json.dumps(told).encode())
        self._written += 1
        self._backend.word = self._written

    def _erase(self) -> None:
        """Erase what all ranks have read: who has come to the exchange of a step has obeyed what was due before it."""
        passes, obeyed = self._before
        if self._backend.passes > passes:
            for number in range(self._erased, obeyed):
                self._group.erase_note(number)
            self._erased = obeyed

    def recover(self, error: BaseException) -> None:
        """A step has failed. The ranks are no longer at the same point, so this one ends, and tells the others."""
        if self.stop.is_set():
            self._group.close()
        elif not isinstance(error, RankError):
            self._group.fail(error)
        raise self.lost(error) or error

    def die(self, error: BaseException) -> None:
        self.dead, self.failure = True, error
        while self._batches:
            for command in self._batches.popleft():
                command()
        super().die(error)


def follow(engine: Engine, backend: ParallelBackend, group: Group, make: Callable[[Any], Request]) -> None:
    """What the other ranks do: they obey rank 0's batches and make its steps, until it leaves.

    `make` makes a request from the data of its recipe. Raises RankError if another rank fails.
    """
    turns = Turns(engine, backend)
    requests: dict[int, Request] = {}
    while True:
        while turns.due:
            text = group.read_note(turns.obeyed)
            if text is None:
                return
            turns.obeyed += 1
            running = set(engine.running)
            requests = {number: request for number, request in requests.items() if request.id in running}
            with group.guarded():
                for what, number, data in json.loads(text):
                    _obey(engine, requests, make, what, number, data)
        with group.guarded():
            engine.step()


def _obey(
    engine: Engine, requests: dict[int, Request], make: Callable[[Any], Request], what: str, number: int, data: Any
) -> None:
    if what == "submit":
        request = make(data)
        try:
            engine.submit(request)
            requests[number] = request
        except ValueError:  # rank 0's engine has refused it, too
            pass
    elif number in requests:
        engine.cancel(requests.pop(number).id)
