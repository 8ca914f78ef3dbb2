"""Adjusted logits and distributions against transformers, draws at their edges, and the levels of top tokens."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lookahead.algorithm.sampling import LEVELS, NO_DRAW, Adjustment
from lookahead.backends.sampling import adjusted, distribution, draw, pick, top_tokens
from lookahead.config import SamplingParams

BELOW_ONE = math.nextafter(1.0, 0.0)
GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in product((0.3, 1.0, 2.5), (0, 1, 3, 60), (1.0, 0.903, 0.51, 1e-6), (0.0, 0.05, 0.5, 1.0))
]


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers samples from."""
    warpers = LogitsProcessorList()
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits.double()).softmax(dim=-1)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 50])
@pytest.mark.thinned(1, most=2)
def test_distribution_is_that_of_transformers(vocabulary: int) -> None:
    logits = 2 * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    kept = set()
    for params in GRID:
        probs = distribution(logits, params)
        assert probs.dtype == torch.float64
        torch.testing.assert_close(probs, warped(logits, params), rtol=1e-9, atol=1e-12)
        kept |= set((probs > 0).sum(dim=-1).tolist())
    assert {1, vocabulary} <= kept


@pytest.mark.parametrize("vocabulary", [2, 7, 50])
@pytest.mark.thinned(1, most=1)
def test_distribution_of_tied_logits(vocabulary: int) -> None:
    """Three values only. Which of the tied tokens top-p keeps is arbitrary: we keep the lower ids."""
    logits = torch.randint(3, (6, vocabulary), generator=torch.Generator().manual_seed(vocabulary)).float()
    for params in GRID:
        probs, expected = distribution(logits, params), warped(logits, params)
        if params.top_p < 1:
            for row, values in zip(probs, logits, strict=True):
                for value in values.unique():
                    alive = (row[values == value] > 0).int().tolist()
                    assert alive == sorted(alive, reverse=True)
            probs, expected = probs.sort(dim=-1).values, expected.sort(dim=-1).values
        torch.testing.assert_close(probs, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_distribution_of_any_dtype_is_computed_in_doubles(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    params = SamplingParams(temperature=0.7, top_k=20, min_p=0.01)
    torch.testing.assert_close(distribution(logits, params), warped(logits, params), rtol=1e-12, atol=1e-12)


# Draws. Probabilities of whole 64ths make every sum exact.


def naive_draw(weights: list[int], uniform: float) -> int:
    """The first token whose exact CDF exceeds the uniform."""
    threshold = Fraction(uniform) * sum(weights)
    return next(token for token, total in enumerate(accumulate(weights)) if total > threshold)


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 8]), min_size=1, max_size=12).filter(any),
    st.one_of(st.floats(0, BELOW_ONE), st.integers(0, 63).map(lambda n: n / 64)),
)
def test_draw_is_the_inverse_of_the_cdf(weights: list[int], uniform: float) -> None:
    probs = torch.tensor([weights], dtype=torch.float64) / 64
    (drawn,) = draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist()
    assert weights[drawn] > 0
    if Fraction(uniform) * sum(weights) / 64 == uniform * (sum(weights) / 64):  # the threshold was not rounded
        assert drawn == naive_draw(weights, uniform)


@pytest.mark.parametrize(
    ("probs", "lowest", "highest"),
    [
        ([1.0], 0, 0),
        ([0.0, 1.0, 0.0], 1, 1),
        ([0.0, 0.25, 0.0, 0.75, 0.0, 0.0], 1, 3),
        ([0.3, 0.3, 0.4], 0, 2),
        ([0.1] * 10 + [0.0] * 3, 0, 9),  # rounded, these ten add up to less than 1
        ([1e-300, 1.0, 1e-300, 0.0], 0, 1),  # the third is too small to move the sum
    ],
)
def test_draw_at_both_ends(probs: list[float], lowest: int, highest: int) -> None:
    rows = torch.tensor([probs, probs], dtype=torch.float64)
    first, last = draw(rows, torch.tensor([0.0, BELOW_ONE], dtype=torch.float64)).tolist()
    assert first == lowest
    assert probs[last] > 0
    assert last >= highest


def test_a_uniform_that_was_rounded_up_to_one_is_the_last_possible_token() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    assert draw(probs, torch.ones(2, dtype=torch.float64)).tolist() == [2, 3]


def test_every_row_has_its_own_uniform() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)
    assert draw(probs, torch.tensor([0.4, 0.6, 0.2], dtype=torch.float64)).tolist() == [0, 1, 1]


def test_pick_mixes_draws_and_argmaxes() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 9, generator=generator)
    uniforms = torch.rand(40, dtype=torch.float64, generator=generator).tolist()
    params = SamplingParams(temperature=1.5, top_k=6)
    drawn = draw(distribution(logits, params), torch.tensor(uniforms, dtype=torch.float64)).tolist()
    greedy = logits.argmax(dim=-1).tolist()
    assert drawn != greedy
    mixed = [NO_DRAW if r % 3 == 0 else u for r, u in enumerate(uniforms)]
    picked = pick(logits, params, mixed).tolist()
    assert picked == [greedy[r] if r % 3 == 0 else drawn[r] for r in range(40)]
    assert pick(logits, params, [NO_DRAW] * 40).tolist() == greedy
    assert pick(logits, params, uniforms).tolist() == drawn
    # A row's token does not depend on the rows beside it.
    assert [pick(logits[r : r + 1], params, [u]).item() for r, u in enumerate(mixed)] == picked


def test_pick_for_greedy_needs_no_uniforms() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert pick(logits, SamplingParams(), []).tolist() == [1, 0]


def test_a_uniform_of_zero_is_a_draw() -> None:
    """Not to be taken for 'no draw': it is the first token's."""
    assert pick(torch.tensor([[0.0, 3.0]]), SamplingParams(temperature=1.0), [0.0]).tolist() == [0]


# Top rows.


@pytest.mark.parametrize("vocabulary", [1, 5, 300])
def test_top_tokens_are_the_likeliest_with_their_levels(vocabulary: int) -> None:
    logits = 3 * torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    ids, levels = top_tokens(logits, 8).long().chunk(2, dim=1)
    assert ids.shape == levels.shape == (20, min(8, vocabulary))
    probs = logits.double().softmax(dim=-1)
    for row in range(20):
        expected = sorted(range(vocabulary), key=lambda token: -probs[row, token])[:8]
        assert ids[row].tolist() == expected
        for token, level in zip(expected, levels[row].tolist(), strict=True):
            p = probs[row, token].item()
            assert p <= 2 ** (-level / 2) * (1 + 1e-5)
            assert p > 2 ** (-(level + 1) / 2) * (1 - 1e-5) or level == LEVELS - 1
        assert levels[row].tolist() == sorted(levels[row].tolist())


@pytest.mark.parametrize("level", range(LEVELS + 4))
def test_the_middle_of_every_level(level: int) -> None:
    p = 2 ** (-(level + 0.5) / 2)
    _, levels = top_tokens(torch.tensor([[p, 1 - p]]).log(), 2).chunk(2, dim=1)
    of_p = levels[0].tolist()[0 if p > 0.5 else 1]
    assert of_p == min(level, LEVELS - 1)


def test_a_sure_row_and_an_impossible_token() -> None:
    top = top_tokens(torch.tensor([[-torch.inf, 50.0, -torch.inf]], dtype=torch.bfloat16), 3)
    ids, levels = top.chunk(2, dim=1)
    assert ids[0, 0] == 1
    assert levels.tolist() == [[0, LEVELS - 1, LEVELS - 1]]


def test_adjusted_equals_transformers_processors() -> None:
    """Every row as if its path had been accepted: a penalty, a ban of end tokens, a bias added after the penalty."""
    prompt, output, ends = [3, 4, 4, 50], [7, 7, 3, 9], frozenset([11, 30, 99])
    paths = [[], [11], [11, 7], [12, 12, 12]]
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(repetition_penalty=1.7, logit_bias={12: 0.5, 20: -float("inf")})
    found = adjusted(logits, params, Adjustment([*prompt, *output], 4, ends, min_tokens=6), paths)
    for row, path in enumerate(paths):
        text = torch.tensor([[*prompt, *output, *path]])
        scores = RepetitionPenaltyLogitsProcessor(1.7)(text, logits[row : row + 1].clone())
        scores = SequenceBiasLogitsProcessor({(12,): 0.5, (20,): -float("inf")})(text, scores)
        scores = MinNewTokensLengthLogitsProcessor(4, 6, [11, 30], device="cpu")(text, scores)
        assert torch.equal(found[row], scores[0])
    assert found[1, 11] == -torch.inf
    assert found[2, 11] > -torch.inf


def test_adjusted_counts_the_output_alone() -> None:
    logits = torch.zeros(2, 40)
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25)
    found = adjusted(logits, params, Adjustment([5, 5, 6, 6, 7], 2), [[], [6, 8]])
    expected = torch.zeros(2, 40)
    expected[0, 6], expected[0, 7] = -1.5, -1.25
    expected[1, 6], expected[1, 7], expected[1, 8] = -1.75, -1.25, -1.25
    assert torch.equal(found, expected)


def test_a_mask_that_allows_end_tokens_alone_wins_over_min_tokens() -> None:
    """A text that is complete ends, even if it is short."""
    mask = np.zeros((2, 2), np.uint32)
    mask[0, 1], mask[1, 1] = 1 << 3, 1 << 3 | 1 << 4
    found = adjusted(torch.zeros(2, 40), SamplingParams(), Adjustment([1], 1, frozenset([35]), 9, mask), [[], []])
    assert [(row > -torch.inf).nonzero()[:, 0].tolist() for row in found] == [[35], [36]]


def test_top_tokens_of_a_row_without_any() -> None:
    """A refused guess may have such a row; its levels must still be levels."""
    found = top_tokens(torch.full((1, 20), -torch.inf), 8)
    assert ((found[:, 8:] >= 0) & (found[:, 8:] < LEVELS)).all()
