"""Per-step details of a stream: the draft tokens tried and accepted, and the token tree."""

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
"""The most trees sent per HTTP request, all choices together. Later steps are sent without a tree."""
MOST_NODES = 256
"""The most nodes sent of a tree, besides the accepted path. With MOST_TREES this bounds the trees of a
request to about 2 MB."""


def check_trace(body: Generation, owner: Owner) -> None:
    """Raise a 403 if the request wants trees without the right to see them. Draft tokens come from the owner's memory,
    so a tree may reveal the prompts of other clients that share it."""
    if body.traced:
        owner.require_right("trace", "lookahead.trace", "lookahead.trace")


def trees_of(body: Generation, count: int) -> int:
    """The most trees for each of `count` engine requests."""
    return MOST_TREES // count if body.traced else 0


def step_fields(piece: Piece, token_formatter: TokenFormatter) -> dict[str, Any]:
    """Extra fields of a chunk with the steps of its piece; empty unless the request wants them."""
    if not piece.steps:
        return {}
    return {"lookahead": {"steps": [step_record(step, token_formatter) for step in piece.steps]}}


def step_record(step: Step, token_formatter: TokenFormatter) -> dict[str, Any]:
    """One step. `tokens` are the ids of its accepted tokens, EOS included; `sources` name the source of each but the
    last, which is the model's own. `seconds` counts from the arrival of the request."""
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
    """A step's tree in node order: the root, the window row by row, then the guesses.

    A node's parent always precedes it. `path` holds the accepted guesses, and `target` is the model's token after them.
    `left_out` counts the nodes beyond the limit.
    """
    shown = [*range(min(len(tree), MOST_NODES)), *[node for node in event.path if node >= MOST_NODES]]
    index = {node: number for number, node in enumerate(shown)}
    return {
        "tokens": [token_formatter.text_and_bytes(tree.tokens[node])[0] for node in shown],
        "parents": [index.get(tree.parents[node], -1) for node in shown],
        "sources": [_source(tree, node) for node in shown],
        "path": [index[node] for node in event.path],
        "target": token_formatter.text_and_bytes(event.tokens[-1])[0],
        "window": {"columns": tree.width, "rows": tree.branch // tree.width if tree.width else 0},
        "left_out": len(tree) - len(shown),
    }


def _source(tree: TokenTree, node: int) -> str:
    """The source of a node's token."""
    if node == 0:
        return "root"
    return "window" if node < tree.branch else source_of(tree.origins[node - tree.branch])
