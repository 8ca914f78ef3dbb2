"""What a stream tells of its steps, to requests that ask: what each step tried and accepted, and its token tree."""

from __future__ import annotations

from typing import Any

from lookahead.algorithm.sources import source_of
from lookahead.algorithm.tree import TokenTree
from lookahead.engine.request import Event
from lookahead.serve.keys import Owner
from lookahead.serve.logprobs import TokenFormatter
from lookahead.serve.protocol import Generation
from lookahead.serve.requests import Piece, Step

MOST_TREES = 256
"""The most trees that one request is shown, all its choices together. Later steps tell the rest, but no tree."""
MOST_NODES = 256
"""The most nodes of a tree that are shown, besides the accepted path. With MOST_TREES this bounds the trees of a
request to about 2 MB."""


def check_trace(body: Generation, owner: Owner) -> None:
    """Raise a 403 if the request asks for trees without the right to see them. The guesses in a tree come from the
    owner's memory, so that a tree may show what others with the same memory have asked."""
    if body.traced:
        owner.require_right("trace", "lookahead.trace", "lookahead.trace")


def trees_of(body: Generation, specs: int) -> int:
    """How many trees each of a request's asks may show."""
    return MOST_TREES // specs if body.traced else 0


def step_fields(piece: Piece, token_formatter: TokenFormatter) -> dict[str, Any]:
    """The fields that a chunk gets for the steps of its piece. None, unless the request asked for them."""
    if not piece.steps:
        return {}
    return {"lookahead": {"steps": [step_record(step, token_formatter) for step in piece.steps]}}


def step_record(step: Step, token_formatter: TokenFormatter) -> dict[str, Any]:
    """One step. `tokens` are the ids of its accepted tokens, an end of text among them; `sources` name who guessed
    them, all but the last, which is the model's own. `seconds` have passed since the request came."""
    event = step.event
    record = {
        "step": step.number,
        "text": step.text,
        "tokens": event.tokens,
        "tried": event.tried,
        "accepted": event.accepted,
        "sources": event.sources,
        "seconds": round(event.seconds, 6),
    }
    if event.tree is not None:
        record["tree"] = tree_record(event, event.tree, token_formatter)
    return record


def tree_record(event: Event, tree: TokenTree, token_formatter: TokenFormatter) -> dict[str, Any]:
    """A step's tree, node by node, the root first, then the window row by row, then the guesses.

    A node's parent always stands before it. `path` are the accepted guesses, and `target` is the token that the model
    wants after them. `left_out` nodes were too many to show.
    """
    kept = [*range(min(len(tree), MOST_NODES)), *[node for node in event.path if node >= MOST_NODES]]
    index = {node: number for number, node in enumerate(kept)}
    return {
        "tokens": [token_formatter.text_and_bytes(tree.tokens[node])[0] for node in kept],
        "parents": [index.get(tree.parents[node], -1) for node in kept],
        "sources": [_source(tree, node) for node in kept],
        "path": [index[node] for node in event.path],
        "target": token_formatter.text_and_bytes(event.tokens[-1])[0],
        "window": {"columns": tree.width, "rows": tree.branch // tree.width if tree.width else 0},
        "left_out": len(tree) - len(kept),
    }


def _source(tree: TokenTree, node: int) -> str:
    """Where a node's token came from."""
    if node == 0:
        return "root"
    return "window" if node < tree.branch else source_of(tree.origins[node - tree.branch])
