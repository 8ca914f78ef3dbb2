"""Verification: follow the targets down the tree (Algorithms 3 and 4 share it; only the target rule differs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lookahead.config import StopRules
from lookahead.tree import TokenTree


def accept(tree: TokenTree, targets: Sequence[int]) -> tuple[list[int], list[int]]:
    """From the root, follow the guess that equals the target, as far as there is one.

    `targets` aligns with `tree.rows`. Returns the accepted guesses' nodes and the accepted tokens: those guesses
    and the target after the last of them, so one token more than nodes, and never fewer than one.
    """
    first_guess = len(tree.rows) - (len(tree) - tree.branch)
    path: list[int] = []
    node: int | None = 0
    tokens: list[int] = []
    while node is not None:
        tokens.append(targets[first_guess + node - tree.branch if node else 0])
        node = _guess(tree, node, tokens[-1])
        if node is not None:
            path.append(node)
    return path, tokens


def _guess(tree: TokenTree, parent: int, token: int) -> int | None:
    """The guess of this token right below this node, if there is one."""
    node = max(parent, tree.branch - 1)
    parents, tokens = tree.parents, tree.tokens
    try:
        while True:
            node = parents.index(parent, node + 1)
            if tokens[node] == token:
                return node
    except ValueError:
        return None


def cut(
    tokens: Sequence[int],
    generated: int,
    room: int,
    rules: StopRules,
    ends: Callable[[int], bool] | None = None,
) -> tuple[int, str | None]:
    """How many of these accepted tokens stand, and why the sequence ends there, if it does.

    Every token is tested in turn, as autoregressive decoding would: EOS, then `ends` (stop strings), then length.
    """
    for count, token in enumerate(tokens, start=1):
        if token in rules.eos_ids:
            return count, "eos"
        if ends is not None and ends(token):
            return count, "stop"
        if generated + count >= room:
            return count, "length"
    return len(tokens), None
