"""The step ahead: it changes neither tokens nor the number of steps, whatever the host asks for next.

`ran` lists what the device ran: passes over pieces of prompts, steps, and steps ahead. It shows that steps ahead are
used: an answer of n tokens takes a step with the prompt, one step more, and n - 2 steps ahead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from asked import ASKED, TEXTS, Ask, Replayed, drawn, hinted, same, steps, trees, with_chunk, with_logits
from chains import chain
from marks import slow_but
from tiny import PROMPTS, VOCABULARY, greedy, outputs, root, run, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.base import StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph import runner
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.ops import TopTokens
from lookahead.backends.graph.state import DeviceState
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.plain_run import PlainRun
from lookahead.engine.processors import PathVerifier, Rule
from lookahead.engine.request import Request

Plain = Callable[[Any, Sequence[int], int], list[int]]

AUTOREGRESSIVE = LookaheadConfig.autoregressive()
SAMPLING = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


def sequence_of(prompt: Sequence[int], count: int = 24, config: LookaheadConfig = AUTOREGRESSIVE) -> DecodingSequence:
    return DecodingSequence(prompt, config, rules=StopRules(count))


def finish(engine: Engine) -> None:
    while engine.running:
        engine.step()


# Whole answers


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        pytest.param("Mistral", {"sliding_window": 7}, marks=pytest.mark.slow),
        pytest.param("Qwen2", {}, marks=pytest.mark.slow),
        pytest.param("Qwen3", {"head_dim": 16}, marks=pytest.mark.slow),
    ],
)
def test_greedy_equals_transformers(
    kind: str, changes: dict[str, Any], device: str, plain: Plain, ran: list[str]
) -> None:
    """Alone and in batches of two, three and four. There are as many steps as tokens."""
    model = tiny(kind, device=device, **changes)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    assert sum(output[1:] != output[:-1] for output in expected) > 2  # a token too early or too late would show
    assert len({token for output in expected for token in output}) > 10
    backend = GraphBackend(tiny(kind, device=device, **changes))
    for prompt, output in zip(PROMPTS, expected, strict=True):
        ran.clear()
        (alone,) = run(backend, [prompt], AUTOREGRESSIVE)
        assert alone.output == output
        assert alone.stats.steps == 24
        with_prompt = ["step"] if len(prompt) > 1 else []
        assert ran == [*with_prompt, "step", *["ahead"] * (23 - len(with_prompt))]
    for size in (2, 3, 4):
        ran.clear()
        together = run(backend, PROMPTS[:size], AUTOREGRESSIVE)
        assert [sequence.output for sequence in together] == expected[:size]
        assert [sequence.stats.steps for sequence in together] == [24] * size
        # After the steps that carry prompts they take one together; the other 22 are steps ahead.
        assert ran[-23:] == ["step", *["ahead"] * 22]
        assert set(ran[:-23]) == {"step"}


def test_the_hint_changes_no_step(device: str, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    backend = GraphBackend(tiny("Llama", device=device))
    found = run(backend, PROMPTS, AUTOREGRESSIVE)
    assert "ahead" in ran
    monkeypatch.setattr(PlainRun, "_continues", lambda *given: False)
    ran.clear()
    expected = run(backend, PROMPTS, AUTOREGRESSIVE)
    assert "ahead" not in ran
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output == theirs.output
        assert ours.stats.steps == theirs.stats.steps
        assert ours.stats.step_tokens == theirs.stats.step_tokens


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.thinned(1, most=1)
def test_plain_steps_run_ahead_between_steps_with_draft_tokens(
    sampling: SamplingParams, count: int, device: str, ran: list[str]
) -> None:
    """Where draft tokens have to pay for themselves, and plain steps are known to take less time ahead of the host."""
    backend, times = GraphBackend(tiny("Llama", device=device)), tuple(1 + 0.1 * rows for rows in range(64))

    def texts_of(
        config: LookaheadConfig, budget: DraftBudget | None, predictions: Sequence[Sequence[int]]
    ) -> list[DecodingSequence]:
        sequences = [
            DecodingSequence(prompt, config, sampling, StopRules(60), prediction=prediction)
            for prompt, prediction in zip(PROMPTS, predictions, strict=False)
        ]
        engine = Engine(backend, budget)
        for sequence in sequences:
            engine.submit(Request(sequence))
        finish(engine)
        return sequences

    plain = texts_of(AUTOREGRESSIVE, None, [()] * count)
    predictions = [[*sequence.output[:12], *range(20, 36), *sequence.output[28:]] for sequence in plain]
    cost = PassCost(times)
    cost.record_pass = lambda *given: None  # type: ignore[method-assign]  # a busy machine decides nothing here
    cost.plain_seconds = lambda rows: 0.95 * cost.seconds(rows)  # type: ignore[method-assign]
    ran.clear()
    config = replace(LookaheadConfig(budget=32, window=0), step_cost=times[:32])
    found = texts_of(config, DraftBudget(cost), predictions)
    assert [sequence.output for sequence in found] == [sequence.output for sequence in plain]
    assert "ahead" in ran[2:-1]
    assert "step" in ran[ran.index("ahead") :]
    assert any(sequence.stats.accepted_by_source for sequence in found)


@pytest.mark.parametrize("seed", slow_but(range(3), 0))
@pytest.mark.slow
def test_sequences_join_and_leave(seed: int, device: str, plain: Plain, ran: list[str]) -> None:
    """Up to five sequences, of several lengths. The batch is padded at times, and pages are reused."""
    rng = random.Random(seed)
    model = tiny("Llama", device=device)
    engine = Engine(GraphBackend(tiny("Llama", device=device)))
    waiting = [sequence_of(rng.choice(PROMPTS), rng.choice([5, 17, 30])) for _ in range(9)]
    everyone, sizes = list(waiting), set()
    while waiting or engine.running:
        if waiting and len(engine.running) < 5 and (not engine.running or rng.random() < 0.3):
            engine.submit(Request(waiting.pop()))
        sizes.add(len(engine.running))
        engine.step()
    assert {1, 2, 3} <= sizes
    assert ran.count("ahead") > 9
    for sequence in everyone:
        prompt = sequence.tokens[: sequence.prompt_tokens]
        assert sequence.output == plain(model, prompt, sequence.rules.max_tokens)


@pytest.mark.parametrize("end", [1, 2, 7])
@pytest.mark.thinned(1, most=1)
def test_a_stop_token_and_the_next_request(end: int, device: str, plain: Plain, ran: list[str]) -> None:
    """The step ahead was wasted. The next sequences, in the same pages, are not affected by it."""
    model = tiny("Llama", device=device)
    expected = plain(model, PROMPTS[2], 24)
    stop = expected[end - 1]
    count = expected.index(stop) + 1
    backend = GraphBackend(tiny("Llama", device=device))
    engine = Engine(backend)
    sequence = DecodingSequence(PROMPTS[2], AUTOREGRESSIVE, rules=StopRules(24, frozenset([stop])))
    engine.submit(Request(sequence))
    finish(engine)
    assert sequence.output == expected[:count]
    assert sequence.stats.steps == count
    assert ran == (["step"] if count == 1 else ["step", "step", *["ahead"] * (count - 1)])
    for prompt, config in ((PROMPTS[1], AUTOREGRESSIVE), (PROMPTS[0], LookaheadConfig(window=3, ngram=4, budget=14))):
        following = sequence_of(prompt, 24, config)
        engine.submit(Request(following))
        finish(engine)
        assert following.output == plain(model, prompt, 24)


def test_a_stop_token_in_a_batch(device: str, plain: Plain, ran: list[str]) -> None:
    """One of three ends while a step ahead runs for all of them. A new one takes its pages, the others continue."""
    model = tiny("Llama", device=device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    stop = next(token for i, token in enumerate(expected[0]) if i > 3 and token not in expected[0][:i])
    count = expected[0].index(stop) + 1
    engine = Engine(GraphBackend(tiny("Llama", device=device)))
    sequences = [sequence_of(prompt) for prompt in PROMPTS]
    sequences[0] = DecodingSequence(PROMPTS[0], AUTOREGRESSIVE, rules=StopRules(24, frozenset([stop])))
    for sequence in sequences[:3]:
        engine.submit(Request(sequence))
    while sequences[0].finish_reason is None:
        engine.step()
    assert ran[-1] == "ahead"
    engine.submit(Request(sequences[3]))
    finish(engine)
    assert [sequence.output for sequence in sequences] == [expected[0][:count], *expected[1:]]


def test_no_step_ahead_of_the_last_token(device: str, ran: list[str]) -> None:
    """Nothing runs ahead of an answer's last token, nor of the last token of a full context."""
    backend = GraphBackend(tiny("Llama", device=device))
    outputs(backend, [[7]], AUTOREGRESSIVE, 1)
    assert ran == ["step"]
    ran.clear()
    outputs(backend, [[7]], AUTOREGRESSIVE, 2)
    assert ran == ["step", "ahead"]
    small = GraphBackend(tiny("Llama", device=device, max_position_embeddings=16))
    ran.clear()
    assert len(outputs(small, [[7]], AUTOREGRESSIVE, 24)[0]) == 15
    assert ran == ["step", *["ahead"] * 14]


def test_beside_lookahead(device: str, settings: LookaheadConfig, plain: Plain, ran: list[str]) -> None:
    """While a sequence of the batch guesses, the next step is unknown. When it has left, steps run ahead."""
    model = tiny("Llama", device=device)
    engine = Engine(GraphBackend(tiny("Llama", device=device)))
    guessing = sequence_of(PROMPTS[3], 10, settings)
    others = [sequence_of(prompt, 40) for prompt in PROMPTS[:2]]
    for sequence in (*others, guessing):
        engine.submit(Request(sequence))
    while guessing.finish_reason is None:
        engine.step()
    assert "ahead" not in ran
    finish(engine)
    assert ran.count("ahead") > 20
    assert guessing.output == plain(model, PROMPTS[3], 10)
    assert [sequence.output for sequence in others] == [plain(model, prompt, 40) for prompt in PROMPTS[:2]]


def test_engines_that_step_in_turn_waste_one(device: str, plain: Plain, ran: list[str]) -> None:
    """Only the first step ahead is wasted. When one engine is done, the other runs ahead again."""
    model = tiny("Llama", device=device)
    backend, sequences, engines = GraphBackend(model), [sequence_of(PROMPTS[i], 12 + 10 * i) for i in (0, 1)], []
    for sequence in sequences:
        engines.append(Engine(backend))
        engines[-1].submit(Request(sequence, slot=backend.open()))
    while engines[0].running:
        for engine in engines:
            engine.step()
    assert ran.count("ahead") == 1
    finish(engines[1])
    assert ran.count("ahead") == 1 + 9
    assert [s.output for s in sequences] == [plain(model, PROMPTS[i], 12 + 10 * i) for i in (0, 1)]


class FakeStream:
    """A stream that writes down what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def synchronize(self) -> None:
        self.told.append(f"wait for {self.name}")

    def wait_stream(self, other: FakeStream) -> None:
        self.told.append(f"{self.name} after {other.name}")

    def record_event(self) -> FakeStream:
        self.told.append(f"mark {self.name}")
        return FakeStream(f"mark of {self.name}", self.told)


def test_the_host_waits_for_the_step_it_asked_for(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    """It waits for an event if a step ahead follows on the stream, else for the stream. The stream may change."""
    streams = [FakeStream("a", ran), FakeStream("b", ran)]
    now = [streams[0]]
    monkeypatch.setattr(runner, "stream_of", lambda device: now[0])
    backend = GraphBackend(tiny("Llama"))
    engine = Engine(backend)
    engine.submit(Request(sequence_of(PROMPTS[0], 5)))
    engine.step()
    assert ran == ["step", "wait for a"]
    ran.clear()
    engine.step()
    assert ran == ["step", "mark a", "ahead", "wait for mark of a"]
    ran.clear()
    engine.step()
    assert ran == ["mark a", "ahead", "wait for mark of a"]
    ran.clear()
    now[0] = streams[1]
    engine.step()
    assert ran == ["b after a", "mark a", "ahead", "wait for mark of a"]
    ran.clear()
    engine.step()
    assert ran == ["wait for b"]
    ran.clear()
    assert len(outputs(backend, PROMPTS[:1], LookaheadConfig(), 3)[0]) == 3
    assert set(ran) == {"step", "wait for b"}


def test_a_step_ahead_advances_every_copy_of_the_length(device: str, ran: list[str]) -> None:
    """Attention reads it from the tiles, the rest from the sequences' records: only the kernels would show it."""
    backend = GraphBackend(tiny("Llama", device=device))
    assert len(outputs(backend, PROMPTS[:1], AUTOREGRESSIVE, 7)[0]) == 7
    assert ran.count("ahead") == 5
    (step,) = (one for kind, one in backend.runner.steps.pairs.items() if kind.rows == 1)
    views = step.forward.views
    assert views["tiles_0"][0, 1] == views["sequences"][0, 1] == len(PROMPTS[0]) + 5


@pytest.mark.parametrize("count", slow_but([20, 33, 34, 80], 34))
def test_drawn_tokens(device: str, ran: list[str], count: int) -> None:
    """The device has the uniforms of the next 32 positions. Then the host sends more. The tokens are the eager
    backend's."""
    eager, backend = (kind(tiny("Llama", device=device)) for kind in (EagerBackend, GraphBackend))
    expected = outputs(eager, PROMPTS, AUTOREGRESSIVE, count, sampling=SAMPLING)
    assert outputs(backend, PROMPTS, AUTOREGRESSIVE, count, sampling=SAMPLING) == expected
    ran.clear()
    assert outputs(backend, PROMPTS[:1], AUTOREGRESSIVE, count, sampling=SAMPLING) == expected[:1]
    assert ran == ["step", *(["step", *["ahead"] * 32] * 3)[: count - 1]]


def test_not_where_tokens_are_judged(device: str, ran: list[str]) -> None:
    """The device does not know the next token then, so no step runs ahead. The tokens are the eager backend's."""
    eager, backend = (kind(tiny("Llama", device=device)) for kind in (EagerBackend, GraphBackend))
    sequence = sequence_of(PROMPTS[0])
    engine = Engine(backend)
    engine.submit(Request(sequence, PathVerifier([sequence], torch.tensor([PROMPTS[0]], device=device), Rule())))
    finish(engine)
    assert [sequence.output] == outputs(eager, PROMPTS[:1], AUTOREGRESSIVE)
    assert "ahead" not in ran


@pytest.mark.parametrize("length", slow_but([1, 62, 63, 64, 65], 63, 64))
@pytest.mark.thinned(1, most=1)
def test_a_step_ahead_takes_pages(length: int, device: str, plain: Plain, ran: list[str]) -> None:
    """The device is told of a new page before the step ahead that writes to it. No step waits for the host there."""
    model = tiny("Llama", device=device)
    backend = GraphBackend(tiny("Llama", device=device))
    prompt = random.Random(length).choices(range(VOCABULARY), k=length)
    assert outputs(backend, [prompt], AUTOREGRESSIVE, 70) == [plain(model, prompt, 70)]
    assert ran == [*["step"] * (1 + (length > 1)), *["ahead"] * (69 - (length > 1))]


def test_no_step_ahead_without_a_page(device: str, plain: Plain, ran: list[str]) -> None:
    """Another sequence has the last page. When it has left, a step takes the page, and steps run ahead again."""
    model = tiny("Llama", device=device)
    backend = GraphBackend(tiny("Llama", device=device), kv_tokens=192)
    other = backend.open()
    assert backend.reserve(other, 128)
    slot, tokens, expected = backend.open(), [5], plain(model, [5], 70)
    found = list[int]()
    for _ in range(63):
        tokens = hinted(backend, [slot], tokens)
        found += tokens
    assert ran == ["step", *["ahead"] * 63]
    ran.clear()
    tokens = hinted(backend, [slot], tokens)  # its last token's place is the page's last: it ran ahead already
    found += tokens
    assert ran == []
    with pytest.raises(MemoryError):
        hinted(backend, [slot], tokens)
    backend.close(other)
    for _ in range(6):
        tokens = hinted(backend, [slot], tokens)
        found += tokens
    assert ran == ["step", *["ahead"] * 6]
    assert found == expected


def test_a_new_sequence_while_a_step_is_ahead(device: str, plain: Plain, ran: list[str]) -> None:
    """Its prompt runs instead of the step ahead. Nothing is captured anew, and no K/V is copied."""
    model = tiny("Llama", device=device)
    backend = GraphBackend(tiny("Llama", device=device))
    engine, cache = Engine(backend), backend.kv.caches[0]
    sequences = [sequence_of(prompt, 40) for prompt in PROMPTS]
    for sequence in sequences:
        assert ran[-1:] in ([], ["ahead"])
        engine.submit(Request(sequence))
        for _ in range(5):
            engine.step()
    finish(engine)
    assert backend.kv.caches[0] is cache
    assert [sequence.output for sequence in sequences] == [plain(model, prompt, 40) for prompt in PROMPTS]


def test_pages_of_a_wasted_step_ahead(device: str, plain: Plain, ran: list[str]) -> None:
    """It wrote to a page that another sequence has by now; that one writes later, and is not disturbed."""
    model = tiny("Llama", device=device)
    backend = GraphBackend(tiny("Llama", device=device), kv_tokens=192)
    slot, tokens = backend.open(), [5]
    for _ in range(3):
        tokens = hinted(backend, [slot], tokens)
    assert ran[-1] == "ahead"
    pages = list(backend.slots[slot].tables[0].pages)
    backend.close(slot)
    following = sequence_of(PROMPTS[2], 40)
    engine = Engine(backend)
    engine.submit(Request(following))
    engine.step()
    assert backend.slots[slot + 1].tables[0].pages[0] == pages[0]
    finish(engine)
    assert following.output == plain(model, PROMPTS[2], 40)


def test_room_is_made_while_a_step_is_ahead(device: str, plain: Plain, ran: list[str]) -> None:
    """It runs on pages that are gone then. The next sequence has other ones, and other captured steps."""
    model = tiny("Llama", device=device)
    backend = GraphBackend(tiny("Llama", device=device), kv_tokens=192)
    slot, tokens = backend.open(), [5]
    for _ in range(3):
        tokens = hinted(backend, [slot], tokens)
    backend.close(slot)
    backend.check_room(2, 200)
    ran.clear()
    assert outputs(backend, [[5]], AUTOREGRESSIVE, 24) == [plain(model, [5], 24)]
    assert ran == ["step", *["ahead"] * 23]


def test_padding_without_a_best_token(device: str, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's padding takes part in steps ahead. In half precision it may overflow, and then has no valid target."""
    fill = TopTokens.fill

    def overflow(top: TopTokens, logits: torch.Tensor) -> None:
        fill(top, logits)
        top.out[3:, 0] = 2**31 - 1

    monkeypatch.setattr(TopTokens, "fill", overflow)
    model = tiny("Llama", device=device)
    backend = GraphBackend(tiny("Llama", device=device))
    assert outputs(backend, PROMPTS[:3], AUTOREGRESSIVE) == [plain(model, prompt, 24) for prompt in PROMPTS[:3]]


def test_the_first_step_ahead_is_captured_and_not_repeated(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeating a step ahead would go one token further."""
    monkeypatch.setattr(runner, "new_graph_pool", lambda capture: None)
    monkeypatch.setattr(DeviceState, "captured", lambda state, work: Replayed(work))
    backend = GraphBackend(tiny("Llama"), capture=True)
    assert outputs(backend, PROMPTS[:3], AUTOREGRESSIVE) == [plain(backend.model, prompt, 24) for prompt in PROMPTS[:3]]
    assert outputs(backend, PROMPTS[:1], AUTOREGRESSIVE) == [plain(backend.model, PROMPTS[0], 24)]
    assert {
        kind.rows for kind, captured in backend.runner.steps.pairs.items() if captured.forward.graph_ahead is not None
    } == {1, 4}


def test_a_step_ahead_is_captured_without_a_trace() -> None:
    """After real steps as well: what is captured then must not write to the pages of any sequence."""
    backend = GraphBackend(tiny("Llama"))
    slot = backend.open()
    backend.step([StepInput(slot, [5, 6, 7], chain([8], 1), SamplingParams(), ())])
    backend.commit([(slot, ())])
    backend.step([StepInput(slot, (), chain([9], 1), SamplingParams(), ())])
    backend.commit([(slot, ())])
    backend.step([StepInput(slot, (), chain([1, 2, 3, 4], 4), SamplingParams(), ())])
    backend.commit([(slot, (1, 2, 3))])
    before = [part.clone() for layer in backend.cached(slot) for part in layer]
    for step in list(backend.runner.steps.pairs.values()):
        step.capture_ahead()
    assert all(map(torch.equal, before, [part for layer in backend.cached(slot) for part in layer]))


# Whatever the host asks for next


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.thinned(1, most=2)
def test_asked_for_something_else(ask: Ask, commit: bool, device: str, ran: list[str]) -> None:
    """Results and K/V are those of steps without a hint, bit for bit. Without a commit, slots are a token shorter."""
    backend = GraphBackend(tiny("Llama", device=device))
    found, after = steps(backend, ask, hint=True, commit=commit)
    taken = ask is same and commit
    assert (ran.count("ahead"), ran.count("step")) == (2, 5 + (not taken))
    expected, wanted = steps(backend, ask, hint=False, commit=commit)
    assert ran.count("ahead") == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.targets == theirs.targets
        assert [list(map(int, row)) for row in ours.top] == [list(map(int, row)) for row in theirs.top]
        assert (ours.logits is None) == (theirs.logits is None)
        assert ours.logits is None or torch.equal(ours.logits, theirs.logits)
    assert all(map(torch.equal, after, wanted))


@pytest.mark.parametrize("ask", [with_logits, drawn, trees, with_chunk])
@pytest.mark.thinned(1, most=2)
def test_a_hint_that_is_not_followed(ask: Ask, device: str, ran: list[str]) -> None:
    """No step may run ahead of these inputs: their next token is unknown, or the results would be overwritten."""
    backend = GraphBackend(tiny("Llama", device=device))

    def hinting(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
        items = ask(slots, tokens)
        for item in items:
            item.continues_alone = True
        return items

    found, expected = (steps(backend, one, hint=False) for one in (hinting, ask))
    assert [result.targets for result in found[0]] == [result.targets for result in expected[0]]
    assert all(map(torch.equal, found[1], expected[1]))
    assert "ahead" not in ran


def cache_of(model: Any, tokens: Sequence[int], device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with torch.inference_mode():
        cache = model(torch.tensor([tokens], device=device), use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def test_kv_is_adopted_beside_padding(device: str) -> None:
    """Three sequences run, padded to four rows. The padding writes to no page that a fourth one adopts K/V into."""
    model = tiny("Llama", device=device)
    backend, eager = GraphBackend(model), EagerBackend(tiny("Llama", device=device))
    slots, tokens = [backend.open() for _ in range(3)], [5, 6, 7]
    for _ in range(3):
        tokens = hinted(backend, slots, tokens)
    layers = cache_of(eager.model, PROMPTS[2], device)
    fourth = {one: one.open() for one in (backend, eager)}
    tokens = hinted(backend, slots, tokens)
    for one, slot in fourth.items():
        one.adopt(slot, len(PROMPTS[2]), layers)
    for _ in range(3):
        tokens = hinted(backend, slots, tokens)
    ours, theirs = (one.step([greedy(slot, (), root(4), logits=True)])[0].logits for one, slot in fourth.items())
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_kv_is_adopted_into_a_slot_with_a_step_ahead(device: str) -> None:
    """The slot gets as many tokens as it had, but others. The step ahead has read the old ones and is useless."""
    backend, eager = (kind(tiny("Llama", device=device)) for kind in (GraphBackend, EagerBackend))
    slot, tokens = backend.open(), [5]
    for _ in range(6):
        tokens = hinted(backend, [slot], tokens)
    other = eager.open()
    layers = cache_of(eager.model, TEXTS[1], device)
    backend.adopt(slot, 6, layers)
    eager.adopt(other, 6, layers)
    ours, theirs = (one.step(same([own], tokens))[0] for one, own in ((backend, slot), (eager, other)))
    assert [int(token) for token in ours.top[0][:8]] == [int(token) for token in theirs.top[0][:8]]


def test_the_cache_is_whole_with_a_step_ahead(device: str, plain: Plain) -> None:
    """The cache is read when a sequence leaves: stopped by a token or cancelled, alone or beside another one."""
    model = tiny("Llama", device=device)
    expected = plain(model, PROMPTS[0], 24)
    kept: dict[DecodingSequence, Any] = {}
    backend = GraphBackend(tiny("Llama", device=device))
    engine = Engine(backend)

    def keep(request: Request) -> None:
        kept[request.sequence] = backend.cached(request.slot)

    stopped = DecodingSequence(PROMPTS[0], AUTOREGRESSIVE, rules=StopRules(24, frozenset(expected[5:6])))
    removed = sequence_of(PROMPTS[3])
    requests = [Request(sequence, finished=keep) for sequence in (stopped, removed)]
    for request in requests:
        engine.submit(request)
    while stopped.finish_reason is None:
        engine.step()
    for _ in range(3):
        engine.step()
    keep(requests[1])
    engine.cancel(requests[1].id)
    for sequence, layers in kept.items():
        wanted = cache_of(model, sequence.tokens[:-1], device)
        for ours, theirs in zip(layers, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert len(kept) == 2
