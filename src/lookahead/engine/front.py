"""The engine's door for many threads: one thread owns the device, and everybody else holds tickets.

The thread steps the engine while there is work, and sleeps otherwise. It starts with the first request, and ends with
the `Front`, which nothing in it keeps alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

from lookahead.backends.failures import DeviceError, device_error
from lookahead.engine.engine import Engine
from lookahead.engine.request import Event, Request

R = TypeVar("R")

Told = Callable[[Sequence["Ticket"]], None]
"""Called after a step, in the engine's thread, with all its tickets that got an event or ended. It must not raise."""

LAST_STEP = 5.0
"""Seconds that the end of a model, or of Python, waits for the step that is running."""


class Ticket:
    """One request on its way. Iterate its events as they come, or `wait` for its end.

    Both raise the request's error, if it or the engine failed. The events of a request that was cancelled just end.
    Who must not wait, such as an event loop, is `told` when there is something to `take`.
    """

    def __init__(self, request: Request, pump: Callable[[], None] | None, told: Told | None = None) -> None:
        self.request, self.told = request, told
        self.done = False
        self.error: BaseException | None = None
        self._events: deque[Event] = deque()
        self._pump = pump  # steps the engine in this thread; None: another thread does
        self._wake = threading.Event()
        self._read = False  # somebody iterates, and is woken by every event; otherwise only the end wakes

    def __iter__(self) -> Iterator[Event]:
        self._read = True
        while True:
            while self._events:
                yield self._events.popleft()
            if self.done and not self._events:
                break
            self._sleep(lambda: bool(self._events) or self.done)
        if self.error is not None:
            raise self.error

    def take(self) -> list[Event]:
        """The events that came since they were last taken. Does not wait."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self) -> None:
        """Wait for the end of the request."""
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Wait for the end of the request, whichever it is."""
        self._read = False
        while not self.done:
            self._sleep(lambda: self.done)

    def _sleep(self, awake: Callable[[], bool]) -> None:
        if self._pump is not None:
            self._pump()
            return
        self._wake.clear()
        if not awake():  # what came before `clear` is seen here, and what comes after it sets the event
            self._wake.wait()

    # Called by the thread that steps the engine.

    def put(self, event: Event) -> None:
        self._events.append(event)
        if event.finish_reason is not None:
            self.end(event.error)
        elif self._read:
            self._wake.set()

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done = True
        self._wake.set()


class Front:
    """A thread-safe door to an engine. The answer to a request is that of its run alone, whoever else asks.

    With `thread=False` the engine is stepped by the thread that reads a ticket. That is for ranks, which must all make
    the same calls in the same order. `core` is what the thread works on, if it is not a plain `Core`.
    """

    def __init__(self, engine: Engine, thread: bool = True, core: Core | None = None) -> None:
        self._core = core or Core(engine)
        self._core.begins_early &= thread
        self._inbox: SimpleQueue[Core | None] | None = SimpleQueue() if thread else None
        self._threads: list[threading.Thread] = []  # none yet, or one
        self._starting = threading.Lock()
        if self._inbox is not None:
            finalize(self, _stop, self._core.stop, self._inbox, self._threads)

    @property
    def failure(self) -> BaseException | None:
        """Why the engine cannot be trusted now: the error of its last step, or of its thread, which has ended. After a
        DeviceError it never works again."""
        return self._core.failure

    def submit(self, request: Request, told: Told | None = None) -> Ticket:
        """Hand a request in. Raises ValueError if it could never run. All tickets of a step that have the same `told`
        share one call of it."""
        self._core.engine.check(request)
        ticket = Ticket(request, None if self._inbox is not None else self._core.turn, told)
        self._post(lambda core: core.admit(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request early: at the latest after the step that is running. A finished one is left as it is."""
        if not ticket.done and not self._core.stop.is_set():
            self._post(lambda core: core.dismiss(ticket))

    def call(self, function: Callable[[], R]) -> R:
        """Run a function between two steps, in the thread that owns the device, and return what it returns."""
        found: list[R] = []
        errors: list[BaseException] = []
        over = threading.Event()

        def run() -> None:
            try:
                found.append(function())
            except BaseException as error:
                errors.append(self._core.give_up(error) or error)
            over.set()

        self._post(lambda core: run())
        over.wait()
        if errors:
            raise errors[0]
        return found[0]

    def release(self, function: Callable[[], Any]) -> None:
        """As `call`, for the end of a generator. If that is in the engine's own thread, it does not wait for itself."""
        if threading.current_thread() in self._threads:
            self._post(lambda core: function())
        else:
            self.call(function)

    def close(self) -> None:
        """End all requests; tickets that are waited for raise RuntimeError. Nothing can be submitted afterwards."""
        if self._inbox is None:
            self._core.stop.set()
            self._core.turn()
        elif not self._core.stop.is_set():
            self._post(lambda core: core.stop.set())

    def _post(self, command: Callable[[Core], None]) -> None:
        """Leave a command for the engine's thread, which looks for commands before every step."""
        if self._core.stop.is_set():
            raise RuntimeError("the model was closed; load it again")
        self._core.commands.append(command)
        if self._core.dead:  # looked up after the command was left, which the thread may still have found
            if isinstance(self._core.failure, DeviceError):
                raise DeviceError(str(self._core.failure))
            raise RuntimeError(f"the engine's thread has died of {self._core.failure!r:.200}; load the model again")
        if self._inbox is None:
            self._core.obey()
            return
        with self._starting:
            if not self._threads or not self._threads[0].is_alive():
                self._threads[:] = [threading.Thread(target=_serve, args=(self._inbox,), name="lookahead", daemon=True)]
                self._threads[0].start()
        self._inbox.put(self._core)


class Core:
    """What the thread works on: the engine, the tickets, and the commands that others left."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tickets: dict[int, Ticket] = {}
        self.commands: deque[Callable[[Core], None]] = deque()
        self.stop = threading.Event()
        self.failure: BaseException | None = None  # of the last step
        self.dead = False  # the device is lost, or the thread ended by an error that it could not handle
        self._news: dict[Told, list[Ticket]] = {}
        # Where the device runs beside the host, the next step begins before anybody is told of the last one.
        self.begins_early = engine.backend.capabilities.overlaps

    @property
    def has_work(self) -> bool:
        return bool(self.tickets or self.commands)

    def work(self) -> None:
        """Step until there is nothing left to do."""
        while self.has_work and not self.dead:
            self.turn()

    def turn(self) -> None:
        """Obey, and step once. If that fails, every request fails, and the next one starts afresh, unless the device
        is lost."""
        try:
            if self.begins_early:
                self._finish_and_begin()
            else:
                self._obey_or_stop()
                self._hand_out(self.engine.step())
        except BaseException as error:
            self.recover(error)
        self._tell()

    def _finish_and_begin(self) -> None:
        """Finish the step that runs, if one does, obey, and begin the next. Events are made and told while it runs."""
        settled = self.engine.finish()
        try:
            self._obey_or_stop()
            self.engine.begin()
        finally:  # what the last step gave is given out, whatever becomes of the next
            self._hand_out(settled.tell())

    def _obey_or_stop(self) -> None:
        self.obey()
        if self.stop.is_set():
            raise RuntimeError("the model was closed while it was answering")

    def _hand_out(self, events: Sequence[Event]) -> None:
        """Put events to their tickets. The ticket of a request that was cancelled meanwhile is gone."""
        lost = None
        for event in events:
            ticket = self.tickets.get(event.request.id)
            if ticket is None:
                continue
            if event.finish_reason is not None:
                del self.tickets[event.request.id]
            ticket.put(event)
            self._note(ticket)
            self.failure = None
            if event.error is not None:
                lost = self.lost(event.error) or lost
        if lost is not None:
            raise lost

    def recover(self, error: BaseException) -> None:
        """After a step that failed: every request fails, and the engine is empty."""
        if self.give_up(error) is None:
            self.engine.abort()
            self._fail(error)

    def lost(self, error: BaseException) -> DeviceError | None:
        """The DeviceError that stands for this error, if it means that the device is lost."""
        return device_error(error, self.engine.backend.device)

    def give_up(self, error: BaseException) -> DeviceError | None:
        """If the error means that the device is lost, every request fails, and so do all later ones."""
        lost = self.lost(error)
        if lost is not None and not self.dead:
            self.die(lost)
            with suppress(Exception):
                self.engine.abort(wait=False)
        return lost

    def die(self, error: BaseException) -> None:
        """Nothing runs after this error: nobody may wait for it."""
        self.dead, self.failure = True, error
        while self.commands:
            with suppress(BaseException):
                self.obey()  # requests that were handed in meanwhile fail, too
        self._fail(error)
        self._tell()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        failed, self.tickets = self.tickets, {}
        for ticket in failed.values():
            self._end(ticket, error)

    def _end(self, ticket: Ticket, error: BaseException | None = None) -> None:
        ticket.end(error)
        self._note(ticket)

    def _note(self, ticket: Ticket) -> None:
        if ticket.told is not None:
            self._news.setdefault(ticket.told, []).append(ticket)

    def _tell(self) -> None:
        if self._news:
            news, self._news = self._news, {}
            for told, tickets in news.items():
                told(tickets)

    def obey(self) -> None:
        while self.commands:
            self.commands.popleft()(self)

    def admit(self, ticket: Ticket) -> None:
        try:
            self.tickets[self.engine.submit(ticket.request)] = ticket
        except Exception as error:
            self._end(ticket, error)

    def dismiss(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket.request.id, None) is not None:
            self.engine.cancel(ticket.request.id)
            self._end(ticket)


def _serve(inbox: SimpleQueue[Core | None]) -> None:
    """The thread. While it waits for work it holds nothing but its inbox, so that a model can be freed."""
    while (core := inbox.get()) is not None:
        try:
            core.work()
        except BaseException as error:  # even the clean-up after a failed step has failed
            core.die(error)
            return
        del core


def _stop(stop: threading.Event, inbox: SimpleQueue[Core | None], threads: list[threading.Thread]) -> None:
    """End the thread of a front that is gone, or when Python exits. It may be in the middle of a step."""
    stop.set()
    inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(LAST_STEP)
