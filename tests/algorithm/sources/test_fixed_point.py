"""Jacobi decoding as a source: the same tokens as one by one, never in more steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from reference import argmax, autoregressive
from toy import counting_model, decode, settings_of_a_text, steps

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.config import LookaheadConfig, SamplingParams, StopRules


def sequence_of(prompt: list[int], block: int, m: int, **settings: object) -> DecodingSequence:
    return DecodingSequence(prompt, LookaheadConfig.jacobi(block), rules=StopRules(max_tokens=m), **settings)


@settings(max_examples=examples(120), deadline=None)
@given(settings_of_a_text(), st.integers(1, 20))
def test_jacobi_is_autoregressive(text, block: int) -> None:
    model, prompt, m = text
    sequence = sequence_of(prompt, block, m)
    accepted = decode(sequence, model)
    assert sequence.output == autoregressive(prompt, model, m)
    assert 1 <= len(accepted) <= m
    assert max(accepted) <= block + 1


@settings(max_examples=examples(80), deadline=None)
@given(settings_of_a_text(), st.integers(1, 12))
def test_the_guess_is_the_last_iterate(text, block: int) -> None:
    """Algorithm 1: every token of the block is recomputed from the block before, all at once."""
    model, prompt, m = text
    sequence = sequence_of(prompt, block, m)
    filler, expected = prompt[-1], [prompt[-1]] * block
    known = list(prompt)
    for tree, tokens in steps(sequence, model):
        left = m - (len(known) - len(prompt))
        guessed = expected[: left - 1]
        assert list(tree.tokens) == [known[-1], *guessed]
        assert list(tree.parents) == list(range(-1, len(guessed)))
        iterate = [argmax(model([*known, *guessed[:i]])) for i in range(len(guessed) + 1)]
        assert tokens == iterate[: len(tokens)]
        beyond = iterate[len(tokens) :]
        expected = beyond + [filler] * (block - len(beyond))
        known += tokens


@pytest.mark.parametrize(("block", "m"), [(1, 10), (4, 21), (4, 22), (16, 17), (30, 10)])
def test_a_favourite_that_never_changes_is_solved_at_once(block: int, m: int) -> None:
    """One step finds it, the next accepts the whole block; then a new block starts from the prompt's last token."""
    sequence = sequence_of([0], block, m)
    accepted = decode(sequence, lambda tokens: [0.1, 0.9])
    assert sequence.output == [1] * m
    pattern = [1, block + 1] * m
    assert accepted[:-1] == pattern[: len(accepted) - 1]
    assert 1 <= accepted[-1] <= pattern[len(accepted) - 1]


def test_text_that_depends_on_its_last_token_is_not_solved_ahead() -> None:
    """The worst case: a token a step."""
    assert decode(sequence_of([0], 8, 12), counting_model(50)) == [1] * 12


@settings(max_examples=examples(40), deadline=None)
@given(settings_of_a_text(), st.integers(1, 12), st.integers(0, 99))
def test_jacobi_samples_what_autoregressive_does(text, block: int, seed: int) -> None:
    model, prompt, m = text
    sampling = SamplingParams(temperature=0.8, seed=seed)
    sequence = sequence_of(prompt, block, m, sampling=sampling)
    plain = DecodingSequence(prompt, LookaheadConfig.autoregressive(), sampling, StopRules(max_tokens=m))
    decode(sequence, model)
    decode(plain, model)
    assert sequence.output == plain.output
