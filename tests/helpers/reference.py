"""The paper's Algorithms 1 to 4, line by line. They are slow and plain, and the tests compare the engine with them.

A *model* is any function from tokens to the distribution of the next one. There is no batching, no cache and
no attention mask here: each node of a step is one call of the model on the tokens that the node sees.

Names are the paper's: W, N and G; x the text so far, o the output, w the window, C the pool, g the guesses;
V the guesses not yet refused in a verification, D their distributions, P the current one, s_j a guessed token.
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
    """The likeliest token. Of several equally likely ones, the one with the lowest id."""
    return P.index(max(P))


def norm(P: Distribution) -> Distribution:
    """The weights scaled to sum 1."""
    total = sum(P)
    return [p / total for p in P]


def sample(P: Distribution, rng: random.Random) -> int:
    """One token drawn from P."""
    return rng.choices(range(len(P)), weights=P)[0]


def autoregressive(prompt: Sequence[int], model: Model, m: int) -> list[int]:
    """Greedy decoding, one token at a time (section 2). The greedy algorithms below must give the same tokens."""
    o: list[int] = []
    for _ in range(m):
        o.append(argmax(model([*prompt, *o])))
    return o


def jacobi(prompt: Sequence[int], model: Model, m: int, *, rng: random.Random) -> tuple[list[int], int]:
    """Algorithm 1, Jacobi decoding. Returns the m tokens and the number of iterations, at most m.

    In line 5, token j of y^i depends on the prompt and on the first j tokens of y^{i-1}. Line 7 leaves the stop
    condition open: here it is the fixed point, an iteration that changes nothing.
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

    Every guess is an n-gram that begins with x's last token. The paper assumes that there is a guess. Without one
    we go straight to line 38, 'guarantee one step movement'.
    """
    if not guesses:
        return [argmax(model(x))]
    N = len(guesses[0])
    V, D = _speculations(x, model, guesses)  # lines 4-9
    o: list[int] = []
    for i in range(N - 1):  # line 10
        is_accept = False
        P = D[0][i]  # line 13: the same for all guesses in V, which agree up to here
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
        o.append(argmax(D[0][N - 1]))  # line 43: a whole guess was right, and its target comes for free
    return o


def sample_verification(x: Sequence[int], model: Model, guesses: Sequence[NGram], rng: random.Random) -> list[int]:
    """Algorithm 4. Returns the accepted tokens: 1 to N of them, distributed as the model's.

    Differences from the paper:
    - Without a guess the result is one draw from the model (lines 41, 42).
    - r is uniform on (0, 1], not [0, 1), so that line 17 never accepts a token of probability 0.
    - Line 13 normalises too. Otherwise rounding could make a distribution refuse its only token, and line 33 would
      divide by zero.
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
            P[s_j] = 0.0  # line 32: a refused token cannot be drawn any more
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
    """Lines 4-9 of Algorithms 3 and 4: V are the guesses without their first token; D has N distributions for each.

    D[j][i] is the model's distribution after x and the first i tokens of V[j].
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
    """Keep the guesses whose token i is the accepted one (Algorithm 3, lines 20-27; Algorithm 4, lines 21-28).

    The paper starts its loop at k = j. That is the same: the guesses before j were refused, so none has s_j there.
    """
    kept = [k for k in range(len(V)) if V[k][i] == s_j]
    return [V[k] for k in kept], [D[k] for k in kept]


@dataclass
class Result:
    """The tokens that `lookahead` generated, and how many of them each step accepted."""

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

    `rng` is for the window only. To sample, pass `partial(sample_verification, rng=...)` with a generator of its own.

    Iteration i is for the i-th token. It is skipped when an earlier iteration has accepted that token (lines 7-9).
    The paper then pushes a random window row (`on_skip="random"`). With `"keep"` the window stays as it is and moves
    by one window row per step. The engine does that, because it accepts more.

    `start` gives the first window rows, oldest first, instead of random ones (line 4).

    With `prompt_as_reference` the n-grams of the prompt (section 5.4) and, as in the engine, of the output go into
    the pool, too.

    Differences from the pseudo-code:
    - Lines 14, 16 and 26 condition on o_{1:i}, but iteration i knows only o_{1:i-1}, so that is used here. The o_0 of
      line 5 does not count in line 7's size(o); if it did, every iteration would be skipped.
    - Line 14 leaves out w_1 of the oldest window row, but line 29 takes it into the n-gram. In Figure 2(b) that place
      holds the last token, o_{i-1}. Here both lines use that token.
    - Lines 4 and 8 do not say what a random token is. Here it is drawn from the prompt.
    - Line 23 writes g^i for g^j, and does not say which n-grams to take when there are more than G. Here the newest
      are taken. An n-gram that is found again counts as new and is kept once. The engine's pool keeps the G newest of
      each first token, which gives the same guesses.
    - The last step may accept more tokens than are left. They are cut, in `accepted` too.
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
        oldest = [x[-1], *w[0][1:]]  # w^{i+1-N}, whose first place holds o_{i-1}

        # Lookahead branch, lines 11-19: column j sees the oldest window row up to itself, then its own newer tokens.
        w_i = []
        for j in range(W):
            newer = [row[j] for row in w[1:]]
            w_i.append(argmax(model([*x, *oldest[1 : j + 1], *newer])))

        # Verification branch, lines 20-26.
        g = [ngram for ngram in C if ngram[0] == x[-1]][:G]
        accepted = verification(x, model, g)[: m - len(o)]
        o += accepted
        result.accepted.append(len(accepted))

        # Update the n-gram pool, lines 27-30, and add the new window row.
        if prompt_as_reference:
            text = [*x, *accepted]
            for k in range(max(0, len(x) - N + 1), len(text) - N + 1):
                add_to_pool(tuple(text[k : k + N]))
        for j in range(W):
            add_to_pool((oldest[j], *[row[j] for row in w[1:]], w_i[j]))
        w = [*w[1:], w_i]
    return result
