"""Bootstrap intervals: of what they are, and how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.bench.run.intervals import interval_text, middle, ratio_interval


def test_one_prompt_has_no_interval_and_equal_prompts_a_point() -> None:
    assert ratio_interval([(8, 2)]) is None
    assert ratio_interval([(8, 2)] * 5) == (4.0, 4.0)
    assert interval_text(None) == interval_text((4.0, 4.0)) == ""
    assert interval_text((1.234, 2.345)) == " (1.23-2.35)"


def test_it_holds_the_ratio_and_shrinks_with_more_prompts() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for count in (10, 160):
        steps = rng.integers(40, 60, count)
        parts = [(float(n * rng.uniform(2, 4)), float(n)) for n in steps]
        low, high = ratio_interval(parts) or (0.0, 0.0)
        assert low < sum(a for a, _ in parts) / sum(b for _, b in parts) < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2.5


def test_it_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Of 200 samples of 40 prompts whose expected ratio is 3. A percentile interval of 40 is a little too narrow."""
    rng, held = np.random.default_rng(2), 0
    for _ in range(200):
        parts = [(float(3 * n + rng.normal(0, 30)), float(n)) for n in rng.integers(40, 60, 40)]
        low, high = ratio_interval(parts) or (0.0, 0.0)
        held += low < 3 < high
    assert 178 <= held <= 199


def test_the_middle() -> None:
    assert middle(list(range(1001))) == pytest.approx((25, 975))
