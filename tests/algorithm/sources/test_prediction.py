"""The source `prediction`: it follows a text, leaves it, and finds back; and it never changes the output."""

from __future__ import annotations

import random

import pytest
from toys import VOCABULARY, ToyBackend

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import Calibration, PredictionSource, SharedMemory
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

CONFIG = LookaheadConfig(window=0, guesses=0, budget=17, sources=("suffix",))


def run(
    prediction: list[int],
    config: LookaheadConfig = CONFIG,
    sampling: SamplingParams | None = None,
    memory: SharedMemory | None = None,
) -> DecodingSequence:
    sequence = DecodingSequence([1, 2, 3], config, sampling, StopRules(60), memory=memory, prediction=prediction)
    engine = Engine(ToyBackend())
    engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    return sequence


def proposed(source: PredictionSource) -> list[list[int]]:
    candidates = Candidates.after([1], Calibration().rates)
    source.propose([1], candidates)
    chains, start = [], 0
    for length in candidates.chain_lengths:
        chains.append(candidates.chain_tokens[start : start + length])
        start += length
    return chains


@pytest.mark.parametrize("sampling", [None, SamplingParams(0.9, seed=4)])
def test_the_right_prediction_is_accepted_whole(sampling: SamplingParams | None) -> None:
    plain = run([], LookaheadConfig.autoregressive(), sampling)
    for memory in (None, SharedMemory(PythonDrafter())):
        predicted = run(plain.output, CONFIG, sampling, memory)
        assert predicted.output == plain.output
        assert predicted.prediction is not None
        assert predicted.prediction.accepted == 60
        assert predicted.stats.steps <= 6
        assert predicted.stats.accepted_by_source["prediction"] >= 50


def test_any_prediction_leaves_the_output_as_it_is() -> None:
    plain, rng = run([], LookaheadConfig.autoregressive()).output, random.Random(5)
    for _ in range(20):
        edited = list(plain)
        for _ in range(rng.randrange(6)):
            place = rng.randrange(len(edited))
            edited[place : place + rng.randrange(3)] = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(3))]
        sequence = run(edited)
        assert sequence.output == plain
        assert sequence.prediction is not None
        assert 0 <= sequence.prediction.accepted <= 60


def test_an_edit_of_a_few_tokens_costs_a_few_steps() -> None:
    plain = run([], LookaheadConfig.autoregressive()).output
    replaced = [*plain[:20], (plain[20] + 1) % VOCABULARY, *plain[21:40], *plain[43:]]
    assert run(replaced).stats.steps <= 12
    assert run([]).stats.steps > 30


def test_where_the_source_goes_on() -> None:
    source = PredictionSource(Calibration(), [10, 11, 12, 13, 14, 15, 16], 4)
    assert proposed(source) == [[10, 11, 12, 13]]
    source.record_output([1, 10, 11], [10, 11])
    assert proposed(source) == [[12, 13, 14, 15]]
    source.record_output([1, 10, 11, 99], [99])  # 99 instead of 12, or before it
    assert proposed(source) == [[13, 14, 15, 16], [12, 13, 14, 15]]
    source.record_output([1, 10, 11, 99, 14], [14])  # it comes back at 14
    assert proposed(source)[0] == [15, 16]
    assert source.accepted == 2
    source.record_output([1, 10, 11, 99, 14, 15, 16], [15, 16])
    assert source.accepted == 4
    assert proposed(source) == []
    source.record_output([1, 10, 11, 99, 14, 15, 16, 5], [5])


def test_no_draft_tokens_no_prediction() -> None:
    assert run([1, 2, 3], LookaheadConfig.autoregressive()).prediction is None
