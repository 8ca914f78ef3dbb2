"""Paper mode of the engine against Algorithm 2: the same tokens, in the same steps, for any W, N and G.

No weights: a stand-in for the backend asks a toy model about the path of every needed row.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples
from reference import Model, Result, autoregressive, lookahead
from toy import decode, settings_of_a_text, toy_model

from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.sources.pool import NGramPool
from lookahead.algorithm.window import Window
from lookahead.backends.sampling import draw
from lookahead.config import LookaheadConfig, SamplingParams, StopRules


def reference(prompt: list[int], model: Model, W: int, N: int, G: int, m: int, **pool: bool) -> Result:
    """Algorithm 2 with the engine's two choices: where the window starts, and that skipped tokens leave it as it is."""
    start = Window(W, N, prompt).rows
    return lookahead(prompt, model, W, N, G, m, rng=random.Random(0), on_skip="keep", start=start, **pool)


@settings(max_examples=examples(500), deadline=None)
@given(settings_of_a_text(), st.integers(0, 8), st.integers(2, 6), st.integers(0, 8), st.booleans())
@example((toy_model(6, 3, order=1), [1, 2], 24), 0, 2, 0, False)
@example((toy_model(6, 3, order=1), [1, 2], 24), 1, 2, 1, False)
@example((toy_model(6, 3, order=1), [1], 24), 8, 6, 8, True)
@example((toy_model(6, 3, order=2), [1, 2, 1, 2, 1, 2], 24), 0, 3, 1, True)
def test_paper_mode_is_algorithm_2(text, W, N, G, prompt_as_reference):
    model, prompt, m = text
    config = LookaheadConfig.paper(W, N, G, prompt=prompt_as_reference)
    sequence = DecodingSequence(prompt, config, rules=StopRules(max_tokens=m))
    accepted = decode(sequence, model)

    expected = reference(prompt, model, W, N, G, m, prompt_as_reference=prompt_as_reference)
    assert sequence.output == expected.tokens == autoregressive(prompt, model, m)
    assert accepted == expected.accepted
    assert sequence.stats.steps == expected.steps


def agrees(model: Model, prompt: list[int], W: int, N: int, G: int, m: int, **pool: bool) -> bool:
    """Whether engine and reference accept the same tokens in the same steps. The sources are those in Python."""
    config = LookaheadConfig.paper(W, N, G, prompt=pool.get("prompt_as_reference", False))
    memory = SharedMemory(PythonDrafter())
    sequence = DecodingSequence(prompt, config, rules=StopRules(max_tokens=m), memory=memory)
    accepted = decode(sequence, model)
    expected = reference(prompt, model, W, N, G, m, **pool)
    assert expected.steps < m, "nothing was guessed right, so nothing is compared"
    return (sequence.output, accepted) == (expected.tokens, expected.accepted)


@pytest.mark.parametrize("prompt_as_reference", [False, True])
def test_a_long_text(prompt_as_reference):
    """Long enough for the pool to forget: more than G n-grams begin with each token."""
    model = toy_model(12, seed=4)
    assert agrees(model, [5, 0, 7, 7], 6, 3, 3, 200, prompt_as_reference=prompt_as_reference)


ADD, LOOKUP = NGramPool.add, NGramPool.lookup


def keep_duplicates_old(pool: NGramPool, ngram: tuple[int, ...], feeder: str) -> None:
    if ngram[1:] not in pool.lookup(ngram[0]):
        ADD(pool, ngram, feeder)


ENGINE_BUGS = {
    "the window never rolls": (Window, "roll", lambda self, new: None),
    "the first place is stale": (
        Window,
        "ngrams",
        lambda self, root, new: list(zip(*self.rows, new, strict=True)),
    ),
    "fewer than G guesses": (NGramPool, "lookup", lambda self, *key: LOOKUP(self, *key)[:2]),
    "an n-gram found again stays old": (NGramPool, "add", keep_duplicates_old),
}


@pytest.mark.parametrize("bug", ENGINE_BUGS)
@pytest.mark.thinned(1, most=2)
def test_a_wrong_engine_is_caught(bug, monkeypatch):
    """The steps' sizes are a sharp measure: a slip that leaves every token right still shows in them."""
    text = toy_model(5, seed=4), [2, 0, 4, 4], 6, 3, 3, 200
    assert agrees(*text)
    monkeypatch.setattr(*ENGINE_BUGS[bug])
    assert not agrees(*text)


@settings(max_examples=examples(60), deadline=None)
@given(settings_of_a_text(), st.integers(0, 8), st.integers(2, 6), st.integers(0, 8), st.integers(0, 99))
def test_sampling_is_autoregressive_with_the_same_uniforms(text, W, N, G, seed):
    model, prompt, m = text
    config = LookaheadConfig.paper(W, N, G, prompt=True)
    sequence = DecodingSequence(prompt, config, SamplingParams(temperature=1.0, seed=seed), StopRules(max_tokens=m))
    decode(sequence, model)

    rng, expected = random.Random(seed), list(prompt)
    for _ in range(m):
        probs = torch.tensor([model(expected)], dtype=torch.float64)
        expected += draw(probs, torch.tensor([rng.random()], dtype=torch.float64)).tolist()
    assert sequence.tokens == expected
