"""The screened head: the argmax of the full head, for every head and every row, or a row that is not certain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxruntime")

from described import matrix as matrix_of
from tiny import PROMPTS, outputs, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.cpu import screen
from lookahead.backends.cpu.backend import CpuBackend
from lookahead.backends.cpu.heads import Heads
from lookahead.backends.cpu.screen import CANDIDATES, MOST_SCREENED
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.loading.formats import quantised_copy
from lookahead.models.read import read
from lookahead.models.reference import forward

Plain = Callable[[Any, Sequence[int], int], list[int]]
AUTOREGRESSIVE = LookaheadConfig.autoregressive()
KINDS = ("random", "duplicates", "near ties", "large channels", "few directions", "one large weight")


@pytest.fixture(autouse=True, scope="module")
def screen_every_head() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "LEAST_WEIGHTS", 0)
        yield


def heads(matrix: Any, cap: float | None = None) -> Heads:
    made = Heads(matrix_of(np.ascontiguousarray(matrix, dtype=np.float32)), threads=1, cap=cap)
    assert made.screened is not None
    return made


def random_case(kind: str, tokens: int, width: int, rows: int, seed: int) -> tuple[Any, Any]:
    """A head [tokens, width] and hidden states [rows, width] of a kind that is hard to screen."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((tokens, width)).astype(np.float32)
    hidden = rng.standard_normal((rows, width)).astype(np.float32)
    if kind == "duplicates":
        matrix = matrix[rng.integers(0, max(2, tokens // 40), tokens)]
    elif kind == "near ties":  # all tokens differ in the last bits alone
        matrix = matrix[:1] * (1 + rng.integers(-3, 4, (tokens, width)) * np.float32(2**-23))
    elif kind == "large channels":
        hidden[:, : 1 + width // 50] *= 100
    elif kind == "few directions":  # the best tokens are close to each other
        matrix = hidden[rng.integers(0, rows, tokens)] + matrix * np.float32(0.001)
    elif kind == "one large weight":  # the other weights of a token become 0, 1 or -1
        matrix[np.arange(tokens), rng.integers(0, width, tokens)] *= 60
    return np.ascontiguousarray(matrix, dtype=np.float32), hidden


@hypothesis.settings(deadline=None)  # each example makes two sessions
@given(
    st.sampled_from(KINDS),
    st.integers(CANDIDATES + 1, 700),
    st.sampled_from((2, 31, 64, 256, 257, 576)),
    st.integers(1, MOST_SCREENED),
    st.integers(0, 1 << 30),
)
def test_the_argmax_is_the_full_heads(kind: str, tokens: int, width: int, rows: int, seed: int) -> None:
    """Ties included. A row that is not certain gets its tokens from the full head."""
    matrix, hidden = random_case(kind, tokens, width, rows, seed)
    made = heads(matrix)
    logits = made.full.run(hidden, 1).logits.numpy().copy()
    found, certain = made.screened.run(hidden, 8)
    best = logits.argmax(axis=1)
    assert (found.ids[certain, 0] == best[certain]).all()
    assert np.array_equal(found.values, np.take_along_axis(logits, found.ids, axis=1))
    either = made.run(hidden, 8, logits=False)
    assert either.ids[:, 0].tolist() == best.tolist()
    assert np.array_equal(either.values[:, 0], logits.max(axis=1))
    for row in range(rows):
        alone, still = made.screened.run(hidden[row : row + 1], 8)
        assert np.array_equal(alone.values[0], found.values[row])
        assert still[0] == certain[row]


def hidden_by_rounding(others: int = 2 * CANDIDATES, width: int = 64) -> tuple[Any, Any]:
    """A head whose best token is the last one, although its approximate logit is 0: one large weight, which meets a
    zero, makes the steps of its copy so wide that all other weights are rounded to 0."""
    best = np.r_[1000, np.full(width - 1, 3.9)]
    rest = np.c_[np.zeros(others), np.full((others, width - 1), 3) + np.arange(others)[:, None] / 1000]
    return np.vstack([rest, best]), np.r_[0, np.ones(width - 1)][None].astype(np.float32)


def test_the_bound_finds_a_token_that_rounding_hides() -> None:
    matrix, hidden = hidden_by_rounding()
    found, certain = heads(matrix).screened.run(hidden, 1)
    assert (found.ids[0, 0], certain[0]) == (len(matrix) - 1, True)


def test_without_the_bound_that_token_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "errors_of", lambda matrix, copy: np.zeros((2, len(matrix)), np.float32))
    matrix, hidden = hidden_by_rounding()
    found, certain = heads(matrix).screened.run(hidden, 1)
    assert (found.ids[0, 0], certain[0]) == (len(matrix) - 2, True)


def test_more_equals_than_candidates_are_not_certain() -> None:
    matrix = np.ones((CANDIDATES + 9, 16))
    matrix[:3] = 0.5
    made = heads(matrix)
    hidden = np.ones((2, 16), np.float32)
    assert not made.screened.run(hidden, 1)[1].any()
    assert made.run(hidden, 4, logits=False).ids.tolist() == [[3, 4, 5, 6]] * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_not_certain(bad: float) -> None:
    matrix, hidden = random_case("random", 200, 32, 3, seed=1)
    hidden[1, 4] = bad
    assert heads(matrix).screened.run(hidden, 1)[1].tolist() == [True, False, True]


def test_all_logits_many_rows_and_many_top_tokens_take_the_full_head() -> None:
    matrix, hidden = random_case("random", 200, 32, MOST_SCREENED + 1, seed=2)
    made = heads(matrix)
    assert made.run(hidden[:2], 1, logits=False).logits is None
    assert made.run(hidden[:2], 1, logits=True).logits.shape == (2, 200)
    assert made.run(hidden, 1, logits=False).logits.shape == (MOST_SCREENED + 1, 200)
    assert made.run(hidden[:2], CANDIDATES + 1, logits=False).ids.shape == (2, CANDIDATES + 1)


# Scaled and capped logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.02, 0.5, 30.0])
@pytest.mark.thinned(1, most=6)
def test_the_argmax_of_capped_logits_is_the_full_heads(kind: str, size: float) -> None:
    """Of logits in the linear part of the tanh, in the bent one, and where it makes most of them equal."""
    matrix, hidden = random_case(kind, 500, 64, MOST_SCREENED, seed=7)
    hidden *= np.float32(size / np.abs(hidden @ matrix.T).max(axis=1).mean())
    made = heads(matrix, cap=4.0)
    full = made.full.run(hidden, 8)
    logits = full.logits.numpy().copy()
    expected = 4 * np.tanh(hidden.astype(np.float64) @ matrix.T.astype(np.float64))
    assert np.allclose(logits, expected, atol=1e-5)
    either = made.run(hidden, 8, logits=False)
    assert np.array_equal(either.ids[:, 0], full.ids[:, 0])
    assert np.array_equal(either.values[:, 0], full.values[:, 0])
    found, certain = made.screened.run(hidden, 8)
    assert np.array_equal(found.values, np.take_along_axis(logits, found.ids, axis=1))
    assert np.allclose(found.total[certain], full.total[certain], rtol=0.1)


def test_equal_capped_logits_are_not_certain() -> None:
    """The first token has the largest upper logit, but all tokens are equal under the cap. The lowest id wins."""
    matrix = np.ones((300, 16))
    matrix[200] = 9
    made, hidden = heads(matrix, cap=2.0), np.full((1, 16), 4, np.float32)
    assert not made.screened.run(hidden, 1)[1].any()
    assert made.run(hidden, 1, logits=False).ids.tolist() == [[0]]
    assert heads(matrix).run(hidden, 1, logits=False).ids.tolist() == [[200]]


def test_a_bias_is_scaled_as_the_states_are() -> None:
    matrix, hidden = random_case("random", 200, 32, 2, seed=5)
    bias = np.linspace(-5, 5, 200, dtype=np.float32)
    made = Heads(matrix_of(matrix, bias), threads=1, scale=0.2, cap=5.0)
    expected = 5 * np.tanh((hidden @ matrix.T + bias) * np.float32(0.2))
    assert np.allclose(made.run(hidden * np.float32(0.2), 1, logits=False).logits, expected, atol=1e-4)


# The check at load


def test_a_head_that_adds_in_another_order_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, _ = random_case("random", 200, 576, 1, seed=3)
    monkeypatch.setattr(screen, "PIECE", 64)
    assert Heads(matrix_of(matrix), threads=1).screened is None


def test_a_small_head_is_not_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, _ = random_case("random", 200, 32, 1, seed=4)
    monkeypatch.setattr(screen, "LEAST_WEIGHTS", matrix.size + 1)
    assert Heads(matrix_of(matrix), threads=1).screened is None
    monkeypatch.setattr(screen, "LEAST_WEIGHTS", 0)
    assert Heads(matrix_of(matrix[:CANDIDATES]), threads=1).screened is None


def test_a_head_with_a_bias_is_not_screened() -> None:
    matrix, hidden = random_case("random", 200, 32, 2, seed=5)
    bias = np.linspace(-50, 50, 200, dtype=np.float32)
    made = Heads(matrix_of(matrix, bias), threads=1)
    assert made.screened is None
    assert np.allclose(made.run(hidden, 1, logits=False).logits, hidden @ matrix.T + bias, atol=1e-4)


# In the backend


@cache
def model() -> Any:
    return tiny("Llama", vocab_size=300)


class Counted(CpuBackend):
    """Counts the runs of each head."""

    def __init__(self) -> None:
        super().__init__(model(), probed=False)
        self.runs = {"full": 0, "screened": 0}
        assert self._heads.screened is not None
        for name in self.runs:
            self._count(getattr(self._heads, name), name)

    def _count(self, head: Any, name: str) -> None:
        run = head.run

        def counted(*args: Any) -> Any:
            self.runs[name] += 1
            return run(*args)

        head.run = counted


def test_greedy_tokens_are_transformers_own(settings: LookaheadConfig, plain: Plain) -> None:
    made = Counted()
    small = settings.adapted(budget=MOST_SCREENED)
    expected = [plain(model(), p, 24) for p in PROMPTS]
    assert [outputs(made, [p], small)[0] for p in PROMPTS] == expected
    assert [outputs(made, [p], AUTOREGRESSIVE)[0] for p in PROMPTS] == expected
    assert made.runs["screened"] > 24
    assert made.runs["full"] == 0
    assert made.capabilities.kernels.endswith("screened head")


@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (0.25, 2.0), (-0.5, 3.0)])
@pytest.mark.thinned(1, most=1)
def test_screened_texts_of_scaled_and_capped_logits(scale: float, cap: float | None, settings: LookaheadConfig) -> None:
    """The screened head gives the tokens of the description, and the full head the same."""
    described = replace(read(model(), "cpu"), logit_scale=scale, logit_softcap=cap)
    made = CpuBackend(model(), probed=False, description=described)
    assert made._heads.screened is not None
    for prompt in PROMPTS[:2]:
        (text,) = outputs(made, [prompt], settings.adapted(budget=MOST_SCREENED))
        assert forward(described, prompt + text)[len(prompt) - 1 : -1].argmax(-1).tolist() == text
        assert outputs(made, [prompt], AUTOREGRESSIVE, 24, SamplingParams(1e-4, seed=1)) == [text]


def test_a_text_does_not_depend_on_the_head_that_its_neighbours_need(settings: LookaheadConfig) -> None:
    """A greedy sequence beside a sampled one: these steps have all logits. Alone it is screened."""
    made = Counted()
    alone = [outputs(made, [p], AUTOREGRESSIVE)[0] for p in PROMPTS]
    screened = made.runs["screened"]
    drawn = SamplingParams(0.9, seed=3)
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        engine = Engine(made)
        pair = []
        for sampling in (SamplingParams(), drawn):
            rules = StopRules(24, frozenset(), made.max_length)
            pair.append(DecodingSequence(prompt, settings, sampling, rules))
            engine.submit(Request(pair[-1]))
        while engine.running:
            engine.step()
        assert pair[0].output == expected
        assert pair[1].output == outputs(made, [prompt], AUTOREGRESSIVE, 24, drawn)[0]
    assert screened
    assert made.runs["full"]


def test_int8_has_the_full_head_alone() -> None:
    made = CpuBackend(quantised_copy(model(), "int8"), probed=False)
    assert made._heads.screened is None
    assert not made.capabilities.kernels.endswith("screened head")
