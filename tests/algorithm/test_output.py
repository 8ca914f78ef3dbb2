"""Outputs that are read out of a step's results, in one array."""

from __future__ import annotations

from ctypes import memmove

import numpy as np

from lookahead.algorithm.output import StepOutput, StepResults, best_tokens

ROWS = np.array([[7, 1, 2, 3, 10, 11, 12], [8, 4, 5, 6, 13, 14, 15], [9, 0, 0, 0, 0, 0, 0]], dtype=np.int32)


def test_targets_and_top_tokens_are_read_when_they_are_there() -> None:
    results = StepResults(np.empty_like(ROWS))
    first, second = StepOutput.of_results(results, 0, 2, 2), StepOutput.of_results(results, 2, 3, 0)
    memmove(results.address, ROWS.ctypes.data, ROWS.nbytes)  # where the device's results are copied to
    assert first.targets == [7, 8]
    assert first.targets is first.targets
    assert first.top is not None
    assert first.top.tolist() == [[1, 2, 10, 11], [4, 5, 13, 14]]
    assert first.top is first.top
    assert (second.targets, second.top) == ([9], None)


def test_all_top_tokens_are_given_where_more_are_asked_for() -> None:
    assert best_tokens(ROWS, 3).tolist() == best_tokens(ROWS, 8).tolist() == ROWS[:, 1:].tolist()


def test_an_output_of_its_own_has_no_results_in_one_array() -> None:
    output = StepOutput([1, 2])
    assert output.targets == [1, 2]
    assert output.top is output.logits is output.likely is output.logprobs is None
    assert output.results is None
