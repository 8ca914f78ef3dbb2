"""The longest match against a naive search, and prompt lookup against transformers' own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lookahead.algorithm.draft import Candidates, Limits
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sources import SharedMemory, build_sources
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.source import Outcome
from lookahead.algorithm.sources.suffix import SCAN, SuffixSource
from lookahead.algorithm.tree import TokenTree
from lookahead.config import LookaheadConfig

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def fed(source: SuffixSource, text: list[int], prompt: int | None = None) -> SuffixSource:
    """The source after a prompt and an output that came one token at a time."""
    prompt = len(text) if prompt is None else prompt
    source.start(text[:prompt])
    for end in range(prompt + 1, len(text) + 1):
        tree = TokenTree([text[end - 2]], [-1], [0], [0])
        source.learn_from(Outcome(text[:end], [text[end - 1]], tree, [], [text[end - 1]], [], []))
    return source


def naive(text: list[int], key: int) -> list[tuple[int, int]]:
    """(matched length, end) of every earlier place that ends like the text: longest first, then newest first."""
    found = []
    for end in range(len(text) - 1):
        matched = 0
        while matched < key and matched <= end and text[end - matched] == text[-1 - matched]:
            matched += 1
        if matched:
            found.append((matched, end))
    longest = max((matched for matched, _ in found), default=0)
    if longest > 1:
        found = [match for match in found if match[0] > 1]
    return sorted(found, key=lambda match: (-match[0], -match[1]))


@settings(max_examples=examples(300))
@given(texts, st.integers(1, 6), st.integers(1, 5), st.data())
@example([0, 0], 1, 1, None)
@example([0, 0, 0, 0, 0, 0], 6, 4, None)
def test_matches_are_those_of_a_naive_search(text: list[int], key: int, branches: int, data) -> None:
    prompt = data.draw(st.integers(1, len(text))) if data is not None else 1
    source = fed(SuffixSource(Calibration(), key, branches), text, prompt)
    expected = naive(text, key)
    if len(expected) <= SCAN:
        assert source.matches(text) == expected[:branches]


def test_the_longest_match_wins_over_newer_ones() -> None:
    text = [1, 2, 3, 7, 9, 2, 3, 8, 0, 3, 6, 1, 2, 3]
    source = fed(SuffixSource(Calibration()), text)
    assert source.matches(text) == [(3, 2), (2, 6)]


def test_newest_first_among_equals() -> None:
    text = [5, 1, 4, 1, 3, 1]
    assert fed(SuffixSource(Calibration()), text).matches(text) == [(1, 3), (1, 1)]
    text = [1, 2, 5, 1, 2, 4, 1, 2]
    assert fed(SuffixSource(Calibration(), branches=1), text).matches(text) == [(2, 4)]


def test_the_last_token_does_not_match_itself() -> None:
    assert fed(SuffixSource(Calibration()), [1, 2, 3]).matches([1, 2, 3]) == []
    assert fed(SuffixSource(Calibration()), [4]).matches([4]) == []
    # With a token after it, it does; and a match may run into the text's own end.
    assert fed(SuffixSource(Calibration()), [4, 4, 4]).matches([4, 4, 4])[0] == (2, 1)


def test_a_place_beyond_the_scan_is_not_looked_at() -> None:
    text = [9, 1, 2, *[3, 1, 2] * SCAN, 9, 1, 2]
    assert fed(SuffixSource(Calibration()), text).matches(text)[0] == (2, len(text) - 4)
    text = [9, 1, 2, *[3, 1, 2] * (SCAN - 1), 9, 1, 2]
    assert fed(SuffixSource(Calibration()), text).matches(text)[0] == (3, 2)


@pytest.mark.parametrize("length", [1, 3, 50])
def test_a_continuation_is_what_followed_the_match(length: int) -> None:
    """It may be longer than N - 1, ends with the text, and each token counts as matched one longer."""
    calibration = Calibration()
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    source = fed(SuffixSource(calibration, length=length), text)
    candidates = Candidates.after(text, calibration.rates)
    source.propose(text, candidates)
    drafted = PythonDrafter().search(candidates, Limits(99, 99))
    assert list(drafted.tokens) == [3, 4, 5, 6, 1, 2][:length]
    assert [origin - source.origin for origin in drafted.origins] == [2, 3, 4, 5, 6, 7][:length]
    assert drafted.scores[0] == SuffixSource.PRIORS[2]


# Prompt lookup.


def lookup(text: list[int], tokens: int, key: int) -> list[int]:
    """What transformers proposes."""
    generator = PromptLookupCandidateGenerator(num_output_tokens=tokens, max_matching_ngram_size=key, max_length=10**6)
    candidates, _ = generator.get_candidates(torch.tensor([text]))
    return candidates[0, len(text) :].tolist()


@settings(max_examples=examples(300), deadline=None)
@given(texts, st.sampled_from([(10, 2), (10, 1), (3, 2)]), st.data())
@example([1, 1], (10, 2), None)
@example([1, 2, 1, 2], (10, 2), None)
def test_oldest_is_the_prompt_lookup_of_transformers(text: list[int], size: tuple[int, int], data) -> None:
    tokens, key = size
    memory = SharedMemory()
    (source,) = build_sources(LookaheadConfig.prompt_lookup(tokens, key), memory)
    fed(source, text, data.draw(st.integers(1, len(text))) if data is not None else 1)
    candidates = Candidates.after(text, memory.calibration.rates)
    source.propose(text, candidates)
    drafted = memory.drafter.search(candidates, Limits(tokens, 99))
    assert list(drafted.tokens) == lookup(text, tokens, key)
    assert list(drafted.parents) == list(range(len(drafted.tokens)))


def test_oldest_and_newest_differ() -> None:
    """Else the comparison with transformers would show nothing."""
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    assert fed(SuffixSource(Calibration(), key=2, branches=1, oldest=True), text).matches(text) == [(2, 1)]
    assert fed(SuffixSource(Calibration(), key=2, branches=1), text).matches(text) == [(2, 4)]


def test_prompt_lookup_with_a_longer_key() -> None:
    text = [2, 3, 9, 1, 2, 3, 8, 1, 2, 3]
    source = fed(SuffixSource(Calibration(), key=3, branches=1, oldest=True), text)
    (matched, end) = source.matches(text)[0]
    assert text[end + 1] == lookup(text, 10, 3)[0] == 8
    assert matched == 3
