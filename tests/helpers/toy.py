"""Toy models, and a stand-in for the backend that asks one about the path of every needed row. No weights."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from hypothesis import strategies as st
from reference import Model, argmax, norm

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.sampling import pick, top_tokens


def toy_model(vocabulary: int, seed: int, order: int | None = None, sharpness: float = 1.5) -> Model:
    """A random but fixed function from the last `order` tokens (None: from all) to a distribution.

    A short memory makes greedy text fall into a cycle, so that guesses are accepted.
    """

    @cache
    def distribution(context: tuple[int, ...]) -> list[float]:
        rng = random.Random(repr((seed, vocabulary, context)))
        return norm([math.exp(sharpness * rng.gauss(0, 1)) for _ in range(vocabulary)])

    def model(tokens: Sequence[int]) -> list[float]:
        return list(distribution(tuple(tokens if order is None else tokens[-order:])))

    return model


def counting_model(vocabulary: int) -> Model:
    """After token t comes t + 1: no token twice, and yet every guess from a text that counts is right."""
    return lambda tokens: norm([10.0 if t == (tokens[-1] + 1) % vocabulary else 0.1 for t in range(vocabulary)])


@st.composite
def settings_of_a_text(draw: st.DrawFn) -> tuple[Model, list[int], int]:
    """A toy model, a prompt in its vocabulary, and a number of tokens to generate."""
    vocabulary = draw(st.integers(5, 12))
    model = toy_model(vocabulary, draw(st.integers(0, 999)), draw(st.sampled_from([1, 2, 3, None])))
    prompt = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=12))
    return model, prompt, draw(st.integers(1, 24))


def rows_of(sequence: DecodingSequence, tree: TokenTree, model: Model) -> list[list[float]]:
    """The model's distribution after each needed row: it sees the text and the row's path, nothing else."""
    distributions = []
    for row in tree.needed:
        path, node = [], row
        while node >= 0:
            path.insert(0, tree.tokens[node])
            node = tree.parents[node]
        assert len(path) == tree.depths[row] + 1
        distributions.append(model(sequence.tokens[:-1] + path))
    return distributions


def targets_of(sequence: DecodingSequence, tree: TokenTree, model: Model) -> StepOutput:
    """What a backend would return for the tree."""
    distributions = rows_of(sequence, tree, model)
    if sequence.sampling.greedy and not sequence.wants_top:
        return StepOutput([argmax(P) for P in distributions])
    logits = torch.tensor(distributions, dtype=torch.float64).log()
    targets = pick(logits, sequence.sampling, sequence.uniforms(tree)).tolist()
    if not sequence.wants_top:
        return StepOutput(targets)
    return StepOutput(targets, top_tokens(logits, MAX_SUCCESSORS).numpy())


def steps(sequence: DecodingSequence, model: Model) -> Iterator[tuple[TokenTree, list[int]]]:
    """Run the sequence to its end; every step's tree and accepted tokens."""
    while sequence.finish_reason is None:
        tree = sequence.propose()
        assert len(tree) <= sequence.config.budget
        sequence.learn_while_running()
        verdict = sequence.accept_step(tree, targets_of(sequence, tree, model))
        sequence.count_step(tree, verdict)
        assert [tree.tokens[node] for node in verdict.path] == verdict.tokens[:-1]
        yield tree, verdict.tokens


def decode(sequence: DecodingSequence, model: Model) -> list[int]:
    """Run the sequence to its end. Returns how many tokens each step accepted."""
    return [len(tokens) for _, tokens in steps(sequence, model)]
