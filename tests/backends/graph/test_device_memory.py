"""A GPU whose memory is full: what nobody uses is given back, and what still does not fit is one request's loss.

The faults are injected on the kernels' slow twins, where nothing is captured and no memory is ever full.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import PROMPTS, outputs, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.graph import kv, runner, steps
from lookahead.backends.graph.adjusting import FIRST_TABLE_SLOTS, Adjusting
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.groups import AttentionGroup
from lookahead.backends.graph.kernels.tiles import HeadShape
from lookahead.backends.graph.memory import with_room
from lookahead.backends.graph.sizes import PAGE
from lookahead.backends.graph.state import DeviceState
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

CPU = torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."


def full(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError(FULL)


def request(prompt: list[int], tokens: int = 8, sampling: SamplingParams | None = None) -> Request:
    config = LookaheadConfig.autoregressive()
    return Request(DecodingSequence(prompt, config, sampling, StopRules(tokens)))


def test_it_is_tried_once_more_after_memory_was_given_back() -> None:
    calls: list[str] = []

    def make() -> int:
        calls.append("make")
        return full() if calls.count("make") < 2 else 7

    assert with_room(make, lambda: calls.append("give back"), "it", CPU) == 7
    assert calls == ["make", "give back", "make"]
    with pytest.raises(DeviceMemoryError, match=r"^a step of 9 tokens needs 2.00 GiB of memory; run fewer sequences"):
        with_room(full, lambda: None, "a step of 9 tokens", CPU)
    with pytest.raises(RuntimeError, match="of its own"):
        with_room(lambda: (_ for _ in ()).throw(RuntimeError("of its own")).__next__(), calls.clear, "it", CPU)
    assert calls  # nothing was given back for another error


def test_only_what_was_never_used_is_given_back() -> None:
    backend = GraphBackend(tiny("Llama"))
    outputs(backend, PROMPTS[:1], LookaheadConfig.autoregressive())
    used = set(backend.runner.steps.forwards), set(backend.runner.steps.targets), set(backend.runner.steps.pairs)
    backend.prepare(64, 8, 2)
    assert len(backend.runner.steps.forwards) > len(used[0])
    backend.runner.steps.drop_unused()
    found = set(backend.runner.steps.forwards), set(backend.runner.steps.targets), set(backend.runner.steps.pairs)
    assert used[0] <= found[0]
    assert used[1] <= found[1]
    assert {kind.forward for kind in found[2]} == found[0]


def test_steps_that_cannot_be_captured_run_uncaptured(
    settings: LookaheadConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same tokens, and one warning."""
    expected = outputs(GraphBackend(tiny("Llama")), PROMPTS, settings)
    backend = GraphBackend(tiny("Llama"))
    tries = 0

    def captured(state: DeviceState, work: Callable[[], None]) -> None:
        nonlocal tries
        if not state.full:
            tries += 1
            full()

    monkeypatch.setattr(DeviceState, "captured", captured)
    backend.runner.state.capture = True
    with caplog.at_level(logging.WARNING, "lookahead"):
        backend.prepare(64, settings.budget, 2)
        assert outputs(backend, PROMPTS, settings) == expected
    assert tries == 2
    lines = [record.getMessage() for record in caplog.records if record.name == "lookahead"]
    assert len(lines) == 1
    assert lines[0].startswith("a step of ")
    assert "needs 2.00 GiB of memory" in lines[0]
    assert lines[0].endswith("; steps that are not captured yet run uncaptured, which is slower")


def test_a_step_ahead_that_cannot_be_captured_has_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LookaheadConfig.autoregressive()
    expected = outputs(GraphBackend(tiny("Llama")), PROMPTS[:1], plain)
    backend = GraphBackend(tiny("Llama"))
    outputs(backend, PROMPTS[:1], plain)
    for step in backend.runner.steps.pairs.values():
        step.forward.graph_ahead = step.targets.graph_ahead = None
    backend.runner.state.capture = True
    monkeypatch.setattr(DeviceState, "captured", lambda state, work: None if state.full else full())
    with caplog.at_level(logging.WARNING, "lookahead"):
        assert outputs(backend, PROMPTS[:1], plain) == expected
    assert backend.runner.state.full
    assert [record.name for record in caplog.records].count("lookahead") == 1


def test_work_that_is_not_captured_has_read_its_packet_before_the_next_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that compiles its kernels runs on a packet of padding, and the device may still be busy with others."""
    backend, waits = GraphBackend(tiny("Llama")), list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("waited"))
    state = backend.runner.state
    state.capture = state.full = True
    backend.runner.prepare(8, 1, 1)
    compiled = len(backend.runner.steps.forwards) + len(backend.runner.steps.targets)
    assert len(waits) == state.captures == compiled


def test_memory_for_targets_does_not_drop_the_pass_that_they_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, made, tries = GraphBackend(tiny("Llama")), steps.CapturedTargets, 0

    def once_full(state: Any, kind: Any) -> Any:
        nonlocal tries
        tries += 1
        return full() if tries == 1 else made(state, kind)

    monkeypatch.setattr(steps, "CapturedTargets", once_full)
    outputs(backend, PROMPTS[:1], LookaheadConfig.autoregressive())
    captured = backend.runner.steps
    assert tries > 1
    assert {kind.forward: step.forward for kind, step in captured.pairs.items()} == captured.forwards


def test_a_step_that_does_not_fit_is_the_loss_of_the_largest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt needs a size of step that there is no memory for. Those who decode go on, and later ones run."""
    backend = GraphBackend(tiny("Llama"))
    engine, small = Engine(backend), [request(prompt) for prompt in PROMPTS[:2]]
    expected = outputs(backend, PROMPTS[:2], LookaheadConfig.autoregressive(), 8)
    made = steps.CapturedForward

    def limited(state: Any, kind: Any) -> Any:
        return full() if kind.rows > 64 else made(state, kind)

    monkeypatch.setattr(steps, "CapturedForward", limited)
    large = request([index % 61 for index in range(150)])
    for one in (*small, large):
        engine.submit(one)
    errors = []
    while engine.running:
        errors += [event for event in engine.step() if event.error is not None]
    assert [event.request for event in errors] == [large]
    assert isinstance(errors[0].error, DeviceMemoryError)
    assert str(errors[0].error).startswith("a step of 192 tokens needs 2.00 GiB of memory")
    assert [one.sequence.output for one in small] == expected
    assert backend.pool.used == 0
    assert outputs(backend, PROMPTS[:2], LookaheadConfig.autoregressive(), 8) == expected


def check_only_penalties_fail(engine: Engine) -> None:
    """Run a request without and one with penalties: only the second fails, for want of memory for its table."""
    plain, penalised = request(list(range(40))), request([1, 2], sampling=SamplingParams(presence_penalty=1.0))
    for submitted in (plain, penalised):
        engine.submit(submitted)
    errors = []
    while engine.running:
        errors += [event for event in engine.step() if event.error is not None]
    assert [event.request for event in errors] == [penalised]
    assert "a table of penalties and biases needs 2.00 GiB" in str(errors[0].error)
    assert len(plain.sequence.output) == 8


def test_a_table_that_cannot_grow_is_the_loss_of_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = GraphBackend(tiny("Llama"))
    engine = Engine(backend)
    rules = backend.planner.rules
    rules.reserve(FIRST_TABLE_SLOTS)
    free, rules.free_table_slots = rules.free_table_slots, []
    monkeypatch.setattr(Adjusting, "grow", full)
    check_only_penalties_fail(engine)
    rules.free_table_slots = free
    again = request([1, 2], sampling=SamplingParams(presence_penalty=1.0))
    engine.submit(again)
    while engine.running:
        engine.step()
    assert len(again.sequence.output) == 8


def test_the_first_table_is_the_loss_of_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = GraphBackend(tiny("Llama"))
    engine = Engine(backend)
    monkeypatch.setattr(Adjusting, "__init__", full)
    check_only_penalties_fail(engine)


def test_pages_that_cannot_grow_leave_those_that_were_there(
    settings: LookaheadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory in pieces, or another program that was faster: the check before said that there is room."""
    backend = GraphBackend(tiny("Llama"), kv_tokens=8 * PAGE)
    expected = outputs(backend, PROMPTS, settings)
    made, tries = kv.PagedKV, 0

    def limited(groups: Any, pages: Any, *rest: Any) -> Any:
        nonlocal tries
        tries += max(pages) > 8
        return full() if max(pages) > 8 else made(groups, pages, *rest)

    monkeypatch.setattr(kv, "PagedKV", limited)
    monkeypatch.setattr(runner, "PagedKV", limited)
    with pytest.raises(DeviceMemoryError, match=r"^room for 10 sequences of 200 tokens needs 2.00 GiB"):
        backend.check_room(10, 200)
    assert tries == 2
    assert sum(backend.kv.pages) == backend.pool.pages == 8
    assert outputs(backend, PROMPTS, settings) == expected


@pytest.mark.parametrize("free", [1e9, 40e9, 115e9])
def test_default_pages_stay_within_their_share_of_memory(free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where windows have pages for many sequences, whose number does not grow with the capacity."""
    shape, like = HeadShape(16, 8, 256), torch.zeros(1, dtype=torch.bfloat16)
    groups = [AttentionGroup(shape, 1024, tuple(range(40))), AttentionGroup(shape, None, tuple(range(8)))]
    monkeypatch.setattr(kv, "free_bytes", lambda device: int(free))
    tokens = kv.default_tokens(groups, 131072, 1024, like)
    needs = [kv.kv_bytes(groups, kv.group_pages(groups, tokens + more, 1024), like) for more in (0, PAGE)]
    assert needs[0] <= kv.KV_SHARE * free < needs[1]


@pytest.mark.parametrize("count", [0, 1, kv.FEW_CHANGES, kv.FEW_CHANGES + 1, 100])
def test_page_tables_are_updated(count: int) -> None:
    """Few updates and many, by different launches."""
    made = GraphBackend(tiny("Llama")).kv
    indices = random.Random(count).sample(range(made.tables.numel()), count)
    expected = torch.zeros_like(made.tables).view(-1)
    expected[indices] = torch.arange(1, count + 1, dtype=torch.int32)
    made.write_tables([number for pair in zip(indices, range(1, count + 1), strict=True) for number in pair])
    assert torch.equal(made.tables.view(-1), expected)
