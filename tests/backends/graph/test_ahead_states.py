"""Steps ahead of a model with recurrent states: they update a state by a token that the host has yet to commit.

What steps ahead are is tested in `test_ahead.py`, and that states are right in `test_graph_states.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from asked import ASKED, Ask, Replayed, hinted, same, steps
from marks import slow_but
from model_table_recurrent import RECURRENT_ROWS
from tiny import PROMPTS, VOCABULARY, greedy, outputs, random_tree, root, run, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.base import NO_TREE, StepInput
from lookahead.backends.graph import runner
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import PAGE
from lookahead.backends.graph.state import DeviceState
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.plain_run import PlainRun
from lookahead.engine.request import Request
from lookahead.kv.states import KeptRows

ROWS = {name: (kind, changes) for name, kind, changes in RECURRENT_ROWS}
KINDS = ("qwen3.5", "granite-mamba", "lfm2")
"""A row of each mixer: a gated delta net, Mamba-2, a short convolution."""
AUTOREGRESSIVE = LookaheadConfig.autoregressive()
SAMPLING = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
Plain = Callable[[Any, Sequence[int], int], list[int]]


def make(name: str, device: str = "cpu") -> Any:
    kind, changes = ROWS[name]
    return tiny(kind, device=device, **changes)


def finish(engine: Engine) -> None:
    while engine.running:
        engine.step()


def sequence_of(prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> DecodingSequence:
    return DecodingSequence(prompt, AUTOREGRESSIVE, rules=StopRules(count, frozenset(ends)))


@pytest.mark.parametrize("name", slow_but([*KINDS, "mamba2", "nemotron-h", "falcon-h1"], "qwen3.5", "granite-mamba"))
def test_greedy_equals_transformers(name: str, device: str, plain: Plain, ran: list[str]) -> None:
    """Alone and in a batch, whose padding takes part. There are as many steps as tokens, and most run ahead."""
    expected = [plain(make(name), prompt, 12) for prompt in PROMPTS]
    backend = GraphBackend(make(name, device))
    for size in (1, 3):
        ran.clear()
        found = run(backend, PROMPTS[:size], AUTOREGRESSIVE, 12)
        assert [sequence.output for sequence in found] == expected[:size]
        assert [sequence.stats.steps for sequence in found] == [12] * size
        assert ran[-11:] == ["step", *["ahead"] * 10]


@pytest.mark.parametrize("name", slow_but(KINDS, "granite-mamba"))
def test_sampled_text_is_that_of_steps_that_wait(
    name: str, device: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For more tokens than there are uniforms on the device."""
    backend = GraphBackend(make(name, device))
    found = outputs(backend, PROMPTS[:2], AUTOREGRESSIVE, 40, SAMPLING)
    assert ran.count("ahead") > 30
    ran.clear()
    monkeypatch.setattr(PlainRun, "_continues", lambda *given: False)
    assert outputs(backend, PROMPTS[:2], AUTOREGRESSIVE, 40, SAMPLING) == found
    assert "ahead" not in ran


@pytest.mark.parametrize("name", slow_but(KINDS, "qwen3.5"))
@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.thinned(1, most=4)
def test_asked_for_something_else(name: str, ask: Ask, device: str, ran: list[str]) -> None:
    """Results and states are those of steps without a hint, bit for bit: no token is folded twice, and none is lost."""
    backend = GraphBackend(make(name, device))
    found, after = steps(backend, ask, hint=True)
    assert (ran.count("ahead"), ran.count("step")) == (2, 5 + (ask is not same))
    expected, wanted = steps(backend, ask, hint=False)
    assert ran.count("ahead") == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.targets == theirs.targets
        assert ours.logits is None or torch.equal(ours.logits, theirs.logits)
    assert all(map(torch.equal, after, wanted))


def test_a_step_that_continues_must_be_committed(device: str) -> None:
    """Its token is in the state already, which cannot step back. A sequence that ends leaves nothing behind."""
    backend = GraphBackend(make("lfm2", device))
    with pytest.raises(RuntimeError, match="a step that continues alone was not committed, and its sequence did not"):
        steps(backend, same, hint=True, commit=False)
    expected = outputs(GraphBackend(make("lfm2", device)), PROMPTS[:2], AUTOREGRESSIVE, 8)
    for slot in list(backend.slots.by_number):
        backend.close(slot)
    assert outputs(backend, PROMPTS[:2], AUTOREGRESSIVE, 8) == expected


@pytest.mark.parametrize("name", slow_but(KINDS, "qwen3.5"))
def test_a_stop_token_in_a_batch(name: str, device: str, plain: Plain, ran: list[str]) -> None:
    """One of three ends while a step ahead runs for all of them. Another takes its state, the others continue."""
    expected = [plain(make(name), prompt, 20) for prompt in PROMPTS]
    first = expected[0]
    stop = next(token for i, token in enumerate(first) if i > 3 and token not in first[:i])
    engine = Engine(GraphBackend(make(name, device)))
    sequences = [sequence_of(prompt, 20) for prompt in PROMPTS]
    sequences[0] = sequence_of(PROMPTS[0], 20, [stop])
    for sequence in sequences[:3]:
        engine.submit(Request(sequence))
    while sequences[0].finish_reason is None:
        engine.step()
    assert ran[-1] == "ahead"
    engine.submit(Request(sequences[3]))
    finish(engine)
    assert [sequence.output for sequence in sequences] == [first[: first.index(stop) + 1], *expected[1:]]


@pytest.mark.parametrize("name", slow_but(KINDS, "lfm2"))
def test_sequences_join_leave_and_are_preempted(name: str, device: str, plain: Plain, ran: list[str]) -> None:
    """Three sequences in pages for two, a cancelled one, and others that join in the states of those that left."""
    backend = GraphBackend(make(name, device), kv_tokens=3 * PAGE, most_rows=64)
    engine, wanted = Engine(backend), dict[int, tuple[DecodingSequence, list[int]]]()

    def submit(number: int, count: int) -> int:
        sequence = sequence_of(PROMPTS[number], count)
        id = engine.submit(Request(sequence))
        wanted[id] = sequence, plain(make(name), PROMPTS[number], count)
        return id

    submit(0, 65)
    submit(2, 50)
    cancelled = submit(3, 60)
    for turn in range(60):
        engine.step()
        if turn == 20:
            engine.cancel(cancelled)
            del wanted[cancelled]
            submit(1, 62)
    finish(engine)
    assert ran.count("ahead") > 20
    assert engine.preemptions
    for sequence, expected in wanted.values():
        assert sequence.output == expected


@pytest.mark.parametrize("name", slow_but(KINDS, "qwen3.5"))
def test_between_steps_with_draft_tokens(name: str, device: str, ran: list[str]) -> None:
    """Trees, whose tokens packets replay, and plain steps, whose tokens steps ahead replay, in turn."""
    backend, times = GraphBackend(make(name, device)), tuple(1 + 0.1 * rows for rows in range(64))
    expected = outputs(backend, PROMPTS[:1], AUTOREGRESSIVE, 50)[0]
    cost = PassCost(times)
    cost.record_pass = lambda *given: None  # type: ignore[method-assign]  # a busy machine decides nothing here
    cost.plain_seconds = lambda rows: 0.95 * cost.seconds(rows)  # type: ignore[method-assign]
    config = LookaheadConfig(budget=32, window=0, step_cost=times[:32])
    prediction = [*expected[:12], *range(20, 36), *expected[28:]]
    sequence = DecodingSequence(PROMPTS[0], config, rules=StopRules(50), prediction=prediction)
    engine = Engine(backend, DraftBudget(cost))
    ran.clear()
    engine.submit(Request(sequence))
    finish(engine)
    assert sequence.output == expected
    assert "step" in ran[ran.index("ahead") :]
    assert sequence.stats.accepted_by_source


def test_a_text_begins_from_a_snapshot_while_a_step_is_ahead(device: str) -> None:
    """In the slot of a sequence that has ended, which the step ahead still updates."""
    backend, fresh = (GraphBackend(make("qwen3.5", device)) for _ in range(2))
    text = [(11 * i + i // 7) % VOCABULARY for i in range(PAGE + 9)]
    slot = backend.open(text)
    backend.step([StepInput(slot, text[:PAGE], NO_TREE, SamplingParams(), ())])
    backend.remember(slot, text[:PAGE])
    targets = hinted(backend, [slot], [text[PAGE]])
    hinted(backend, [slot], targets)
    backend.close(slot)
    slot, other = backend.open(text), fresh.open(text)
    assert (backend.length(slot), fresh.length(other)) == (PAGE, 0)
    tree = random_tree(9, 3)
    ours = backend.step([greedy(slot, text[PAGE:], tree, logits=True)])[0].logits
    theirs = fresh.step([greedy(other, text, tree, logits=True)])[0].logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_captured_steps_ahead(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is captured and not repeated. What is captured in advance, on padding, changes no state."""
    monkeypatch.setattr(runner, "new_graph_pool", lambda capture: None)
    monkeypatch.setattr(DeviceState, "captured", lambda state, work: Replayed(work))
    backend = GraphBackend(make("qwen3.5"), capture=True)
    expected = [plain(backend.model, prompt, 16) for prompt in PROMPTS[:3]]
    assert outputs(backend, PROMPTS[:3], AUTOREGRESSIVE, 16) == expected
    slot = backend.open()
    backend.step([greedy(slot, PROMPTS[0], root(3))])
    backend.commit([(slot, ())])
    memory = backend.runner.state.states
    before = [group.inputs.clone() for group in memory.groups]
    matrices = [group.recurrence.matrices.clone() for group in memory.groups]
    for step in list(backend.runner.steps.pairs.values()):
        step.forward.graph_ahead = None
        step.capture_ahead()
    assert all(map(torch.equal, before, [group.inputs for group in memory.groups]))
    assert all(map(torch.equal, matrices, [group.recurrence.matrices for group in memory.groups]))
    assert outputs(backend, PROMPTS[:3], AUTOREGRESSIVE, 16) == expected


def test_rows_that_a_step_ahead_has_replayed() -> None:
    """Its commit has nothing left to replay; others have, and so has the slot's next sequence."""
    kept = KeptRows(8)
    first = kept.take(2)
    assert kept.follow({6: first, 4: first + 1}) == 2
    kept.commit(4, first + 1, (), begins=False)
    assert kept.take_pending() == ([], [])
    kept.check_committed(4, first + 1)
    with pytest.raises(RuntimeError, match="was not committed"):
        kept.check_committed(6, first)
    kept.drop(6)
    kept.check_committed(6, first)  # a new slot has no row yet, and says 0
    row = kept.take(1)
    assert row == 4
    kept.commit(6, row, (), begins=True)
    kept.commit(4, 2, (), begins=False)
    assert kept.take_pending() == ([6, 1, 0, 1, 1, 4, 0, 1, 1, 1], [4, 2])
