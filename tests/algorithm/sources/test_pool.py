"""The n-gram pool against a naive list, and what its two feeders put in and take out."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.sources.calibration import Calibration, source_of
from lookahead.algorithm.sources.pool import JacobiSource, NGramPool, PromptSource
from lookahead.algorithm.sources.source import Outcome
from lookahead.algorithm.tree import TokenTree

NGram = tuple[int, ...]


def proposed(source: JacobiSource | PromptSource, text: list[int]) -> tuple[list[NGram], list[NGram]]:
    """The chains that the source proposes, and their origins."""
    candidates, end = Candidates.after(text, Calibration().rates), 0
    source.propose(text, candidates)
    chains, origins = list[NGram](), list[NGram]()
    for length in candidates.chain_lengths:
        start, end = end, end + length
        chains.append(tuple(candidates.chain_tokens[start:end]))
        origins.append(tuple(candidates.chain_origins[start:end]))
    return chains, origins


def outcome(text: list[int], accepted: int, ngrams: list[NGram] | None = None) -> Outcome:
    """A step that accepted the last tokens of the text."""
    tree = TokenTree([text[-accepted - 1]], [-1], [0], [0])
    return Outcome(text, text[-accepted:], tree, [], [text[-1]], None, ngrams or [])


def test_newest_first() -> None:
    pool = NGramPool(5)
    for rest in ((1, 2), (3, 4), (5, 6)):
        pool.add((9, *rest), "jacobi")
    assert pool.lookup(9) == [(5, 6), (3, 4), (1, 2)]
    assert pool.lookup(8) == []


def test_the_oldest_goes_when_there_are_more_than_g() -> None:
    pool = NGramPool(2)
    for rest in ((1,), (2,), (3,)):
        pool.add((9, *rest), "jacobi")
        pool.add((8, *rest), "jacobi")
    assert pool.lookup(9) == pool.lookup(8) == [(3,), (2,)]


def test_an_ngram_found_again_is_new_again_and_kept_once() -> None:
    pool = NGramPool(2)
    for rest in ((1,), (2,), (1,), (3,)):
        pool.add((9, *rest), "jacobi")
    assert pool.lookup(9) == [(3,), (1,)]


def test_the_last_feeder_owns_an_ngram() -> None:
    pool = NGramPool(3)
    pool.add((9, 1), "prompt")
    pool.add((9, 2), "jacobi")
    assert (pool.lookup(9, "prompt"), pool.lookup(9, "jacobi")) == ([(1,)], [(2,)])
    pool.add((9, 1), "jacobi")
    assert (pool.lookup(9, "prompt"), pool.lookup(9, "jacobi")) == ([], [(1,), (2,)])


def test_no_guesses_keep_nothing() -> None:
    pool = NGramPool(0)
    pool.add((9, 1), "jacobi")
    assert pool.lookup(9) == []


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.tuples(*[st.integers(0, 2)] * 3), st.sampled_from(["jacobi", "prompt"])), max_size=40),
)
@example(1, [((0, 1, 1), "jacobi"), ((0, 1, 2), "prompt"), ((0, 1, 1), "jacobi")])
def test_a_pool_is_a_list_cut_to_g_per_first_token(guesses: int, added: list[tuple[NGram, str]]) -> None:
    pool, naive = NGramPool(guesses), []
    for ngram, feeder in added:
        pool.add(ngram, feeder)
        naive = [(ngram, feeder), *[entry for entry in naive if entry[0] != ngram]]
        same = [entry for entry in naive if entry[0][0] == ngram[0]]
        if len(same) > guesses:
            naive.remove(same[-1])
    for first in range(3):
        for feeder in (None, "jacobi", "prompt"):
            expected = [g[1:] for g, who in naive if g[0] == first and feeder in (None, who)]
            assert pool.lookup(first, feeder) == expected


# The feeders.


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_every_ngram_of_the_prompt_is_there_from_the_start(ngram: int) -> None:
    prompt = list(range(10))
    pool = NGramPool(3)
    PromptSource(pool, Calibration(), ngram).start(prompt)
    for first in prompt:
        whole = tuple(prompt[first + 1 : first + ngram])
        assert pool.lookup(first, "prompt") == ([whole] if first <= 10 - ngram else [])


def test_a_prompt_shorter_than_an_ngram_has_none() -> None:
    pool = NGramPool(3)
    PromptSource(pool, Calibration(), 4).start([1, 2, 3])
    assert [pool.lookup(first) for first in (1, 2, 3)] == [[], [], []]


def test_ngrams_that_straddle_prompt_and_output() -> None:
    pool = NGramPool(3)
    source = PromptSource(pool, Calibration(), 4)
    source.start([1, 2, 3])
    source.learn_from(outcome([1, 2, 3, 4], 1))
    assert pool.lookup(1) == [(2, 3, 4)]
    source.learn_from(outcome([1, 2, 3, 4, 5, 6], 2))
    assert [pool.lookup(first) for first in (1, 2, 3, 4)] == [[(2, 3, 4)], [(3, 4, 5)], [(4, 5, 6)], []]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(2, 5), st.integers(1, 4), st.data())
def test_a_text_fed_block_by_block_is_the_text_fed_at_once(
    text: list[int], ngram: int, guesses: int, data: st.DataObject
) -> None:
    """No n-gram is missed at a seam, and none is fed twice, which would make it newer than it is."""
    whole, blocks = NGramPool(guesses), NGramPool(guesses)
    PromptSource(whole, Calibration(), ngram).start(text)
    source = PromptSource(blocks, Calibration(), ngram)
    end = data.draw(st.integers(1, len(text)))
    source.start(text[:end])
    while end < len(text):
        accepted = data.draw(st.integers(1, len(text) - end))
        end += accepted
        source.learn_from(outcome(text[:end], accepted))
    assert [blocks.lookup(first) for first in range(4)] == [whole.lookup(first) for first in range(4)]


def test_the_window_feeds_the_same_pool_under_its_own_name() -> None:
    calibration, pool = Calibration(), NGramPool(4)
    prompt, jacobi = PromptSource(pool, calibration, 3), JacobiSource(pool, calibration, 3)
    prompt.start([7, 1, 2, 7, 3, 4])
    jacobi.start([7, 1, 2, 7, 3, 4])
    step = outcome([7, 1, 2, 7, 3, 4, 7], 1, [(7, 5, 6), (7, 1, 2), (8, 8, 8)])
    prompt.learn_from(step)
    jacobi.learn_from(step)
    from_prompt, prompt_origins = proposed(prompt, step.text)
    from_window, window_origins = proposed(jacobi, step.text)
    assert from_prompt == [(3, 4)]
    assert from_window == [(1, 2), (5, 6)]
    assert {source_of(o) for origins in prompt_origins for o in origins} == {"prompt"}
    assert {source_of(o) for origins in window_origins for o in origins} == {"jacobi"}


def test_an_ngram_of_the_text_is_fed_once() -> None:
    """What the window found since then is not taken back."""
    calibration, pool = Calibration(), NGramPool(4)
    prompt, jacobi = PromptSource(pool, calibration, 3), JacobiSource(pool, calibration, 3)
    prompt.start([7, 1, 2])
    jacobi.feed([(7, 1, 2)])
    prompt.learn_from(outcome([7, 1, 2, 7], 1))
    assert (pool.lookup(7, "jacobi"), pool.lookup(7, "prompt")) == ([(1, 2)], [])


def test_a_guess_is_scored_by_its_depth() -> None:
    """One origin per depth, and the last prior stands for all deeper ones."""
    calibration, pool = Calibration(), NGramPool(1)
    source = JacobiSource(pool, calibration, 7)
    source.learn_from(outcome([1, 9], 1, [(9, 1, 2, 3, 4, 5, 6)]))
    _, (origins,) = proposed(source, [1, 9])
    assert [origin - origins[0] for origin in origins] == [0, 1, 2, 3, 3, 3]
    assert tuple(calibration.rates[origin] for origin in origins[:4]) == JacobiSource.PRIORS
