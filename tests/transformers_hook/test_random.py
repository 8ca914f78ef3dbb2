"""Random models, prompts and settings: `generate` with the hook gives what stock `generate` gives, or a known refusal.

A case that fails is named by a line that repeats it. `python tests/helpers/random_calls.py 1000-2000` searches further.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from marks import slow_but
from pairs import tokens_of
from random_calls import VOCABULARY, Case, MismatchError, random_case, reason, run_cases

import lookahead

CASES, FEW = 30, range(12)
REFUSED, FAILED = 0.25, 0.1
"""The largest shares of cases that the hook may refuse, and that stock itself may fail at."""


@pytest.mark.parametrize("numbers", slow_but([FEW, *(range(n, n + CASES) for n in range(0, 15 * CASES, CASES))], FEW))
def test_random_calls(numbers: range) -> None:
    outcomes, failures, compression = run_cases(numbers)
    assert not failures, "\n" + "\n".join(failures)
    assert sum(n for name, n in outcomes.items() if name.startswith("refused")) <= REFUSED * len(numbers), outcomes
    assert sum(n for name, n in outcomes.items() if name.startswith("stock fails")) <= FAILED * len(numbers), outcomes
    assert outcomes["tie"] <= 1, outcomes
    assert compression > 1.05  # guesses were accepted on the way


def test_a_number_names_a_case() -> None:
    assert str(random_case(7)) == str(random_case(7)) != str(random_case(8))


class Wrong(lookahead.Decoding):
    """The last token of every row is another one."""

    @functools.wraps(lookahead.Decoding.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        tokens = tokens_of(output)
        tokens[:, -1] = (tokens[:, -1] + 1) % VOCABULARY
        return output


def test_other_tokens_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(n for n in range(100) if (case := random_case(n)).family == "llama" and len(case.options) == 1)
    assert run_cases([number])[0] == {"same": 1}
    monkeypatch.setattr(Case, "hook", lambda self: Wrong(lookahead.LookaheadConfig()))
    outcomes, (failure,), _ = run_cases([number])
    assert outcomes == {"MISMATCH": 1}
    assert failure.startswith(f"python tests/helpers/random_calls.py {number}  # ")
    assert "scores are" in failure
    assert "\n" not in failure


def test_only_known_refusals_of_one_line_are_refusals() -> None:
    assert reason(ValueError("model type 'x' cannot be decoded exactly: because")) == "model"
    for error in (KeyError("x"), ValueError("cannot be decoded exactly:\nbecause"), ValueError("out of luck")):
        with pytest.raises(MismatchError):
            reason(error)
