"""A lost device ends everything with one error, and an error of one step or request does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged import PagedToy
from test_identity import alone, sequence_of
from toys import ToyBackend

import lookahead
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import PassCost
from lookahead.backends.base import StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.failures import DeviceError, DeviceMemoryError
from lookahead.engine.client import EngineClient
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

LOST = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' ...\n"


class Faulty(ToyBackend):
    """Raises `error` where `where` says, from the `after`th pass on."""

    def __init__(self, error: Exception, where: str = "launch", after: int = 3) -> None:
        super().__init__()
        self.error, self.where, self.after, self.passes = error, where, after, 0
        self.closed: list[int] = []

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        self.passes += 1
        self._fail("launch")
        return super().launch(inputs)

    def collect(self, launched: Any) -> Any:
        self._fail("collect")
        return super().collect(launched)

    def _fail(self, where: str) -> None:
        if where == self.where and self.passes >= self.after:
            raise self.error


def long_request() -> Request:
    return Request(sequence_of(((1, 2, 3), 2000, 0, 1)))


def no_answer(device: Any) -> None:
    raise torch.AcceleratorError(LOST)


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lost_device_fails_running_waiting_and_later_requests_alike(
    where: str, thread: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the next step begins before the last one's events are sent."""
    monkeypatch.setattr(torch.cuda, "synchronize", no_answer)
    monkeypatch.setattr(Faulty, "device", torch.device(device))
    backend = Faulty(torch.AcceleratorError(LOST), where)
    engine = Engine(backend, max_sequences=2)
    client = EngineClient(engine, thread=thread)
    # All four are submitted before the first step, which may fail before this thread submits the next one.
    streams = client.call(lambda: [client.submit(long_request()) for _ in range(4)])
    for stream in streams:
        with pytest.raises(DeviceError, match=r"is lost \(CUDA error: an illegal memory access was encountered\); no"):
            stream.wait()
    passes = backend.passes
    for _ in range(2):
        with pytest.raises(DeviceError, match="illegal memory access") as later:
            client.submit(long_request())
        assert "\n" not in str(later.value)
        with pytest.raises(DeviceError, match="illegal memory access"):
            client.call(lambda: 1)
    assert isinstance(client.failure, DeviceError)
    assert backend.passes == passes, "a lost device is left alone"
    assert engine.running == []
    assert backend.slots == {}


def test_a_plain_runtime_error_of_a_step_is_forgotten() -> None:
    backend = Faulty(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    client = EngineClient(Engine(backend))
    with pytest.raises(RuntimeError, match="mat1"):
        client.submit(long_request()).wait()
    backend.after = 1 << 30
    one = ((1, 2, 3), 20, 0, 1)
    stream = client.submit(Request(sequence_of(one)))
    stream.wait()
    assert stream.request.sequence.output == alone(one[0], one[1], one[3])[0]
    assert client.failure is None


def test_the_device_of_one_requests_own_rule_is_the_device_of_all() -> None:
    """A rule that runs on the device finds out first, in a part of the step that is the request's alone."""
    client = EngineClient(Engine(ToyBackend()))
    requests = [long_request() for _ in range(3)]

    def ends(token: int) -> bool:
        raise torch.AcceleratorError(LOST)

    requests[-1].sequence.ends = ends
    # Between two steps: the others cannot have ended before.
    *others, stream = client.call(lambda: [client.submit(request) for request in requests])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        stream.wait()
    for stream in others:
        with pytest.raises(DeviceError):
            stream.wait()


def test_a_requests_own_error_may_quote_a_lost_device() -> None:
    """A grammar that fails names a part of the client's schema: no schema may end a server."""
    client = EngineClient(Engine(ToyBackend()))
    one = ((1, 2, 3), 200, 0, 1)
    other, request = client.submit(Request(sequence_of(one))), long_request()

    def ends(token: int) -> bool:
        raise ValueError(f"the schema cannot be followed: 'CUDA error' after token {token}")

    request.sequence.ends = ends
    with pytest.raises(ValueError, match="the schema cannot be followed"):
        client.submit(request).wait()
    other.wait()
    assert other.request.sequence.output == alone(one[0], one[1], one[3])[0]
    assert client.failure is None


def test_a_call_between_steps_may_find_the_device_lost() -> None:
    client = EngineClient(Engine(ToyBackend()))
    running = client.submit(long_request())

    def capture() -> None:
        raise torch.AcceleratorError(LOST)

    with pytest.raises(DeviceError):
        client.call(capture)
    with pytest.raises(DeviceError):
        running.wait()


def test_without_memory_the_largest_request_fails_and_the_others_go_on() -> None:
    class Small(PagedToy):
        def launch(self, inputs: Sequence[StepInput]) -> Any:
            if sum(len(item.chunk) + len(item.tree) for item in inputs) > 12:
                raise DeviceMemoryError("a step of 16 tokens needs 2.00 GiB of memory; lower kv_tokens")
            return super().launch(inputs)

    backend = Small(pages=200)
    client = EngineClient(Engine(backend))
    good = [((number, 1, 2), 10, 0, 0) for number in range(2)]
    large = client.submit(Request(sequence_of((tuple(range(20)), 10, 0, 0))))
    streams = [client.submit(Request(sequence_of(one))) for one in good]
    with pytest.raises(DeviceMemoryError, match="a step of 16 tokens needs"):
        large.wait()
    for stream, one in zip(streams, good, strict=True):
        stream.wait()
        assert stream.request.sequence.output == alone(one[0], one[1], one[3])[0]
    assert client.failure is None
    assert backend.slots == {}
    assert backend.pool.used == 0


@pytest.mark.parametrize("pads", [True, False])
def test_a_step_in_which_nothing_ran_says_nothing_about_the_cost_of_a_pass(pads: bool) -> None:
    class Full(PagedToy):
        def launch(self, inputs: Sequence[StepInput]) -> Any:
            raise DeviceMemoryError("a step of 3 tokens needs 2.00 GiB of memory; lower kv_tokens")

    cost = PassCost([1.0 + rows for rows in range(64)])
    engine = Engine(Full(pages=1000, pads=pads), DraftBudget(cost, guarded=True))
    engine.submit(long_request())
    (event,) = engine.step()
    assert isinstance(event.error, DeviceMemoryError)
    assert engine.running == []
    assert (cost.constant, cost.slope) == (0.0, 1.0)


def test_ranks_do_not_go_on_without_a_request_that_only_one_of_them_has_no_memory_for() -> None:
    """The other ranks would wait for the passes of the whole batch."""

    class Small(PagedToy):
        def launch(self, inputs: Sequence[StepInput]) -> Any:
            if len(inputs) > 1:
                raise DeviceMemoryError("a step of 16 tokens needs 2.00 GiB of memory; lower kv_tokens")
            return super().launch(inputs)

    backend = Small(pages=1000)
    backend.capabilities = replace(backend.capabilities, ranks=2)
    engine = Engine(backend)
    for _ in range(2):
        engine.submit(long_request())
    with pytest.raises(DeviceMemoryError):
        engine.step()
    engine.abort()
    assert backend.slots == {}


def test_a_request_waits_for_the_memory_of_another_sequence(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager backend's K/V buffer grows by a sequence when one is opened."""
    backend = EagerBackend(make_model())
    engine, grow = Engine(backend), torch.Tensor.new_zeros
    asked = [((number, 1, 2), 10, 0, 0) for number in range(3)]
    expected = []
    for one in asked:
        engine.submit(request := Request(sequence_of(one)))
        while engine.running:
            engine.step()
        expected.append(request.sequence.output)

    def limited(tensor: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        if len(shape) == 5 and shape[1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return grow(tensor, *shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", limited)
    requests = [Request(sequence_of(one)) for one in asked]
    for request in requests:
        engine.submit(request)
    while engine.running:
        assert all(event.error is None for event in engine.step())
        assert engine.waiting + 1 >= len(engine.running)
    assert [request.sequence.output for request in requests] == expected
    first = backend.open()
    with pytest.raises(DeviceMemoryError, match=r"^the K/V of one more sequence needs 2.00 GiB"):
        backend.open()
    backend.close(first)
    assert backend._index == {}


def test_the_eager_backend_without_memory(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A K/V buffer that cannot grow stays as it is."""
    model = make_model()
    backend = EagerBackend(model)
    engine, grow = Engine(backend), torch.Tensor.new_zeros
    calls = 0

    def limited(tensor: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        if len(shape) == 5 and shape[3] > 512:
            calls += 1
            if calls % 2 == 0:  # keys have grown, values have not
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return grow(tensor, *shape, **options)

    good, large = (Request(sequence_of((prompt, 10, 0, 0))) for prompt in ((3, 1, 2), tuple([5, 4] * 300)))
    expected = Request(sequence_of(((3, 1, 2), 10, 0, 0)))
    engine.submit(expected)
    while engine.running:
        engine.step()
    monkeypatch.setattr(torch.Tensor, "new_zeros", limited)
    errors = []
    for one in (good, large):
        engine.submit(one)
    while engine.running:
        errors += [event for event in engine.step() if event.error is not None]
    assert [event.request for event in errors] == [large]
    assert str(errors[0].error).startswith("a step of ")
    assert good.sequence.output == expected.sequence.output
    texts = []
    for used in (engine, Engine(EagerBackend(model))):
        medium = Request(sequence_of((tuple([5, 4] * 150), 10, 0, 0)))
        used.submit(medium)
        while used.running:
            used.step()
        texts.append(medium.sequence.output)
    assert texts[0] == texts[1]


def test_a_library_call_raises_one_class_and_so_do_later_ones(
    make_model: Any, tokenizer: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = lookahead.load((make_model(), tokenizer), config=settings)

    def lost(inputs: Any) -> Any:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(lm.backend, "launch", lost)
    with pytest.raises(lookahead.DeviceError, match="illegal memory access") as first:
        lm.generate("the fox", max_tokens=4)
    monkeypatch.undo()
    with pytest.raises(lookahead.DeviceError) as second:
        next(iter(lm.stream("the fox")))
    with pytest.raises(lookahead.DeviceError) as third:
        lm.prepare()
    assert str(first.value) == str(second.value) == str(third.value)
