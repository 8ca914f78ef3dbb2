"""Log-probabilities of a prompt, for `echo` with `logprobs`.

The prompt is decoded as a continuation of its first token: a mask allows only the prompt's next token, and the prompt
is its own prediction, so that a step scores many tokens. Log-probabilities are computed before masking. So the engine
needs no separate scoring pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.request import TokenLogprobs
from lookahead.serve.grammar import ALL
from lookahead.serve.keys import Owner
from lookahead.serve.requests import Piece, RequestSpec
from lookahead.serve.service import Service

SCORING = LookaheadConfig(window=0, guesses=0, budget=17, sources=("suffix",), recycle_scope="request")
"""16 draft tokens per step, the depth to which half-precision steps on a GPU are exact, taken from the prediction."""


class ForcedText:
    """A `TokenMask` that allows exactly one text."""

    def __init__(self, text: Sequence[int], vocabulary: int) -> None:
        self._text, self._words = text, (vocabulary + 31) // 32

    def rows(self, tree: TokenTree, sequence: DecodingSequence) -> npt.NDArray[np.uint32]:
        """After a node of depth d only the text's d-th token from here is allowed; past its end, all are."""
        rows = np.zeros((len(tree.needed), self._words), dtype=np.uint32)
        done = len(sequence.tokens) - sequence.prompt_tokens
        for row, node in zip(rows, tree.needed, strict=True):
            position = done + tree.depths[node]
            if position < len(self._text):
                token = self._text[position]
                row[token >> 5] = 1 << (token & 31)
            else:
                row[:] = ALL
        return rows

    def accept(self, tokens: Sequence[int]) -> None:
        pass


def scoring_spec(prompt: Sequence[int], count: int, owner: Owner, service: Service) -> RequestSpec:
    """A request whose output has the log-probabilities of all prompt tokens but the first, with the top `count` of
    each. The prompt must have two tokens or more."""
    backend, rest = service.model.backend, list(prompt[1:])
    return RequestSpec(
        list(prompt[:1]),
        SCORING,
        SamplingParams(logprobs=count),
        StopRules(max_tokens=len(rest), max_length=backend.max_length),
        owner,
        mask=ForcedText(rest, backend.vocab_size),
        prediction=rest,
        scores=True,
    )


def scores_of(pieces: Sequence[Piece]) -> list[TokenLogprobs]:
    return [one for piece in pieces for one in piece.logprobs]
