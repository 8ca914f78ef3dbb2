"""The engine: requests by id, their events, their failures, and who pays for a logits processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from paged import PagedToy
from toys import ToyBackend

from lookahead.algorithm.draft import Draft
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.base import StepInput
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.processors import PathVerifier, Rule
from lookahead.engine.request import Request, raise_errors

CONFIG = LookaheadConfig(window=3, ngram=4, guesses=4, budget=40)
PROMPTS = ([5, 9, 5, 9, 5, 3], [7], [1, 2, 3, 1, 2, 3, 1])


def sequence_of(prompt: list[int], tokens: int = 12) -> DecodingSequence:
    return DecodingSequence(prompt, CONFIG, rules=StopRules(tokens))


def finish(engine: Engine) -> None:
    while engine.running:
        engine.step()


def alone(prompt: list[int], tokens: int = 12) -> list[int]:
    engine, sequence = Engine(ToyBackend()), sequence_of(prompt, tokens)
    engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    return sequence.output


def test_events_carry_every_accepted_token_and_the_end() -> None:
    engine = Engine(ToyBackend())
    requests = [Request(sequence_of(prompt, 8 + i)) for i, prompt in enumerate(PROMPTS)]
    ids = [engine.submit(request) for request in requests]
    assert engine.running == ids == [request.id for request in requests]
    told: dict[int, list[int]] = {id: [] for id in ids}
    ends: dict[int, str] = {}
    while engine.running:
        for event in engine.step():
            assert event.tokens
            assert event.request.id not in ends
            told[event.request.id] += event.tokens
            if event.finish_reason is not None:
                ends[event.request.id] = event.finish_reason
    assert [told[id] for id in ids] == [alone(prompt, 8 + i) for i, prompt in enumerate(PROMPTS)]
    assert set(ends.values()) == {"length"}
    for request in requests:
        stats = request.sequence.stats
        assert 0 < stats.first_token_seconds <= stats.seconds


def test_the_drafter_hears_that_a_choice_follows() -> None:
    """Its threads take a while to wake."""
    heard = list[str]()

    class Listening(PythonDrafter):
        def prepare_search(self) -> None:
            heard.append("more to come")

        def draft_trees(self, drafts: Sequence[Draft], *more: Any) -> Any:
            heard.append(f"{len(drafts)} chosen")
            return super().draft_trees(drafts, *more)

    engine, memory = Engine(PagedToy()), SharedMemory(Listening())
    for prompt in PROMPTS:
        engine.submit(Request(DecodingSequence(prompt, CONFIG, rules=StopRules(30), memory=memory)))
    for _ in range(3):
        engine.step()
    assert heard == ["3 chosen", "more to come"] * 3


def test_only_a_request_that_asks_is_told_of_its_steps() -> None:
    engine = Engine(ToyBackend())
    asking, other = (Request(sequence_of(PROMPTS[0], 20)) for _ in range(2))
    asking.reports_steps, asking.trees = True, 3
    engine.submit(asking)
    engine.submit(other)
    told, untold = [], []
    while engine.running:
        for event in engine.step():
            (told if event.request is asking else untold).append(event)
    assert asking.sequence.output == other.sequence.output
    assert all(event.tree is None and not event.sources and not event.seconds for event in untold)
    assert [event.tree is not None for event in told] == [number < 3 for number in range(len(told))]
    assert [len(event.sources) for event in told] == [len(event.path) for event in told]
    counted = asking.sequence.stats.accepted_by_source
    named = [source for event in told for source in event.sources]
    assert {source: named.count(source) for source in set(named)} == counted
    assert told[-1].seconds == asking.sequence.stats.seconds > 0
    for event in told[:3]:
        assert event.tree is not None
        assert [event.tree.tokens[node] for node in event.path] == event.tokens[: len(event.path)]


def test_the_engine_lives_on_and_ids_are_never_used_twice() -> None:
    backend = ToyBackend()
    engine = Engine(backend)
    seen = set()
    for prompt in (*PROMPTS, *PROMPTS):
        sequence = sequence_of(prompt)
        id = engine.submit(Request(sequence))
        assert id not in seen
        seen.add(id)
        while engine.running:
            engine.step()
        assert sequence.output == alone(prompt)
    assert backend.slots == {}


def test_a_cancelled_request_leaves_and_the_others_do_not_notice() -> None:
    backend = ToyBackend()
    engine, sequences = Engine(backend), [sequence_of(prompt) for prompt in PROMPTS]
    told: list[int] = []
    ids = [engine.submit(Request(sequence, finished=lambda r: told.append(r.id))) for sequence in sequences]
    engine.step()
    engine.cancel(ids[1])
    engine.cancel(ids[1])
    kept = list(sequences[1].output)
    assert engine.running == [ids[0], ids[2]]
    while engine.running:
        assert {event.request.id for event in engine.step()} <= {ids[0], ids[2]}
    assert sequences[1].output == kept
    assert (sequences[0].output, sequences[2].output) == (alone(PROMPTS[0]), alone(PROMPTS[2]))
    assert sorted(told) == [ids[0], ids[2]]
    assert backend.slots == {}


class Watched(ToyBackend):
    """Notes for which slots logits were asked, and gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, set[bool]] = {}

    def launch(self, inputs: Any) -> Any:
        for item in inputs:
            self.asked.setdefault(item.slot, set()).add(item.logits)
        return super().launch(inputs)

    def _read(self, item: StepInput) -> Any:
        output = super()._read(item)
        output.logits = self.logits_of(item)
        return output


@pytest.mark.parametrize("processed", [0, 1, 2])
def test_one_request_with_a_processor_puts_no_other_on_the_slow_path(processed: int) -> None:
    backend = Watched()
    engine, sequences = Engine(backend), [sequence_of(prompt) for prompt in PROMPTS]
    requests = [Request(sequence) for sequence in sequences]
    prompt = PROMPTS[processed]
    forbidden = alone(prompt)[0]
    rule = Rule(processors=lambda ids, scores: scores.index_fill(1, torch.tensor([forbidden]), -torch.inf))
    requests[processed].verifier = PathVerifier([sequences[processed]], torch.tensor([prompt]), rule)
    for request in requests:
        engine.submit(request)
    while engine.running:
        engine.step()
    assert forbidden not in sequences[processed].output
    for place, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
        assert backend.asked[request.slot] == {place == processed}
        assert place == processed or sequence.output == alone(PROMPTS[place])


class PagedWithLogits(PagedToy):
    def _read(self, item: StepInput) -> Any:
        output = super()._read(item)
        output.logits = self.logits_of(item)
        return output


def move_together(backend: ToyBackend) -> list[list[int]]:
    """Two sequences that share a verifier, so that every step gives both the same number of tokens."""
    prompts = [[4, 4, 1], [int(i) for i in range(20)]]
    sequences = [sequence_of(prompt) for prompt in prompts]
    padded = torch.tensor([[0] * (20 - len(prompt)) + prompt for prompt in prompts])
    forbidden = torch.tensor([3, 5])
    rule = Rule(processors=lambda ids, scores: scores.index_fill(1, forbidden, -torch.inf), pad=0)
    verifier, engine = PathVerifier(sequences, padded, rule), Engine(backend)
    for sequence in sequences:
        engine.submit(Request(sequence, verifier, slot=backend.open()))
    engine.submit(Request(sequence_of([9, 9])))  # a neighbour who need not wait
    while engine.running:
        engine.step()
        assert len({len(sequence.output) for sequence in sequences}) == 1
    return [sequence.output for sequence in sequences]


def test_entries_that_move_together_wait_for_the_longest_prompt() -> None:
    expected = move_together(Watched())
    for rows in (4, 9, 30):
        assert move_together(PagedWithLogits(pages=100, most_rows=rows)) == expected


def test_requests_with_their_own_slots_are_not_put_back() -> None:
    backend = PagedToy(pages=6, page_size=4)
    engine = Engine(backend)
    plain = LookaheadConfig.autoregressive()
    sequences = [DecodingSequence([i, 2, 3], plain, rules=StopRules(14)) for i in range(2)]
    for sequence in sequences:
        engine.submit(Request(sequence, slot=backend.open()))
    with pytest.raises(MemoryError, match="no room for the K/V of 2 sequences"):
        finish(engine)
    engine.abort()
    assert engine.running == []
    assert backend.pool.used == 0
    assert engine.step() == []


def test_a_failed_request_leaves_and_says_why() -> None:
    def fails(token: int) -> bool:
        raise ZeroDivisionError("no stop rule")

    backend = ToyBackend()
    engine, sequences = Engine(backend), [sequence_of(prompt) for prompt in PROMPTS]
    sequences[1].ends = fails
    ids = [engine.submit(Request(sequence)) for sequence in sequences]
    events = {event.request.id: event for event in engine.step()}
    assert events[ids[1]].finish_reason == "error"
    assert isinstance(events[ids[1]].error, ZeroDivisionError)
    assert engine.running == [ids[0], ids[2]]
    with pytest.raises(ZeroDivisionError, match="no stop rule"):
        raise_errors(list(events.values()))
    while engine.running:
        assert not any(event.error for event in engine.step())
    assert [sequences[place].output for place in (0, 2)] == [alone(PROMPTS[place]) for place in (0, 2)]
    assert backend.slots == {}


def test_at_most_so_many_run_at_once_in_their_order() -> None:
    backend = PagedToy(pages=400, most_rows=64)
    engine, order = Engine(backend, max_sequences=2), list[int]()
    ids = [engine.submit(Request(sequence_of([i, 5], 4), finished=lambda r: order.append(r.id))) for i in range(6)]
    assert engine.waiting == 6
    while engine.running:
        engine.step()
        assert len(backend.slots) <= 2
    assert sorted(order) == ids
    assert max(map(len, backend.passes)) == 2
    with pytest.raises(ValueError, match="max_sequences=0"):
        Engine(backend, max_sequences=0)
