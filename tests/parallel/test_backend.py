"""Decoding on R ranks gives the tokens and the steps of one: ranks here are threads, which exchange through a list."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from cases import backend_of, config_of, random_cases
from paged import PagedToy
from tiny import PROMPTS, tiny
from tiny import run as run_batch
from toys import VOCABULARY, ToyBackend, decode, on_ranks

from lookahead import LookaheadConfig
from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.failures import DeviceMemoryError
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.parallel.backend import ParallelBackend
from lookahead.parallel.results import HEADER, ROWS
from lookahead.parallel.watchdog import RankError


def summary(sequences: list[Any]) -> list[Any]:
    """What must not depend on the number of ranks."""
    return [
        (s.output, s.finish_reason, s.stats.steps, s.stats.step_tokens, s.stats.accepted_by_depth,
         s.stats.accepted_by_source)
        for s in sequences
    ]  # fmt: skip


def random_request(seed: int) -> tuple[list[list[int]], LookaheadConfig, SamplingParams]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))] for _ in range(rng.choice([1, 2, 3]))]
    window, ngram = rng.choice([0, 1, 3, 6]), rng.randint(2, 5)
    budget = max(1, window * (ngram - 1)) + rng.randint(0, 60)
    sampling = SamplingParams(rng.choice([0.0, 0.3]), top_k=rng.choice([0, 5]), seed=seed)
    return prompts, LookaheadConfig(window, ngram, rng.randint(0, 8), budget), sampling


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.thinned(1, most=1)
def test_any_number_of_ranks(ranks: int, seed: int) -> None:
    request = random_request(10 * seed + ranks)
    expected = summary(decode(ToyBackend(), *request))
    for found in on_ranks(ranks, lambda group: summary(decode(ParallelBackend(ToyBackend(), group), *request))):
        assert found == expected


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("number", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
@pytest.mark.thinned(1, most=1)
def test_a_models_tokens(ranks: int, number: int) -> None:
    """A tiny Llama on either backend: K/V of what another rank computed must be made up for, at the right places."""
    case = random_cases(3, 8)[number]
    model = tiny("Llama")
    backends = [backend_of(case, model) for _ in range(ranks)]
    request = ([PROMPTS[i] for i in case["prompts"]], config_of(case), 24, SamplingParams(**case["sampling"]))
    expected = summary(run_batch(backend_of(case, model), *request))
    assert any(case["config"].values())
    found = on_ranks(ranks, lambda group: summary(run_batch(ParallelBackend(backends[group.rank], group), *request)))
    assert found == [expected] * ranks


def test_a_rank_that_forgets_what_it_lacks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: without the accepted tokens of other ranks the text is another."""
    request = random_request(2)
    expected = summary(decode(ToyBackend(), *request))
    own = ParallelBackend._own

    def forgetful(self: ParallelBackend, step_input: StepInput, share: Any) -> StepInput:
        part = own(self, step_input, share)
        part.chunk = step_input.chunk
        return part

    monkeypatch.setattr(ParallelBackend, "_own", forgetful)
    found = on_ranks(3, lambda group: summary(decode(ParallelBackend(ToyBackend(), group), *request)))
    assert found != [expected] * 3


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.thinned(1, most=1)
def test_penalties_and_biases_on_ranks(ranks: int) -> None:
    """Each rank counts the whole text, and the tokens above its own nodes."""
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(
            temperature, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={3: 1.5, 4: -float("inf")}
        )
        request = ([[5, 9, 5, 9, 5, 3, 1, 2], [1, 2, 1, 2]], LookaheadConfig(4, 3, 4, 40), sampling)
        expected = summary(decode(ToyBackend(), *request))
        assert expected != summary(decode(ToyBackend(), *request[:2], SamplingParams(temperature, seed=5)))
        found = on_ranks(ranks, lambda group, r=request: summary(decode(ParallelBackend(ToyBackend(), group), *r)))
        assert found == [expected] * ranks


def test_log_probabilities_are_refused_on_ranks() -> None:
    request = ([[1, 2]], LookaheadConfig(), SamplingParams(logprobs=1))
    with pytest.raises(ValueError, match="ranks exchange tokens, not log-probabilities; request them on one rank"):
        on_ranks(2, lambda group: decode(ParallelBackend(ToyBackend(), group), *request))


def test_without_memory_for_a_request_it_is_that_one_which_fails() -> None:
    """The inner backend has other numbers for its slots."""

    class Small(PagedToy):
        def launch(self, inputs: Any) -> Any:
            for item in inputs:
                if len(item.chunk) == 4:
                    error = DeviceMemoryError("a table of penalties and biases needs 2.00 GiB of memory")
                    error.slot = item.slot
                    raise error
            return super().launch(inputs)

    def work(group: Any) -> tuple[list[Any], int]:
        inner = Small(pages=200, most_rows=256)
        inner.close(inner.open())
        backend = ParallelBackend(inner, group)
        engine = Engine(backend)
        for length in (7, 5, 9):
            engine.submit(Request(DecodingSequence([1] * length, rules=StopRules(4))))
        failed = [event for event in engine.step() if event.error is not None]
        return [len(event.request.sequence.tokens) for event in failed], backend.passes

    assert on_ranks(1, work) == [([5], 1)]


def test_counters() -> None:
    """One collective per step and the same size every time; each rank runs a part, and as much as planned."""
    request = ([[5, 9, 5, 9, 5, 3, 1, 2]], LookaheadConfig(6, 4, 6, 60), SamplingParams(seed=1))

    def work(group: Any) -> Any:
        backend = ParallelBackend(ToyBackend(), group)
        done = decode(backend, *request)
        backend.counters.exchange_seconds = 0.0
        return backend.counters, done[0].stats

    per_rank = {}
    for ranks in (1, 2, 4, 8):
        reports = on_ranks(ranks, work)
        counters, stats = reports[0]
        assert all(report[0] == counters for report in reports)
        assert counters.steps == stats.steps == counters.collectives
        assert counters.tree_tokens == stats.step_tokens
        assert counters.sent_bytes == counters.steps * 4 * (HEADER + ROWS * 17)
        assert f"{ranks} ranks: {counters.tokens[0] / counters.steps:.1f} " in counters.summary()
        assert " 1.00 collectives and 4368 bytes per rank and step" in counters.summary()
        assert len(counters.tokens) == ranks
        assert max(counters.tokens) <= counters.slowest
        per_rank[ranks] = counters.slowest
        if ranks == 1:
            assert counters.tokens == [counters.tree_tokens]
            assert counters.caught_up == [0]
        else:
            assert sum(counters.caught_up) > 0
    assert per_rank[8] < per_rank[4] < per_rank[2] < per_rank[1]
    assert per_rank[2] < 0.7 * per_rank[1]


def test_a_large_batch_widens_the_exchange() -> None:
    prompts = [[i, i + 1, i] for i in range(6)]
    config = LookaheadConfig(3, 3, 4, 60)

    def work(group: Any) -> Any:
        backend = ParallelBackend(ToyBackend(), group)
        return summary(decode(backend, prompts, config)), backend.counters

    expected = summary(decode(ToyBackend(), prompts, config))
    (found, counters), other = on_ranks(2, work)
    assert found == other[0] == expected
    assert counters.sent_bytes > counters.collectives * 4 * (HEADER + ROWS * 17)


def test_inputs_that_differ_in_what_they_want() -> None:
    """One sequence's rows carry a top-8, its neighbour's do not."""
    configs = [LookaheadConfig(3, 3, 4, 40), LookaheadConfig.paper(3, 3, 4)]

    def work(backend: Any) -> Any:
        from lookahead.algorithm.sequence import DecodingSequence
        from lookahead.config import StopRules
        from lookahead.engine.engine import Engine
        from lookahead.engine.request import Request

        sequences = [DecodingSequence([4, 4, 8, 1], config, rules=StopRules(20)) for config in configs]
        engine = Engine(backend)
        for sequence in sequences:
            engine.submit(Request(sequence))
        while engine.running:
            engine.step()
        return summary(sequences)

    expected = work(ToyBackend())
    assert on_ranks(3, lambda group: work(ParallelBackend(ToyBackend(), group))) == [expected] * 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.thinned(1, most=1)
def test_prompts_in_pieces_and_put_backs(ranks: int) -> None:
    """Few rows and little room: the ranks cut prompts alike, and put the same requests back."""
    prompts = [[i, *range(11), i] for i in range(5)]
    config = LookaheadConfig(2, 3, 3, 12)

    def work(group: Any) -> Any:
        inner = PagedToy(pages=20, most_rows=32)
        sequences = decode(ParallelBackend(inner, group), prompts, config, tokens=16)
        assert inner.slots == {}
        assert inner.pool.used == 0
        assert any(not tree for one in inner.passes for _, _, tree in one)
        return [sequence.output for sequence in sequences]

    expected = [sequence.output for sequence in decode(ToyBackend(), prompts, config, tokens=16)]
    assert on_ranks(ranks, work) == [expected] * ranks


def test_logits_are_refused() -> None:
    def work(group: Any) -> None:
        backend = ParallelBackend(ToyBackend(), group)
        step_input = StepInput(backend.open(), (), TokenTree([1], [-1], [0], [0]), SamplingParams(), (), logits=True)
        backend.launch([step_input])

    with pytest.raises(ValueError, match="ranks exchange tokens, not logits"):
        on_ranks(2, work)


def test_ranks_with_other_trees_are_stopped() -> None:
    def work(group: Any) -> None:
        backend = ParallelBackend(ToyBackend(), group)
        tree = TokenTree([1, 2 + (group.rank == 1)], [-1, 0], [0, 1], [0, 1])
        backend.step([StepInput(backend.open(), (), tree, SamplingParams(), ())])

    with pytest.raises(RankError, match="rank 1 has other trees and rank 0 is at step 1"):
        on_ranks(3, work)


def test_what_is_read_is_what_the_owner_sent() -> None:
    """Rows that several ranks computed come from one of them, on all ranks: here every rank has its own opinion."""

    class Opinionated(ToyBackend):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def _read(self, step_input: StepInput) -> Any:
            count = len(super()._read(step_input).targets)
            return StepOutput([self.rank] * count, np.full((count, 16), self.rank, dtype=np.int32))

    tree = TokenTree([1, 2, 3, 4, 5], [-1, 0, 1, 1, 0], [0, 1, 2, 2, 1], [0, 1, 2, 3, 4])

    def work(group: Any) -> Any:
        backend = ParallelBackend(Opinionated(group.rank), group)
        found = backend.step([StepInput(backend.open(), (), tree, SamplingParams(), (), 8)])[0]
        return found.targets, np.asarray(found.top).tolist()

    reports = on_ranks(3, work)
    assert reports[0] == reports[1] == reports[2]
    assert set(reports[0][0]) == {0, 1, 2}
    assert reports[0][1] == [[owner] * 16 for owner in reports[0][0]]
