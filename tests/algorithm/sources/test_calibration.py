"""Rates by the length of the match: long matches have their own, and decide how long a chain is."""

from __future__ import annotations

import random

import pytest
from replay import Replay

from lookahead.algorithm.draft import Candidates, Drafter
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.sources.calibration import BUCKETS, MIN_SCORE, Calibration, chain_length, match_bucket
from lookahead.algorithm.sources.suffix import SuffixSource
from lookahead.config import LookaheadConfig, StopRules

DRAFTERS = list({type(drafter): drafter for drafter in (PythonDrafter(), choose_drafter())}.values())
TEXT = random.Random(2).sample(range(1000), 300)
"""No token twice."""


def suffix_chain(calibration: Calibration, matched: int, **settings: int) -> list[int]:
    """The chain after a text whose last `matched` tokens are the beginning of TEXT."""
    text = [*TEXT, 1001, *TEXT[:matched]]
    source = SuffixSource(calibration, **settings)
    source.start(text)
    candidates = Candidates.after(text, calibration.rates)
    source.propose(text, candidates)
    assert len(candidates.chain_lengths) == 1
    return candidates.chain_tokens


def test_buckets_of_matches() -> None:
    assert [match_bucket(matched) for matched in range(13)] == list(range(13))
    assert [match_bucket(matched) for matched in (15, 16, 23, 24, 31, 32, 47, 48, 63, 64, 1000)] == [
        *(12, 13, 13, 14, 14, 15, 15, 16, 16, 17, 17)
    ]
    assert len(SuffixSource.PRIORS) == match_bucket(1000) + 1 <= BUCKETS


def test_a_long_match_has_a_long_chain() -> None:
    """Where matches of up to four tokens were mostly wrong, as in most texts."""
    calibration = Calibration()
    first = SuffixSource(calibration).origin
    for matched in (1, 2, 3, 4):
        for trial in range(100):
            calibration.record_trial(first + match_bucket(matched), trial % 5 == 0)
    lengths = [len(suffix_chain(calibration, matched)) for matched in (1, 2, 4, 12, 40, 64)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 64
    assert lengths[-1] == 64
    assert suffix_chain(calibration, 40) == TEXT[40:104]


def test_what_matches_gave_decides_how_long_chains_are() -> None:
    """If matches of 24 tokens and more were wrong half of the time, no chain is long; matches of 12 keep their rate."""
    calibration = Calibration()
    suffix_chain(calibration, 1)
    first = SuffixSource(calibration).origin
    known = calibration.rates[first + match_bucket(12)]
    for trial in range(400):
        for matched in (24, 32, 48, 64):
            calibration.record_trial(first + match_bucket(matched), trial % 2 == 0)
    assert calibration.rates[first + match_bucket(12)] == known
    assert len(suffix_chain(calibration, 30)) < 16
    assert 20 <= len(suffix_chain(calibration, 12)) < 40  # 12 tokens up to a match of 24, and a few more
    for _ in range(400):
        for matched in (24, 32, 48, 64):
            calibration.record_trial(first + match_bucket(matched), True)
    assert len(suffix_chain(calibration, 30)) == 64


def test_the_oldest_match_has_a_chain_of_a_fixed_length() -> None:
    """As transformers' prompt lookup does."""
    calibration = Calibration()
    suffix_chain(calibration, 1)
    for bucket in range(len(SuffixSource.PRIORS)):
        calibration.rates[SuffixSource(calibration).origin + bucket] = 0.001
    assert len(suffix_chain(calibration, 3)) == 1
    assert len(suffix_chain(calibration, 3, oldest=True, length=50)) == 50


def test_chain_length() -> None:
    assert chain_length([0.5], [0] * 64) == 10
    assert 0.5**10 >= MIN_SCORE > 0.5**11
    assert chain_length([0.999], [0] * 64) == 64
    assert chain_length([MIN_SCORE / 2], [0] * 3) == 1
    assert chain_length([0.5], []) == 0


def test_the_state_of_an_earlier_release_gets_priors_for_new_buckets() -> None:
    calibration, state = Calibration(), Calibration().state()
    state["rates"][BUCKETS * 2 : BUCKETS * 2 + 13] = 0.25
    calibration.load_state(state)
    assert calibration.set_prior("suffix", SuffixSource.PRIORS) == BUCKETS * 2
    known = list(calibration.rates[BUCKETS * 2 : BUCKETS * 2 + 18])
    assert known == [*[0.25] * 13, *SuffixSource.PRIORS[13:]]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: type(drafter).__name__)
@pytest.mark.parametrize(("depth", "steps"), [(16, 17), (64, 6)])
def test_a_config_fitted_to_a_backend_has_chains_of_its_depth(depth: int, steps: int, drafter: Drafter) -> None:
    """A backend that is exact to a depth of 16 gets chains of 16 from the default config."""
    stream = [*TEXT[:280], 1001, *TEXT[:280], *[0] * 70]
    config, model = LookaheadConfig().within(128, depth), Replay(stream, forgetful=True)
    sequence = DecodingSequence(stream[:290], config, rules=StopRules(260), memory=SharedMemory(drafter))
    deepest = 0
    while sequence.finish_reason is None:
        tree = sequence.propose()
        deepest = max(deepest, *tree.depths[tree.branch :])
        output = model.output(tree, len(sequence.tokens) - 1, sequence.wants_top)
        sequence.count_step(tree, sequence.accept_step(tree, output))
        sequence.learn_while_running()
    assert sequence.tokens == stream[: 290 + 260]
    assert deepest == depth
    assert sequence.stats.steps <= steps
