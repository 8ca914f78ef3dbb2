"""Allowed tokens: the rows of a request's mask become part of what its step's logits are adjusted by."""

from __future__ import annotations

import numpy as np

from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.tree import TokenTree
from lookahead.engine.request import Request


def masked(request: Request, tree: TokenTree, adjustment: Adjustment | None, vocabulary: int) -> Adjustment | None:
    """The adjustment with the rows of the request's mask in it. ValueError if they cannot be used."""
    rows = None if request.mask is None else request.mask.rows(tree, request.sequence)
    if rows is None:
        return adjustment
    shape = (len(tree.needed), -(-vocabulary // 32))
    if rows.dtype != np.uint32 or rows.shape != shape:
        raise ValueError(f"the mask is {rows.dtype} {list(rows.shape)}; it must be uint32 {list(shape)}")
    if not rows[0].any():
        raise ValueError("the mask allows no token after the text; it must allow one, such as an end token")
    if adjustment is None:
        adjustment = Adjustment(request.sequence.tokens, request.sequence.prompt_tokens)
    adjustment.mask = np.ascontiguousarray(rows)
    return adjustment
