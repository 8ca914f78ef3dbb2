"""The law's formulas against the process they describe, drawn with fixed seeds; and fits of known laws."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from lookahead.tune.scaling_law import (
    PAPER,
    Point,
    ScalingLaw,
    candidates,
    expected_tokens,
    fit,
)

DRAWS = 20_000


def within_error(draws: list[int], expected: float) -> bool:
    """Four standard errors: wrong once in 16,000, and never with these seeds."""
    return abs(fmean(draws) - expected) <= 4 * stdev(draws) / math.sqrt(len(draws))


def simulated_tokens(alpha: float, gamma: int, b: int, rng: random.Random) -> int:
    """One step of the process that the law states, drawn token by token: the longest right beginning, and one more."""
    longest = 0
    for _ in range(b):
        right = 0
        while right < gamma and rng.random() < alpha:
            right += 1
        longest = max(longest, right)
    return longest + 1


@pytest.mark.parametrize(("alpha", "gamma"), [(0.1, 1), (0.425, 4), (0.8, 7), (0.95, 16)])
def test_one_candidate_is_what_the_process_gives(alpha: float, gamma: int) -> None:
    rng = random.Random(1)
    draws = [simulated_tokens(alpha, gamma, 1, rng) for _ in range(DRAWS)]
    expected = expected_tokens(alpha, gamma)
    assert expected == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert within_error(draws, expected)


@pytest.mark.parametrize(("alpha", "gamma", "b"), [(0.425, 4, 15), (0.2, 3, 5), (0.7, 9, 2), (0.05, 6, 30)])
@pytest.mark.thinned(1, most=2)
def test_b_candidates_are_what_the_process_gives(alpha: float, gamma: int, b: int) -> None:
    rng = random.Random(2)
    draws = [simulated_tokens(alpha, gamma, b, rng) for _ in range(DRAWS)]
    assert within_error(draws, expected_tokens(alpha, gamma, b))
    assert not within_error(draws, expected_tokens(alpha, gamma, b + 1))  # the test can tell


@pytest.mark.parametrize("law", [PAPER, ScalingLaw(0.6, 1.0), ScalingLaw(0.3, 8.0)])
def test_s_is_what_the_process_gives(law: ScalingLaw) -> None:
    """One step in f has good guesses; which ones is drawn, too."""
    rng = random.Random(3)
    draws = [simulated_tokens(law.alpha, 4, 10, rng) if rng.random() * law.f < 1 else 1 for _ in range(DRAWS)]
    assert within_error(draws, law.compression(4, 10))


def test_the_ends() -> None:
    assert expected_tokens(0.0, 5, 9) == 1
    assert expected_tokens(1.0, 5, 1) == 6
    assert expected_tokens(0.5, 0, 3) == 1
    assert PAPER.predict(0, 5, 0) == 1
    assert PAPER.predict(5, 5, 0) == 1


@pytest.mark.parametrize(("n_w_g", "s"), [((5, 15, 15), 1.96), ((5, 30, 1), 1.79)])
def test_the_papers_law_gives_its_table(n_w_g: tuple[int, int, int], s: float) -> None:
    """Table 4, without prompt n-grams, from the alpha and f of Figure 4."""
    ngram, window, guesses = n_w_g
    assert PAPER.predict(window, ngram, guesses) == pytest.approx(s, abs=0.03)


def test_more_guesses_than_the_window_makes_are_no_more() -> None:
    assert candidates(4, 40) == candidates(4, 4) == 4
    assert 1 < candidates(30, 1) < candidates(30, 15) < candidates(30, 30) == 30


def test_s_grows_with_log_b_and_has_no_bound() -> None:
    """Section 4: with long guesses S is linear in log b. With one candidate it is bounded by 1 / (1 - alpha)."""
    values = [PAPER.compression(200, 2.0**i) for i in range(4, 12)]
    steps = [b - a for a, b in pairwise(values)]
    assert max(steps) - min(steps) < 0.02
    assert expected_tokens(0.425, 200, 1) == pytest.approx(1 / (1 - 0.425))


SHAPES = [(2, 3, 2), (5, 3, 5), (5, 5, 5), (15, 5, 15), (30, 7, 30)]


@pytest.mark.parametrize("law", [PAPER, ScalingLaw(0.2, 1.5), ScalingLaw(0.7, 6.0)])
def test_a_fit_finds_the_law_that_made_the_points(law: ScalingLaw) -> None:
    found = fit([Point(*shape, law.predict(*shape)) for shape in SHAPES])
    assert (found.alpha, found.f) == (pytest.approx(law.alpha, abs=1e-4), pytest.approx(law.f, rel=1e-3))


def test_a_fit_of_disturbed_points_predicts_other_shapes() -> None:
    rng = random.Random(4)
    law = ScalingLaw(0.35, 2.5)
    found = fit([Point(*shape, law.predict(*shape) * rng.uniform(0.97, 1.03)) for shape in SHAPES])
    for shape in [(8, 4, 8), (20, 6, 20), (10, 5, 3)]:
        assert found.predict(*shape) == pytest.approx(law.predict(*shape), rel=0.04)


def test_one_shape_leaves_alpha_alone() -> None:
    found = fit([Point(5, 5, 5, 1.4), Point(5, 5, 5, 1.5)])
    assert found.alpha == PAPER.alpha
    assert found.predict(5, 5, 5) == pytest.approx(1.45)


def test_trust_holds_alpha_where_points_say_little() -> None:
    """Two shapes that give almost the same S, by chance: the fit alone would explain them with hardly any alpha."""
    points = [Point(4, 3, 4, 1.47), Point(7, 5, 7, 1.50)]
    alone, held = fit(points), fit(points, trust=0.25)
    assert alone.alpha < held.alpha < PAPER.alpha
    assert abs(held.predict(4, 3, 4) - 1.47) < 0.15


def test_nothing_measured_is_the_prior_and_nothing_accepted_is_one() -> None:
    assert fit([]) == PAPER
    assert fit([Point(5, 5, 5, 1.0), Point(5, 3, 5, 1.0)]).predict(15, 5, 15) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("alpha", "f"), [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.9), (0.5, math.inf)])
def test_a_law_refuses_what_is_no_law(alpha: float, f: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        ScalingLaw(alpha, f)
