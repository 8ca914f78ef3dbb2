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
    """The outcome of verification: the nodes of the accepted draft tokens, the accepted tokens, the finish reason.

    The last accepted token is the new root. It has no node in this tree, so `path` is one shorter than `tokens`.
    `learned`: the drafter has already learned what the next draft needs (see `draft.Drafter.verification`).
    """

    path: list[int]
    tokens: list[int]
    finish_reason: str | None = None
    learned: bool = False


NO_VERDICT = Verdict([], [])
"""The verdict of a prompt chunk without a tree."""


def accept(tree: TokenTree, targets: Sequence[int]) -> tuple[list[int], list[int]]:
    """From the root, follow the draft token that equals the target until none does.

    `targets` aligns with `tree.needed`. Returns the nodes of the accepted draft tokens and the accepted tokens: the
    draft tokens and the target after the last of them, so there is always at least one.
    """
    children, drafted, offset = tree.draft_children(), tree.tokens, len(tree.needed) - tree.size
    node, token = 0, targets[0]
    path, tokens = list[int](), [token]
    while node in children:
        for child in children[node]:
            if drafted[child] == token:
                break
        else:
            break
        node, token = child, targets[child + offset]  # the draft tokens are the last of the needed nodes
        path.append(node)
        tokens.append(token)
    return path, tokens


def cut_at_stop(
    tokens: Sequence[int],
    generated: int,
    room: int,
    rules: StopRules,
    ends: Callable[[int], bool] | None = None,
) -> tuple[int, str | None]:
    """How many of these accepted tokens the sequence keeps, and its finish reason or None.

    Tokens are checked one at a time, as in autoregressive decoding: EOS, then `ends` (stop strings), then length.
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
    """Verifies the trees of one running step, once."""

    def accept(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        """What each tree's targets accept (see `accept`), or the exception that prevented it. Stop rules are applied
        later, by `DecodingSequence.apply_stop_rules`."""
        ...


class PythonVerification:
    """Verifies one tree after the other. Learning is left to the sequences."""

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self._trees = trees
        for tree in trees:
            tree.draft_children()

    def accept(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        verdicts = list[Verdict | Exception]()
        for tree, output in zip(self._trees, outputs, strict=True):
            try:
                verdicts.append(Verdict(*accept(tree, output.targets)) if tree.size else NO_VERDICT)
            except Exception as error:
                verdicts.append(error)
        return verdicts
