"""A text depends on its request alone: random crowds in little memory, each text token for token as in its own run."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from grammar import Alternating
from marks import slow_but
from paged import PagedToy
from toys import VOCABULARY, ToyBackend

from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.base import NO_LIMIT
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Event, Request

CONFIGS = (
    LookaheadConfig.autoregressive(),
    LookaheadConfig(window=0, guesses=4, budget=6, sources=("prompt", "suffix")),
    LookaheadConfig(window=3, ngram=3, guesses=3, budget=16),
    without_cost(LookaheadConfig(window=2, ngram=4, guesses=4, budget=20)),
    LookaheadConfig.jacobi(4),
)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(0.8, seed=3),
    SamplingParams(1.2, top_k=9, seed=8),
    SamplingParams(repetition_penalty=1.4, logprobs=0),
    SamplingParams(0.9, seed=4, presence_penalty=0.8, frequency_penalty=0.3, logit_bias={7: 3.0, 2: -float("inf")}),
    SamplingParams(1.1, seed=5, frequency_penalty=-0.2, logprobs=3),
)
MIN_TOKENS = (0, 3, 0, 9, 0, 4)
"""The fewest tokens of a request with the sampling of this number."""
Asked = tuple[tuple[int, ...], int, int, int]
"""A prompt, the most tokens, and the numbers of a config and of a sampling."""


MASKED = (False, False, False, True, False, True)
"""Whether a request with the sampling of this number has a mask."""


def sequence_of(asked: Asked, memory: SharedMemory | None = None) -> DecodingSequence:
    prompt, tokens, config, sampling = asked
    rules = StopRules(tokens, frozenset([7]), min_tokens=min(tokens, MIN_TOKENS[sampling]))
    return DecodingSequence(list(prompt), CONFIGS[config], SAMPLINGS[sampling], rules, memory=memory)


def request_of(asked: Asked, memory: SharedMemory | None = None, salt: str = "") -> Request:
    mask = Alternating(VOCABULARY) if MASKED[asked[3]] else None
    return Request(sequence_of(asked, memory), mask=mask, salt=salt)


@cache
def alone(prompt: tuple[int, ...], tokens: int, sampling: int) -> tuple[list[int], str | None]:
    """The text of the plainest run: alone, autoregressive, in a backend without pages."""
    request, engine = request_of((prompt, tokens, 0, sampling)), Engine(ToyBackend())
    engine.submit(request)
    while engine.running:
        engine.step()
    return request.sequence.output, request.sequence.finish_reason


class Crowd:
    """A seeded workload: requests that join at random, some of which are cancelled.

    Every other one begins a step before anybody hears of the last one, and cancels requests of steps that run.
    """

    def __init__(self, seed: int, most: int) -> None:
        self.rng = rng = random.Random(seed)
        self.begins_early = seed % 2 == 1
        self.backend = PagedToy(rng.choice((16, 18, 22)), 4, rng.choice((8, 17, 32, 64)))
        self.engine = Engine(
            self.backend, max_sequences=rng.choice((2, 8, 64)), max_mixed_rows=rng.choice((1, 12, 512))
        )
        self.memory = SharedMemory() if rng.random() < 0.5 else None
        stems = [tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 13))) for _ in range(3)]
        self.asked: list[Asked] = []
        for _ in range(rng.randrange(1, most)):
            end = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(0, 6)))
            prompt = (rng.choice(stems) + end)[:16]
            self.asked.append((prompt, rng.randrange(1, 25), rng.randrange(len(CONFIGS)), rng.randrange(6)))

    def run(self) -> list[tuple[list[int], str | None]]:
        rng, engine, backend = self.rng, self.engine, self.backend
        to_come = list(self.asked)
        requests: list[Request] = []
        told: dict[int, list[int]] = {}
        while to_come or engine.running:
            while to_come and rng.random() < 0.6:
                requests.append(request_of(to_come.pop(0), self.memory, rng.choice(("", "", "b"))))
                told[engine.submit(requests[-1])] = []
            if engine.running and rng.random() < 0.03:
                engine.cancel(rng.choice(engine.running))
            for event in self.step():
                assert event.error is None
                assert 0 <= event.accepted <= event.tried
                assert not event.tried or event.request.sequence.config.sources
                told[event.request.id] += event.tokens
                count = event.request.sequence.sampling.logprobs
                expected = None if count is None else [count] * len(event.tokens)
                assert (event.logprobs and [len(item.top) for item in event.logprobs]) == expected
        assert backend.slots == backend.tables == {}
        assert backend.pool.used == 0
        assert backend.pool.free + backend.pool.evictable == backend.pool.pages
        for request in requests:
            assert told[request.id] == request.sequence.output
        return [(request.sequence.output, request.sequence.finish_reason) for request in requests]

    def step(self) -> list[Event]:
        if not self.begins_early:
            return self.engine.step()
        finished = self.engine.finish()
        self.engine.begin()
        return finished.events()


FEW = range(1, 7)


MANY = [range(21 * part, 21 * part + 20) for part in range(10)]


@pytest.mark.parametrize("seeds", slow_but([FEW, *MANY], FEW), ids=str)
def test_a_text_depends_on_its_request_alone(seeds: range) -> None:
    hits = preemptions = whole = 0
    for seed in seeds:
        crowd = Crowd(seed, most=64 if seed % 10 == 0 else 16)
        for (prompt, tokens, _, sampling), (output, reason) in zip(crowd.asked, crowd.run(), strict=True):
            expected = alone(prompt, tokens, sampling)
            if reason is None:  # cancelled
                assert output == expected[0][: len(output)]
            else:
                assert (output, reason) == expected
                whole += 1
        hits += crowd.backend.pool.hit_tokens
        preemptions += crowd.engine.preemptions
    assert hits > 2.5 * len(seeds)
    assert preemptions > len(seeds) // 4
    assert whole > 2.5 * len(seeds)


def test_the_same_crowd_gives_the_same_texts_five_times() -> None:
    assert len({repr(Crowd(11, most=40).run()) for _ in range(5)}) == 1


def test_a_long_prompt_stops_nobody() -> None:
    """While it runs in pieces, every decoding request gets a token in every pass."""
    backend = PagedToy(pages=400, most_rows=16)
    engine = Engine(backend)
    early = [request_of(((3, i, 5, i), 60, i % len(CONFIGS), i % 3)) for i in range(4)]
    for request in early:
        request.sequence.rules = StopRules(60)
        engine.submit(request)
    while not all(request.sequence.output for request in early):
        engine.step()
    long = request_of((tuple(i % VOCABULARY for i in range(300)), 4, 2, 0))
    engine.submit(long)
    passes = len(backend.passes)
    while not long.sequence.output:
        running = {request.id for request in early if request.id in engine.running}
        assert running <= {event.request.id for event in engine.step()}
    pieces = [chunk for one in backend.passes[passes:] for slot, chunk, _ in one if slot == long.slot]
    assert sum(pieces) == 299
    assert min(pieces[:-1]) >= 8  # half of the rows are the prompt's, whatever the others guess
    while engine.running:
        engine.step()
    assert (long.sequence.output, "length") == alone(tuple(i % VOCABULARY for i in range(300)), 4, 0)


def test_passes_with_prompts_and_decoding_requests_are_bounded() -> None:
    """Alone, a prompt has all the rows. Beside others, a pass stays small, and has twice as many rows as requests."""

    def request(tokens: int) -> Request:
        return Request(DecodingSequence([1 + i % 5 for i in range(tokens)], CONFIGS[0], rules=StopRules(30)))

    def rows(one: list[tuple[int, int, int]]) -> int:
        return sum(chunk + nodes for _, chunk, nodes in one)

    backend = PagedToy(pages=400, most_rows=64)
    engine = Engine(backend, max_mixed_rows=10)
    engine.submit(request(60))
    engine.step()
    assert rows(backend.passes[-1]) == 60
    engine.submit(request(80))
    engine.step()
    assert rows(backend.passes[-1]) == 10
    for _ in range(9):
        engine.submit(request(3))
        for _ in range(9):
            engine.step()
    engine.submit(request(80))
    engine.step()
    assert rows(backend.passes[-1]) >= 2 * len(backend.passes[-1]) - 2
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"max_mixed_rows={bad} must be at least 1"):
            Engine(backend, max_mixed_rows=bad)


def test_several_prompts_share_a_pass() -> None:
    backend = PagedToy(pages=200, most_rows=64)
    engine = Engine(backend)
    sequences = [sequence_of((tuple(range(i, i + 9)), 5, 2, 0)) for i in range(5)]
    for sequence in sequences:
        engine.submit(Request(sequence))
    assert len(engine.step()) == 5
    assert [chunk for _, chunk, _ in backend.passes[0]] == [8] * 5
    engine.step()
    assert len(backend.passes) == 2


def test_a_put_back_text_is_read_again_and_goes_on() -> None:
    backend = PagedToy(pages=8, page_size=4, most_rows=16)
    engine = Engine(backend)
    asked = [((i, 1, 2, i), 14, 0, i) for i in range(3)]
    requests = [request_of(one) for one in asked]
    sequences = [request.sequence for request in requests]
    for request in requests:
        engine.submit(request)
    while engine.running:
        engine.step()
    assert engine.preemptions
    assert [(s.output, s.finish_reason) for s in sequences] == [alone(p, n, sampling) for p, n, _, sampling in asked]
    assert sequences[2].stats.queue_seconds > 0


def test_a_request_without_room_is_tried_again_only_when_that_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, opened = PagedToy(pages=8, page_size=4, most_rows=16), list[int]()
    engine, open_slot = Engine(backend), backend.open
    monkeypatch.setattr(backend, "open", lambda *args: opened.append(1) or open_slot(*args))
    asked = [(tuple(range(20)), 6, 0, 0), (tuple(range(30, 50)), 6, 0, 0)]
    requests = [request_of(one) for one in asked]
    for request in requests:
        engine.submit(request)
    tries = list[int]()
    while engine.running:
        engine.step()
        tries.append(len(opened))
    assert not engine.preemptions
    assert tries[0] == 2  # the first was admitted, and the second found no room
    assert tries[4] <= 3  # what the first has cached after its prompt might have helped
    assert tries[-1] <= 4
    texts = [request.sequence.output for request in requests]
    assert texts == [alone(p, n, sampling)[0] for p, n, _, sampling in asked]


def test_a_request_that_can_never_run_is_refused() -> None:
    engine = Engine(PagedToy(pages=8, page_size=4))
    with pytest.raises(ValueError, match=r"need K/V for 46 tokens, and the backend has room for 32; lower max_tokens"):
        engine.submit(Request(sequence_of(((1, 2, 3, 4, 5, 6), 24, 2, 0))))
    assert engine.running == []


@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 9])
def test_padded_passes_have_prompt_chunks(chunk: int) -> None:
    """All of a prompt runs in one step, but no pass has more of it than the backend says."""
    asked = [(tuple(range(i, i + 9)), 5, 0, 0) for i in range(3)]
    texts = list[list[int]]()
    for pads in (False, True):
        backend = PagedToy(pages=200, most_rows=NO_LIMIT if pads else 64, pads=pads)
        backend.capabilities = replace(backend.capabilities, prompt_chunk=chunk if pads else None)
        engine, sequences = Engine(backend), [sequence_of(one) for one in asked]
        for sequence in sequences:
            engine.submit(Request(sequence))
        engine.step()
        if pads:
            assert [chunk_rows for ((_, chunk_rows, _),) in backend.passes] == [*[chunk] * (8 // chunk), 8 % chunk][
                : -(-8 // chunk)
            ] * 3
            assert [nodes > 0 for ((_, _, nodes),) in backend.passes] == [*[False] * (-(-8 // chunk) - 1), True] * 3
        while engine.running:
            engine.step()
        texts.append([token for sequence in sequences for token in sequence.output])
    assert texts[0] == texts[1]


def test_prompts_run_alone_where_passes_are_padded() -> None:
    backend = PagedToy(pages=200, most_rows=NO_LIMIT, pads=True)
    engine = Engine(backend)
    for i in range(3):
        engine.submit(Request(sequence_of((tuple(range(i, i + 9)), 5, 0, 0))))
    engine.step()
    assert [len(one) for one in backend.passes] == [1, 1, 1]
    engine.step()
    assert [len(one) for one in backend.passes[3:]] == [3]
