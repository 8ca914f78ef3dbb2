"""The paper's scaling law (section 4 and its appendix): how S grows with W, N and G.

A step verifies b guesses of gamma tokens; each token is right with probability alpha, given that those before it are.
One step in f has such guesses; the other f - 1 give one token, as plain decoding does. In the paper b = G = W and
gamma = N - 1. Nothing here knows of models: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEW_GUESSES = 0.4
"""With fewer guesses than columns b is W^0.6 G^0.4: with it the paper's law gives its 1.79 for (N,W,G) = (5,30,1)."""


def expected_tokens(alpha: float, gamma: int, b: float = 1) -> float:
    """E(#tokens) of a step with b guesses of gamma tokens: (gamma + 1) - sum over i of (1 - alpha^i)^b.

    With b = 1 that is the paper's first formula, (1 - alpha^(gamma + 1)) / (1 - alpha).
    """
    return gamma + 1 - sum((1 - alpha**i) ** b for i in range(1, gamma + 1))


def candidates(window: int, guesses: int) -> float:
    """The law's b. The paper sets G = W = b; more guesses than the window makes are no more, fewer count in part."""
    if not window or not guesses:
        return 0.0
    return float(window) if guesses >= window else window ** (1 - FEW_GUESSES) * guesses**FEW_GUESSES


@dataclass(frozen=True)
class ScalingLaw:
    """S = (f - 1 + E(#tokens)) / f."""

    alpha: float
    f: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} is a probability: it must be from 0 to 1")
        if not 1 <= self.f < math.inf:
            raise ValueError(f"f={self.f} must be at least 1: one step in f has good guesses")

    def compression(self, gamma: int, b: float) -> float:
        return (self.f - 1 + expected_tokens(self.alpha, gamma, b)) / self.f

    def predict(self, window: int, ngram: int, guesses: int) -> float:
        """S of the paper's method with this (W, N, G)."""
        return self.compression(ngram - 1, candidates(window, guesses))


PAPER = ScalingLaw(alpha=0.425, f=3.106)
"""What the paper gives for Llama-2-7B-Chat on MT-Bench (Figure 4)."""


@dataclass(frozen=True)
class Point:
    window: int
    ngram: int
    guesses: int
    compression: float


def fit(points: Sequence[Point], near: ScalingLaw = PAPER, trust: float = 0.0) -> ScalingLaw:
    """The law with the least squared error over measured points, plus `trust` times alpha's squared way from `near`.

    Given alpha, S - 1 = (E - 1) / f is linear in 1 / f, which has a closed form; alpha is searched. One shape of
    (W, N, G) cannot tell alpha from f, so alpha then stays that of `near`; nothing measured leaves `near` as it is.
    """
    if not points:
        return near
    if len({(p.ngram, candidates(p.window, p.guesses)) for p in points}) == 1:
        return _with_alpha(near.alpha, points)[1]

    def error(alpha: float) -> float:
        return _with_alpha(alpha, points)[0] + trust * (alpha - near.alpha) ** 2

    best = min((i / 200 for i in range(1, 200)), key=error)
    low, high = best - 1 / 200, best + 1 / 200
    for _ in range(40):  # ternary search between the neighbours of the best of the grid
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if error(left) <= error(right):
            high = right
        else:
            low = left
    return _with_alpha((low + high) / 2, points)[1]


def _with_alpha(alpha: float, points: Sequence[Point]) -> tuple[float, ScalingLaw]:
    """The best f for this alpha, and its squared error."""
    gains = [expected_tokens(alpha, p.ngram - 1, candidates(p.window, p.guesses)) - 1 for p in points]
    across = sum(gain * (p.compression - 1) for gain, p in zip(gains, points, strict=True))
    square = sum(gain * gain for gain in gains)
    share = min(1.0, max(across / square, 1e-6)) if square else 1e-6
    error = sum((1 + gain * share - p.compression) ** 2 for gain, p in zip(gains, points, strict=True))
    return error, ScalingLaw(alpha, 1 / share)
