"""The inputs of sampling, as data (`backends.sampling` chooses the targets)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NO_DRAW = -1.0
"""In place of a uniform: take the argmax. The window's targets are greedy, as in section 3.2."""

LEVELS = 16
"""Probability levels of a top token. The last level holds all probabilities below 2^-7.5."""


@dataclass(slots=True)
class Adjustment:
    """The adjustment of a sequence's logits, besides its `SamplingParams`.

    `text` are its tokens so far, the first `prompt_tokens` of them the prompt; the last one is the tree's root. The
    first `min_tokens` tokens of the output cannot be one of `ends`. `mask` uint32 [R, ceil(V / 32)] has the allowed
    tokens of the tree's R needed nodes: bit t % 32 of word t // 32 stands for token t. Without it all are allowed.
    """

    text: Sequence[int]
    prompt_tokens: int
    ends: frozenset[int] = frozenset()
    min_tokens: int = 0
    mask: npt.NDArray[np.uint32] | None = None

    @property
    def end_depth(self) -> int:
        """The least depth of a node after which one of `ends` may be chosen. At most 0: after all of them."""
        return self.min_tokens - (len(self.text) - self.prompt_tokens) if self.ends else 0
