"""Verification: follow the targets down the tree.

The paper's Algorithms 3 and 4 share it: a target is the argmax in one and a draw in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.tree import TokenTree
from lookahead.config import StopRules


@dataclass(slots=True)
class Verdict:
    """What a step gives a sequence: the nodes of the accepted guesses, the accepted tokens, and the reason to stop.

    The last accepted token is the new root. It has no node in this tree, so `path` is one shorter than `tokens`.
    `learned`: the drafter has learned already what the sequence's next guesses need (see `draft.Drafter.verification`).
    """

    path: list[int]
    tokens: list[int]
    finish_reason: str | None = None
    learned: bool = False


NO_VERDICT = Verdict([], [])
"""That of a piece of a prompt, which has no tree."""


def accept(tree: TokenTree, targets: Sequence[int]) -> tuple[list[int], list[int]]:
    """From the root, follow the guess that equals the target, as long as there is one.

    `targets` aligns with `tree.needed`. Returns the nodes of the accepted guesses and the accepted tokens. The tokens
    are these guesses and the target after the last of them, so there is always at least one.
    """
    below, guessed, place = tree.guesses_below(), tree.tokens, len(tree.needed) - tree.size
    node, token = 0, targets[0]
    path, tokens = list[int](), [token]
    while node in below:
        for guess in below[node]:
            if guessed[guess] == token:
                break
        else:
            break
        node, token = guess, targets[guess + place]  # the guesses are the last of the needed nodes
        path.append(node)
        tokens.append(token)
    return path, tokens


def cut(
    tokens: Sequence[int],
    generated: int,
    room: int,
    rules: StopRules,
    ends: Callable[[int], bool] | None = None,
) -> tuple[int, str | None]:
    """How many of these accepted tokens the sequence keeps, and the reason to stop after them, if there is one.

    The tokens are tested one after the other, as autoregressive decoding does: EOS, then `ends` (stop strings), then
    length.
    """
    for count, token in enumerate(tokens, start=1):
        if token in rules.eos_ids:
            return count, "eos"
        if ends is not None and ends(token):
            return count, "stop"
        if generated + count >= room:
            return count, "length"
    return len(tokens), None


class Verification(Protocol):
    """The trees of a step that runs. It is asked once."""

    def accept(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        """What each tree's targets confirm (see `accept`), or why that cannot be told. Stop rules are
        not applied here: `DecodingSequence.cut` does that."""
        ...


class PythonVerification:
    """Verifies one tree after the other, and lets nothing be learned."""

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self._trees = trees
        for tree in trees:
            tree.guesses_below()

    def accept(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        verdicts = list[Verdict | Exception]()
        for tree, output in zip(self._trees, outputs, strict=True):
            try:
                verdicts.append(Verdict(*accept(tree, output.targets)) if tree.size else NO_VERDICT)
            except Exception as error:
                verdicts.append(error)
        return verdicts
