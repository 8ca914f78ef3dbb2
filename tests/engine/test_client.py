"""The engine client: many threads, one engine. Cancelled, failed and forgotten requests harm nobody else."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from paged import PagedToy
from test_identity import Asked, alone, sequence_of
from toys import ToyBackend

from lookahead.backends.base import StepInput
from lookahead.engine.client import EngineClient
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "early"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that runs beside the host, the next step begins before the events of the last one are sent."""
    monkeypatch.setattr(ToyBackend, "capabilities", replace(ToyBackend.capabilities, overlaps=request.param))


def asked(number: int, tokens: int = 20) -> Asked:
    return (number % 23, 1, 2, number % 5), tokens, number % 5, number % 3


def text_of(one: Asked) -> tuple[list[int], str | None]:
    prompt, tokens, _, sampling = one
    return alone(prompt, tokens, sampling)


def endless(ends: Callable[[int], bool] | None = None) -> Request:
    """A request that goes on until somebody stops it."""
    sequence = sequence_of(((1, 2, 3), 100_000, 0, 1))
    sequence.rules, sequence.ends = type(sequence.rules)(100_000), ends
    return Request(sequence)


def soon(met: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if met():
            return True
        time.sleep(0.01)
    return False


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    found: list[Any] = [None] * count

    def run(number: int) -> None:
        found[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@pytest.mark.thinned(1, most=1)
def test_threads_get_their_own_texts() -> None:
    backend = PagedToy(pages=40, most_rows=32)
    client = EngineClient(Engine(backend))

    def work(number: int) -> bool:
        right = True
        for turn in range(4):
            one = asked(number + 7 * turn)
            sequence = sequence_of(one)
            stream = client.submit(Request(sequence))
            if number % 2:
                output = [token for event in stream for token in event.tokens]
            else:
                stream.wait()
                output = sequence.output
            right &= (output, sequence.finish_reason) == text_of(one)
        return right

    assert in_threads(8, work) == [True] * 8
    assert backend.slots == {}
    assert len({thread.name for thread in threading.enumerate() if thread.name == "lookahead"}) <= 1


def test_requests_of_threads_share_passes() -> None:
    backend = PagedToy(pages=200, most_rows=32)
    client = EngineClient(Engine(backend))
    streams = [client.submit(Request(sequence_of(asked(5 * number, 24)))) for number in range(6)]
    for stream in streams:
        stream.wait()
    assert max(map(len, backend.passes)) > 1


def test_cancel_in_mid_stream() -> None:
    backend = ToyBackend()
    client = EngineClient(Engine(backend))
    stream = client.submit(endless())
    other = client.submit(Request(sequence_of(asked(4))))
    events = iter(stream)
    next(events)
    client.cancel(stream)
    list(events)  # it ends
    assert stream.done
    assert stream.request.sequence.finish_reason is None
    client.cancel(stream)
    other.wait()
    assert other.request.sequence.output == text_of(asked(4))[0]
    assert backend.slots == {}


def fails(token: int) -> bool:
    raise ZeroDivisionError("a rule of its own")


class BrokenSource:
    """It cannot do anything that a source does."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError("a rule of its own")


def test_an_error_in_one_request_is_its_own() -> None:
    backend = PagedToy(pages=200)
    client = EngineClient(Engine(backend))
    good = [Request(sequence_of(asked(number))) for number in range(4)]
    bad_rule, bad_source = (Request(sequence_of(asked(number, 60))) for number in (1, 2))
    bad_rule.sequence.ends = fails
    bad_source.sequence._sources = [BrokenSource()]
    streams = [client.submit(request) for request in (*good[:2], bad_rule, bad_source, *good[2:])]
    for stream in streams[2:4]:
        with pytest.raises(ZeroDivisionError, match="a rule of its own"):
            stream.wait()
        with pytest.raises(ZeroDivisionError, match="a rule of its own"):
            list(stream)
        assert stream.request.sequence.finish_reason == "error"
    for number, request in enumerate(good):
        streams[number if number < 2 else number + 2].wait()
        assert request.sequence.output == text_of(asked(number))[0]
    assert backend.slots == {}
    assert backend.pool.used == 0


class Dying(ToyBackend):
    dead = False

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        if self.dead:
            raise OSError("the device is gone")
        return super().launch(inputs)


def test_the_death_of_the_engine_reaches_every_stream() -> None:
    backend = Dying()
    client = EngineClient(Engine(backend))
    streams = [client.submit(endless()) for _ in range(3)]
    next(iter(streams[0]))

    def work(number: int) -> bool:
        with pytest.raises(OSError, match="the device is gone"):
            list(streams[number]) if number else streams[number].wait()
        return True

    threading.Timer(0.05, lambda: setattr(backend, "dead", True)).start()
    assert in_threads(3, work) == [True] * 3
    with pytest.raises(OSError, match="the device is gone"):
        client.submit(endless()).wait()
    assert backend.slots == {}
    backend.dead = False
    stream = client.submit(Request(sequence_of(asked(4))))
    stream.wait()
    assert stream.request.sequence.output == text_of(asked(4))[0]


def test_what_can_never_run_is_refused_by_submit() -> None:
    client = EngineClient(Engine(PagedToy(pages=8)))
    with pytest.raises(ValueError, match="the backend has room for 32"):
        client.submit(endless())


def test_it_sleeps_and_goes_with_its_owner() -> None:
    backend = ToyBackend()
    client = EngineClient(Engine(backend))
    client.submit(Request(sequence_of(asked(3)))).wait()
    (thread,) = client._threads
    assert thread.daemon
    assert thread.is_alive()
    used = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - used < 0.1
    gone = [weakref.ref(client), weakref.ref(client._core.engine), weakref.ref(backend)]
    del client, backend
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert soon(lambda: not thread.is_alive())


def test_a_closed_client() -> None:
    client = EngineClient(Engine(ToyBackend()))
    stream = client.submit(endless())
    client.close()
    with pytest.raises(RuntimeError, match="closed while it was answering"):
        stream.wait()
    client.cancel(stream)
    client.close()
    with pytest.raises(RuntimeError, match="the model was closed; load it again"):
        client.submit(endless())


def test_only_the_end_wakes_one_who_waits() -> None:
    client = EngineClient(Engine(ToyBackend()))
    stream = client.submit(Request(sequence_of(asked(0))))
    woken: list[bool] = []
    wake = stream._wake.set
    stream._wake.set = lambda: woken.append(stream.done) or wake()  # type: ignore[func-returns-value, method-assign]
    stream.wait()
    assert woken == [True]


def test_functions_run_between_steps() -> None:
    client = EngineClient(Engine(ToyBackend()))
    stream = client.submit(endless())
    next(iter(stream))
    assert client.call(lambda: threading.current_thread().name) == "lookahead"
    with pytest.raises(ZeroDivisionError):
        client.call(lambda: fails(1))
    client.cancel(stream)
    stream.join()
    assert stream.error is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_without_a_thread_the_reader_steps(order: tuple[int, int]) -> None:
    client = EngineClient(Engine(ToyBackend()), thread=False)
    streams = [client.submit(Request(sequence_of(asked(number)))) for number in range(2)]
    for number in order:
        output = [token for event in streams[number] for token in event.tokens]
        assert output == text_of(asked(number))[0]
    assert client._threads == []
    failing = client.submit(endless(fails))
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    stopped = client.submit(endless())
    next(iter(stopped))
    client.cancel(stopped)
    stopped.wait()


def test_streams_of_a_step_share_one_call_and_can_be_taken_without_waiting() -> None:
    client = EngineClient(Engine(PagedToy(pages=60, most_rows=64)))
    calls: list[list[Any]] = []
    over = threading.Event()

    def on_step(streams: Sequence[Any]) -> None:
        calls.append([(stream, stream.take()) for stream in streams])
        if all(stream.done for stream in held):
            over.set()

    asks = [asked(number) for number in range(4)]
    sequences = [sequence_of(one) for one in asks]
    held: list[Any] = []
    client.call(lambda: held.extend(client.submit(Request(sequence), on_step) for sequence in sequences))
    assert over.wait(30)
    assert len(calls[0]) == 4  # all four ran in the first step, and one call notifies them
    for one, stream in zip(asks, held, strict=True):
        tokens = [
            token for call in calls for got, events in call if got is stream for e in events for token in e.tokens
        ]
        assert (tokens, stream.request.sequence.finish_reason) == text_of(one)
    assert len(calls) < sum(len(call) for call in calls)


def test_cancelling_notifies_a_reader_that_does_not_wait() -> None:
    client = EngineClient(Engine(ToyBackend()))
    ended = threading.Event()
    stream = client.submit(endless(), lambda streams: ended.set() if streams[0].done else None)
    client.cancel(stream)
    assert ended.wait(30)
    assert stream.error is None


def test_a_failed_step_is_remembered_until_a_step_succeeds() -> None:
    backend = ToyBackend()
    client, launch = EngineClient(Engine(backend)), backend.launch

    def broken(inputs: Sequence[StepInput]) -> Any:
        raise OSError("the device is gone")

    backend.launch = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="device is gone"):
        client.submit(endless()).wait()
    assert isinstance(client.failure, OSError)
    backend.launch = launch  # type: ignore[method-assign]
    one = asked(3)
    client.submit(Request(sequence_of(one))).wait()
    assert client.failure is None


def test_nobody_waits_for_a_thread_that_has_died() -> None:
    engine = Engine(ToyBackend())
    client = EngineClient(engine)
    running = client.submit(endless())
    assert soon(lambda: bool(running.request.sequence.output))

    def worse() -> None:
        raise OSError("nor can it be cleaned up")

    engine.abort = worse  # type: ignore[method-assign]
    engine.step = engine.finish = worse  # type: ignore[assignment, method-assign]
    with pytest.raises(OSError, match="cleaned up"):
        running.wait()
    assert isinstance(client.failure, OSError)
    with pytest.raises(RuntimeError, match="thread has died"):
        client.submit(endless())


def test_beside_a_device_events_are_sent_while_the_next_step_runs() -> None:
    class Device(ToyBackend):
        capabilities = replace(ToyBackend.capabilities, overlaps=True)
        running = False

        def launch(self, inputs: Sequence[StepInput]) -> Any:
            self.running = True
            return super().launch(inputs)

        def collect(self, launched: Any) -> Any:
            self.running = False
            return super().collect(launched)

    backend = Device()
    client = EngineClient(Engine(backend))
    one = asked(4, tokens=12)
    tokens: list[int] = []
    beside: list[bool] = []
    over = threading.Event()

    def on_step(streams: Sequence[Any]) -> None:
        tokens.extend(token for stream in streams for event in stream.take() for token in event.tokens)
        beside.append(backend.running)
        if streams[0].done:
            over.set()

    client.submit(Request(sequence_of(one)), on_step)
    assert over.wait(30)
    assert tokens == text_of(one)[0]
    assert beside == [True] * (len(beside) - 1) + [False]  # nothing runs after the last step


def test_events_of_the_last_step_are_sent_even_if_the_next_one_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ToyBackend()
    client, launch = EngineClient(Engine(backend)), backend.launch
    one = asked(3)
    sequence, longer = sequence_of(one), endless()
    ended: list[bool] = []

    def breaks_after_the_end(inputs: Sequence[StepInput]) -> Any:
        if sequence.finish_reason is not None:
            raise OSError("the device is gone")
        return launch(inputs)

    monkeypatch.setattr(backend, "launch", breaks_after_the_end)
    first, second = client.call(lambda: (client.submit(Request(sequence)), client.submit(longer)))
    first.wait()
    ended.append(first.error is None)
    with pytest.raises(OSError, match="device is gone"):
        second.wait()
    assert ended == [True]
    assert (sequence.output, sequence.finish_reason) == text_of(one)
    assert sum(len(event.tokens) for event in first.take()) == len(sequence.output)
