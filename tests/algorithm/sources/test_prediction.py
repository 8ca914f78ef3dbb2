"""The source `prediction`: it follows a text, leaves it, and finds back; and it never changes the output."""

from __future__ import annotations

import random

import pytest
from replay import Replay
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


def proposed(source: PredictionSource, calibration: Calibration) -> list[list[int]]:
    candidates = Candidates.after([1], calibration.rates)
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
    calibration = Calibration()
    source = PredictionSource(calibration, [10, 11, 12, 13, 14, 15, 16], 4)
    assert proposed(source, calibration) == [[10, 11, 12, 13]]
    source.record_output([1, 10, 11], [10, 11])
    assert proposed(source, calibration) == [[12, 13, 14, 15]]
    source.record_output([1, 10, 11, 99], [99])  # 99 instead of 12, or before it
    assert proposed(source, calibration) == [[13, 14, 15, 16], [12, 13, 14, 15]]
    source.record_output([1, 10, 11, 99, 14], [14])  # it comes back at 14
    assert proposed(source, calibration)[0] == [15, 16]
    assert source.accepted == 2
    source.record_output([1, 10, 11, 99, 14, 15, 16], [15, 16])
    assert source.accepted == 4
    assert proposed(source, calibration) == []
    source.record_output([1, 10, 11, 99, 14, 15, 16, 5], [5])


def edited_file(rng: random.Random) -> tuple[list[int], list[int]]:
    """A file of 200 lines of 5 to 15 tokens, and the same with one line replaced, one inserted and one word changed.
    Some tokens are in most lines, as in code."""

    def line() -> list[int]:
        words = [int(2000 * rng.random() ** 3) for _ in range(rng.randrange(3, 13))]
        return [3, *words, 2]  # an indent and a line end

    before = [line() for _ in range(200)]
    after, (replaced, inserted, changed) = list(before), sorted(rng.sample(range(10, 190), 3))
    after[changed] = [*before[changed][:2], 7, *before[changed][3:]]
    after[inserted:inserted] = [line()]
    after[replaced] = line()
    return [token for tokens in before for token in tokens], [token for tokens in after for token in tokens]


@pytest.mark.parametrize("seed", range(4))
def test_a_file_with_three_edited_lines_takes_few_steps(seed: int) -> None:
    """S is at least 30, with the default config and with the last lines' tokens unguessable by other sources."""
    rng = random.Random(seed)
    prediction, output = edited_file(rng)
    prompt, config = [1], LookaheadConfig()
    model = Replay([*prompt, *output, *[0] * 80], forgetful=True)
    sequence = DecodingSequence(prompt, config, rules=StopRules(len(output)), prediction=prediction)
    deepest = 0
    while sequence.finish_reason is None:
        tree = sequence.propose()
        deepest = max(deepest, *tree.depths)
        step = model.output(tree, len(sequence.tokens) - 1, sequence.wants_top)
        sequence.count_step(tree, sequence.accept_step(tree, step))
        sequence.learn_while_running()
    assert sequence.output == output
    assert deepest == 64
    assert sequence.stats.compression >= 30


def test_after_an_edit_the_next_chain_starts_where_both_agree_again() -> None:
    """Two tokens that agree are enough: the prediction's tokens after them are the first chain, up to the limit."""
    calibration, rng = Calibration(), random.Random(3)
    predicted = rng.sample(range(1000), 200)
    source = PredictionSource(calibration, predicted, 64)
    source.record_output(predicted[:50], predicted[:50])
    source.record_output([*predicted[:50], 2001], [2001])
    output = [*predicted[:50], 2001, 2002, 2003, *predicted[53:55]]
    source.record_output(output[:53], [2002, 2003])
    source.record_output(output, predicted[53:55])
    assert source.starts[0][0] == 55
    assert proposed(source, calibration)[0][:10] == predicted[55:65]
    source.record_output([*output, *predicted[55:60]], predicted[55:60])
    assert proposed(source, calibration) == [predicted[60:124]]


def test_no_draft_tokens_no_prediction() -> None:
    assert run([1, 2, 3], LookaheadConfig.autoregressive()).prediction is None
