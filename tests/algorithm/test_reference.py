"""The reference against plain decoding, and the law of both sampling rules by chi-square, on toy models.

Each law is also tested on rules with a planted bug, which the statistic must refuse: a test that cannot fail
shows nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, slow_but
from reference import (
    Model,
    argmax,
    autoregressive,
    greedy_verification,
    jacobi,
    lookahead,
    norm,
    sample,
    sample_verification,
)
from toy import settings_of_a_text, toy_model

from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import accept
from lookahead.backends.sampling import draw, pick
from lookahead.config import SamplingParams


@settings(max_examples=examples(250), deadline=None)
@given(
    settings_of_a_text(),
    st.integers(0, 6),
    st.integers(2, 5),
    st.integers(0, 5),
    st.sampled_from(["random", "keep"]),
    st.booleans(),
    st.integers(0, 9),
)
def test_greedy_lookahead_is_autoregressive(text, W, N, G, on_skip, prompt_as_reference, seed):
    model, prompt, m = text
    result = lookahead(
        prompt, model, W, N, G, m,
        rng=random.Random(seed), on_skip=on_skip, prompt_as_reference=prompt_as_reference,
    )  # fmt: skip
    assert result.tokens == autoregressive(prompt, model, m)
    assert sum(result.accepted) == m
    assert all(1 <= count <= N for count in result.accepted)
    if G == 0 or (W == 0 and not prompt_as_reference):
        assert result.steps == m


@settings(max_examples=examples(60), deadline=None)
@given(settings_of_a_text(), st.integers(0, 9))
def test_jacobi_is_autoregressive(text, seed):
    model, prompt, m = text
    tokens, iterations = jacobi(prompt, model, m, rng=random.Random(seed))
    assert tokens == autoregressive(prompt, model, m)
    assert 1 <= iterations <= m


@pytest.mark.parametrize("on_skip", ["random", "keep"])
def test_lookahead_saves_steps_where_text_repeats(on_skip):
    """The comparisons above mean something only if guesses are accepted, whole n-grams among them."""
    model = toy_model(8, seed=1, order=1)
    result = lookahead([3, 1, 4], model, 5, 4, 5, 40, rng=random.Random(0), on_skip=on_skip)
    assert result.steps <= 20
    assert max(result.accepted) == 4


def test_jacobi_saves_iterations_where_text_repeats():
    """A model whose memory is one token deep and whose favourite never changes is solved at once."""
    _, iterations = jacobi([0], lambda tokens: [0.1, 0.9], 16, rng=random.Random(0))
    assert iterations == 2


def test_greedy_verification_by_hand():
    """After 0 comes 1, then 2, then 3: the guesses are refused, right for a part, and right as a whole."""
    model: Model = lambda tokens: [float(token == tokens[-1] + 1) for token in range(6)]  # noqa: E731
    assert greedy_verification([0], model, []) == [1]
    assert greedy_verification([0], model, [(0, 2, 3)]) == [1]
    assert greedy_verification([0], model, [(0, 2, 2), (0, 1, 4)]) == [1, 2]
    assert greedy_verification([0], model, [(0, 1, 4), (0, 3, 3), (0, 1, 2)]) == [1, 2, 3]


# The law of sampling: N = 3 and five tokens. The guesses share first tokens, and one comes twice.

V, N = 5, 3
MODEL = toy_model(V, seed=5, sharpness=0.8)
PREFIX = [0, 3, 1, 0, 1, 2, 0]
GUESSES = [(0, 3, 1), (0, 1, 2), (0, 3, 4), (0, 1, 0), (0, 3, 1)]
DRAWS = 20_000


def law(length: int) -> dict[tuple[int, ...], float]:
    """The model's joint distribution of the next `length` tokens."""
    cells = {}
    for tokens in itertools.product(range(V), repeat=length):
        steps = [MODEL([*PREFIX, *tokens[:i]])[token] for i, token in enumerate(tokens)]
        cells[tokens] = math.prod(steps)
    return cells


def upper_tail(statistic: float, freedom: int) -> float:
    """P(chi-square > statistic), exactly, for an even number of degrees of freedom: a Poisson sum."""
    assert freedom % 2 == 0
    terms = itertools.accumulate(range(1, freedom // 2), lambda term, k: term * statistic / 2 / k, initial=1.0)
    return math.exp(-statistic / 2) * sum(terms)


def test_upper_tail():
    """Entries of a printed table."""
    assert upper_tail(9.488, 4) == pytest.approx(0.05, rel=1e-3)
    assert upper_tail(51.179, 24) == pytest.approx(0.001, rel=1e-3)


def p_value(texts: Sequence[Sequence[int]], length: int) -> float:
    """Pearson's test of the first `length` tokens against the model's law."""
    counts = Counter(tuple(text[:length]) for text in texts)
    expected = {cell: p * len(texts) for cell, p in law(length).items()}
    assert min(expected.values()) > 5, "too few draws for a chi-square test"
    statistic = sum((counts[cell] - mean) ** 2 / mean for cell, mean in expected.items())
    return upper_tail(statistic, len(expected) - 1)


def least_p_value(texts: Sequence[Sequence[int]]) -> float:
    """The worst of three tests: of the first token, of the first two, of all N."""
    return min(p_value(texts, length) for length in range(1, N + 1))


def follows_the_law(texts: Sequence[Sequence[int]]) -> bool:
    """The seeds are fixed: a right rule passed at 1e-3 once and for all, a wrong one is far beyond 1e-9."""
    p = least_p_value(texts)
    assert p > 1e-3 or p < 1e-9, f"p = {p:.2g} decides nothing; draw more"
    return p > 1e-3


def completed(verification: Callable[..., list[int]], seed: int) -> list[list[int]]:
    """Many outcomes of a verification; one that ended early is continued without guesses."""
    rng = random.Random(seed)
    texts = []
    for _ in range(DRAWS):
        tokens = verification(PREFIX, MODEL, GUESSES, rng)
        assert 1 <= len(tokens) <= N
        while len(tokens) < N:
            tokens += sample_verification([*PREFIX, *tokens], MODEL, [], rng)
        texts.append(tokens)
    return texts


def algorithm_4(x, model, guesses, rng, bug: str | None = None) -> list[int]:
    """Algorithm 4 once more, with a place for each bug."""
    live = [g[1:] for g in guesses]
    tokens: list[int] = []
    while live and len(tokens) < N - 1:
        i = len(tokens)
        P = norm(model([*x, *live[0][:i]]))
        for guess in live:
            r = 1 - rng.random()
            if r <= P[guess[i]] * (2 if bug == "accepts twice as often" else 1):
                tokens.append(guess[i])
                if bug != "keeps guesses that disagree":
                    live = [g for g in live if g[i] == guess[i]]
                break
            if bug != "may draw a refused token":
                P[guess[i]] = 0.0
            if bug != "does not renormalise":
                P = norm(P)
        else:
            return [*tokens, sample(P, rng)]
    known = live[0][: N - 2] if bug == "takes the bonus token one row early" else live[0]
    return [*tokens, sample(model([*x, *known]), rng)]


ALGORITHM_4_BUGS = [
    "accepts twice as often",
    "keeps guesses that disagree",
    "may draw a refused token",
    "does not renormalise",
    "takes the bonus token one row early",
]


@pytest.mark.slow
def test_sample_verification_follows_the_law():
    texts = completed(sample_verification, seed=1)
    assert follows_the_law(texts)
    assert texts[:500] == completed(algorithm_4, seed=1)[:500], "the twin that takes the bugs is not Algorithm 4"


@pytest.mark.parametrize("bug", ALGORITHM_4_BUGS)
@pytest.mark.thinned(1, most=1)
def test_a_wrong_sample_verification_is_caught(bug):
    assert not follows_the_law(completed(partial(algorithm_4, bug=bug), seed=1))


def test_sample_verification_of_sure_tokens():
    """A model that is sure leaves no choice, and a guess of probability 0 never passes."""
    model: Model = lambda tokens: [float(token == tokens[-1] + 1) for token in range(6)]  # noqa: E731
    rng = random.Random(0)
    assert sample_verification([0], model, [(0, 2, 3), (0, 1, 2)], rng) == [1, 2, 3]
    assert sample_verification([0], model, [(0, 2, 3)], rng) == [1]


@pytest.mark.parametrize("on_skip", slow_but(["random", "keep"], "random"))
def test_lookahead_with_sample_verification_follows_the_law(on_skip):
    """The whole of Algorithm 2. The pool knows the prompt, so that the first step has guesses to verify."""
    draws, texts = random.Random(7), []
    for _ in range(DRAWS):
        result = lookahead(
            PREFIX, MODEL, 1, N, 3, N,
            rng=random.Random(0), verification=partial(sample_verification, rng=draws),
            on_skip=on_skip, prompt_as_reference=True,
        )  # fmt: skip
        texts.append(result.tokens)
    assert follows_the_law(texts)


# Our rule: one uniform per output position, inverse CDF, and the targets followed down the tree.


def guess_tree() -> TokenTree:
    """The guesses as a trie below the root."""
    tree = TokenTree(tokens=[PREFIX[-1]], parents=[-1], depths=[0], needed=[0])
    for guess in GUESSES:
        node = 0
        for token in guess[1:]:
            known = [n for n in range(1, len(tree)) if tree.parents[n] == node and tree.tokens[n] == token]
            if not known:
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.depths.append(tree.depths[node] + 1)
                known = [len(tree.tokens) - 1]
            node = known[0]
    return TokenTree(tree.tokens, tree.parents, tree.depths, range(len(tree.tokens)))


def path(tree: TokenTree, node: int) -> list[int]:
    """The tokens from below the root to a node."""
    return [*path(tree, tree.parents[node]), tree.tokens[node]] if node else []


def by_tree(bug: str | None = None, temperature: float | None = None) -> list[list[int]]:
    """Many outcomes of `draw` (or of `pick`, given a temperature) and `accept` on the tree of guesses."""
    tree = guess_tree()
    rows = torch.tensor([MODEL([*PREFIX, *path(tree, node)]) for node in tree.needed], dtype=torch.float64)

    def tokens_of(probs: torch.Tensor, uniforms: list[float]) -> list[int]:
        if temperature is not None:
            logits = temperature * probs.log() + 3.0
            return pick(logits, SamplingParams(temperature=temperature), uniforms).tolist()
        if bug == "one token too far":
            cdf = probs.cumsum(-1)
            found = torch.searchsorted(cdf, torch.tensor(uniforms, dtype=torch.float64)[:, None])[:, 0] + 1
            return found.clamp(max=V - 1).tolist()
        if bug == "swaps two tokens":
            probs = probs[:, [1, 0, *range(2, V)]]
        return draw(probs, torch.tensor(uniforms, dtype=torch.float64)).tolist()

    rng = random.Random(11)
    uniforms = [[rng.random() for _ in range(N)] for _ in range(DRAWS)]
    if bug == "one uniform for two positions":
        uniforms = [[u[0], u[0], u[2]] for u in uniforms]
    if bug == "uniforms below one half":
        uniforms = [[u / 2 for u in three] for three in uniforms]
    wanted = [u[tree.depths[node]] for u in uniforms for node in tree.needed]
    targets = tokens_of(rows.repeat(DRAWS, 1), wanted)

    texts = []
    for i in range(DRAWS):
        these = targets[i * len(tree) : (i + 1) * len(tree)]
        if bug == "targets of the neighbouring row":
            these = [these[0], *these[2:], these[1]]
        texts.append(accept(tree, these)[1])
    while unfinished := [i for i in range(DRAWS) if len(texts[i]) < N]:
        probs = [MODEL([*PREFIX, *texts[i]]) for i in unfinished]
        wanted = [uniforms[i][len(texts[i])] for i in unfinished]
        for i, token in zip(unfinished, tokens_of(torch.tensor(probs, dtype=torch.float64), wanted), strict=True):
            texts[i].append(token)
    return texts


OUR_BUGS = [
    "one token too far",
    "swaps two tokens",
    "one uniform for two positions",
    "uniforms below one half",
    "targets of the neighbouring row",
]


@pytest.mark.parametrize("temperature", [None, 1.0, 0.7])
@pytest.mark.thinned(1, most=1)
def test_our_sampling_follows_the_law(temperature):
    assert follows_the_law(by_tree(temperature=temperature))


@pytest.mark.parametrize("bug", OUR_BUGS)
@pytest.mark.thinned(1, most=1)
def test_a_wrong_sampling_is_caught(bug):
    assert not follows_the_law(by_tree(bug))


def test_our_sampling_is_autoregressive_token_for_token():
    """Stronger than the law: the tree does not matter, the position's uniform alone decides."""
    rng = random.Random(11)
    for text in by_tree()[:1000]:
        expected: list[int] = []
        for _ in range(N):
            P, u = MODEL([*PREFIX, *expected]), rng.random()
            expected.append(sum(u >= c for c in itertools.accumulate(P)))
        assert text == expected


def test_draw_at_the_edges():
    """No uniform in [0, 1) yields a token of probability 0: what a chi-square test is too coarse to see."""
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    below_one = math.nextafter(1.0, 0.0)
    for uniform, token in [(0.0, 1), (math.nextafter(0.5, 0.0), 1), (0.5, 3), (below_one, 3)]:
        assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_argmax_takes_the_first_of_equals():
    assert argmax([0.2, 0.4, 0.4]) == 1
