"""The paper's Algorithms 1 to 4, written to be read beside it: slow, plain, the oracle of the tests.

A *model* is any function from tokens to the distribution of the next one. There is no batching, no cache and
no attention mask here: a row of a step is one call of the model on the tokens that the row sees.

Names are the paper's: W, N and G; x the text so far, o the output, w the window, C the pool, g the guesses;
V the guesses still alive in a verification, D their distributions, P the one at hand, s_j a guessed token.
Line numbers are those of the paper's appendix A. Where the code differs from a line, the docstring says why.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Distribution = list[float]
Model = Callable[[Sequence[int]], Distribution]
NGram = tuple[int, ...]
Verification = Callable[[Sequence[int], Model, Sequence[NGram]], list[int]]


def argmax(P: Distribution) -> int:
    """The likeliest token; of several, the one with the lowest id."""
    return P.index(max(P))


def norm(P: Distribution) -> Distribution:
    """The same weights, with sum 1."""
    total = sum(P)
    return [p / total for p in P]


def sample(P: Distribution, rng: random.Random) -> int:
    """One token drawn from P."""
    return rng.choices(range(len(P)), weights=P)[0]


def autoregressive(prompt: Sequence[int], model: Model, m: int) -> list[int]:
    """Greedy decoding, one token at a time (section 2): what the greedy algorithms below must reproduce."""
    o: list[int] = []
    for _ in range(m):
        o.append(argmax(model([*prompt, *o])))
    return o


def jacobi(prompt: Sequence[int], model: Model, m: int, *, rng: random.Random) -> tuple[list[int], int]:
    """Algorithm 1, Jacobi decoding. Returns the m tokens and the number of iterations, at most m.

    Line 5 in full: token j of y^i depends on the prompt and the tokens before place j of y^{i-1}. The stop
    condition of line 7, left open there, is the fixed point: an iteration that changes nothing.
    """
    y = rng.choices(prompt, k=m)  # line 2: y^0
    for i in range(1, m + 1):  # line 4
        previous = y
        y = [argmax(model([*prompt, *previous[:j]])) for j in range(m)]  # line 5
        if y == previous:  # lines 7-9
            return y, i
    return y, m


def greedy_verification(x: Sequence[int], model: Model, guesses: Sequence[NGram]) -> list[int]:
    """Algorithm 3. Returns the accepted tokens: 1 to N of them.

    Every guess is an n-gram that begins with x's last token. The paper takes size(D) > 0 for granted; with no
    guess at all we go straight to its 'guarantee one step movement', line 38.
    """
    if not guesses:
        return [argmax(model(x))]
    N = len(guesses[0])
    V, D = _speculations(x, model, guesses)  # lines 4-9
    o: list[int] = []
    for i in range(N - 1):  # line 10
        is_accept = False
        P = D[0][i]  # line 13: the same for every live guess, as they agree up to here
        for s_j in [v[i] for v in V]:  # lines 14, 15
            if s_j == argmax(P):  # line 16
                o.append(s_j)
                is_accept = True
                V, D = _agreeing(V, D, i, s_j)  # lines 20-27
                break
        if not is_accept:
            o.append(argmax(P))  # line 38: guarantee one step movement
            break
    if is_accept:
        o.append(argmax(D[0][N - 1]))  # line 43: a whole guess was right, and one token more comes for free
    return o


def sample_verification(x: Sequence[int], model: Model, guesses: Sequence[NGram], rng: random.Random) -> list[int]:
    """Algorithm 4. Returns the accepted tokens: 1 to N of them, distributed as the model's.

    Differences from the paper: no guess at all is one draw from the model (lines 41, 42). r is uniform on
    (0, 1], not [0, 1), so that line 17 never accepts a token of probability 0. And line 13 normalises too:
    else rounding could make a distribution refuse its only token, and leave line 33 nothing to normalise.
    """
    if not guesses:
        return [sample(model(x), rng)]
    N = len(guesses[0])
    V, D = _speculations(x, model, guesses)  # lines 4-9
    o: list[int] = []
    for i in range(N - 1):  # line 10
        is_accept = False
        P = norm(D[0][i])  # line 13
        for s_j in [v[i] for v in V]:  # lines 14, 15
            r = 1 - rng.random()  # line 16
            if r <= P[s_j]:  # line 17
                o.append(s_j)
                is_accept = True
                V, D = _agreeing(V, D, i, s_j)  # lines 21-28
                break
            P[s_j] = 0.0  # line 32: refused, so the token cannot be drawn any more
            P = norm(P)  # line 33
        if not is_accept:
            o.append(sample(P, rng))  # lines 41, 42: guarantee one step movement
            break
    if is_accept:
        o.append(sample(D[0][N - 1], rng))  # line 47
    return o


def _speculations(
    x: Sequence[int], model: Model, guesses: Sequence[NGram]
) -> tuple[list[NGram], list[list[Distribution]]]:
    """Lines 4-9 of Algorithms 3 and 4: V, the guesses less their first token; D, N distributions for each.

    D[j][i] is what the model says after x and the first i tokens of V[j].
    """
    V: list[NGram] = []
    D: list[list[Distribution]] = []
    for g in guesses:
        V.append(g[1:])
        D.append([model([*x, *g[1 : 1 + i]]) for i in range(len(g))])
    return V, D


def _agreeing(
    V: list[NGram], D: list[list[Distribution]], i: int, s_j: int
) -> tuple[list[NGram], list[list[Distribution]]]:
    """Algorithm 3, lines 20-27; Algorithm 4, lines 21-28: the guesses whose token i is the accepted one.

    The paper starts its loop at k = j. The guesses before j were just refused, so none of them has s_j there.
    """
    live = [k for k in range(len(V)) if V[k][i] == s_j]
    return [V[k] for k in live], [D[k] for k in live]


@dataclass
class Result:
    """What `lookahead` generated, and how many of the tokens each step accepted."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.accepted)


def lookahead(
    prompt: Sequence[int],
    model: Model,
    W: int,
    N: int,
    G: int,
    m: int,
    *,
    rng: random.Random,
    verification: Verification = greedy_verification,
    on_skip: Literal["random", "keep"] = "random",
    prompt_as_reference: bool = False,
    start: Sequence[Sequence[int]] | None = None,
) -> Result:
    """Algorithm 2, lookahead decoding: m tokens after the prompt.

    `rng` is for the window alone; to sample, pass `partial(sample_verification, rng=...)` with another one.

    Iteration i stands for the i-th token, and is skipped when an earlier one accepted it (lines 7-9). The
    paper then pushes a random row into the window (`on_skip="random"`). `"keep"` leaves the window as it is,
    so that it moves a row per step. The engine does that: rows a few places off accept more than random ones.

    `start` gives the window's first rows, oldest first, instead of random ones (line 4).

    `prompt_as_reference` also feeds the pool the n-grams of the prompt (section 5.4) and, like the engine, of
    the output.

    Differences from the pseudo-code:
    - Lines 14, 16 and 26 condition on o_{1:i}, but in iteration i only o_{1:i-1} is known: that is used here.
      And the o_0 of line 5 must not count in line 7's size(o), or every iteration were skipped.
    - Line 14 leaves out w_1 of the oldest row, where line 29 takes it into the n-gram. That place is the last
      token's, o_{i-1} (the input at position 0 in Figure 2(b)), and here both lines take that.
    - Lines 4 and 8 do not say what a random token is: here, one drawn from the prompt.
    - Line 23 writes g^i for g^j, and does not say which n-grams, if there are more than G: here, the newest.
      One found again counts as new, and is not kept twice. So to keep the G newest of each first token, as
      the engine's pool does, comes to the same.
    - The last step may accept more than the m tokens asked for: they are cut, from `accepted` too.
    """

    def random_row() -> list[int]:
        return rng.choices(prompt, k=W)

    C: list[NGram] = []  # line 2; newest first

    def add_to_pool(ngram: NGram) -> None:
        if ngram in C:
            C.remove(ngram)
        C.insert(0, ngram)

    result = Result()
    o = result.tokens  # line 3
    w = [random_row() for _ in range(N - 1)] if start is None else [list(row) for row in start]  # line 4; oldest first
    if prompt_as_reference:
        for k in range(len(prompt) - N + 1):
            add_to_pool(tuple(prompt[k : k + N]))

    for i in range(1, m + 1):  # line 6
        if len(o) >= i:  # lines 7-9
            if on_skip == "random":
                w = [*w[1:], random_row()]
            continue
        x = [*prompt, *o]
        oldest = [x[-1], *w[0][1:]]  # w^{i+1-N}, with o_{i-1} in its first place

        # Lookahead branch, lines 11-19: column j sees the oldest row up to itself, then its own newer tokens.
        w_i = []
        for j in range(W):
            newer = [row[j] for row in w[1:]]
            w_i.append(argmax(model([*x, *oldest[1 : j + 1], *newer])))

        # Verification branch, lines 20-26.
        g = [ngram for ngram in C if ngram[0] == x[-1]][:G]
        accepted = verification(x, model, g)[: m - len(o)]
        o += accepted
        result.accepted.append(len(accepted))

        # Update the n-gram pool, lines 27-30, and let the window take its new row.
        if prompt_as_reference:
            text = [*x, *accepted]
            for k in range(max(0, len(x) - N + 1), len(text) - N + 1):
                add_to_pool(tuple(text[k : k + N]))
        for j in range(W):
            add_to_pool((oldest[j], *[row[j] for row in w[1:]], w_i[j]))
        w = [*w[1:], w_i]
    return result
