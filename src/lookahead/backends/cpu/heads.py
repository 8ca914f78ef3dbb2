"""Chooses the head of a run: the screened one if the argmax and top tokens are enough, else the full one.

Both give the same argmax (see `screen`), so the choice affects only the time of a step.
"""

from __future__ import annotations

import numpy as np

from lookahead.backends.cpu import screen
from lookahead.backends.cpu.head import Computed, Head
from lookahead.backends.cpu.invariance import same_bits
from lookahead.backends.cpu.onnx_model import Array, array
from lookahead.backends.cpu.products import merged
from lookahead.backends.cpu.screen import CANDIDATES, MOST_SCREENED, ScreenedHead
from lookahead.models.matrix import Matrix


class Heads:
    """The full head of a model and, if it pays and is exact here, the screened one (`screened`, else None)."""

    def __init__(self, matrix: Matrix, threads: int, *, scale: float = 1.0, cap: float | None = None) -> None:
        """`matrix` [V, H] is the head itself. The hidden states are multiplied by `scale` already (see
        `lower.state_scale`); the bias is multiplied here. `cap` is the soft cap of the logits.

        Quantised heads are not screened, and neither are those with a bias: the bound of `screen` is for a product
        without bias.
        """
        if matrix.has_bias and scale != 1.0:
            matrix = merged(matrix, bias_scale=scale)
        self.full = Head(matrix, threads, cap)
        self.screened: ScreenedHead | None = None
        tokens, width = matrix.shape
        large = tokens * width >= screen.LEAST_WEIGHTS and tokens > CANDIDATES
        if large and not any(matrix.formats) and not matrix.has_bias:
            made = ScreenedHead(array(matrix.weight()), threads, cap)
            exact = same_bits(self.full, made, width, MOST_SCREENED, CANDIDATES, scale)
            self.screened = made if exact else None

    def run(self, hidden: Array, top: int, *, logits: bool) -> Computed:
        """Hidden states [N, H] -> the top tokens of each row, and with `logits` all logits, too."""
        if logits or self.screened is None or len(hidden) > MOST_SCREENED or top > CANDIDATES:
            return self.full.run(hidden, top)
        computed, certain = self.screened.run(hidden, top)
        if certain.all():
            return computed
        doubtful = np.flatnonzero(~certain)
        exact = self.full.run(hidden[doubtful], top)
        computed.values[doubtful], computed.ids[doubtful] = exact.values, exact.ids
        computed.total[doubtful] = exact.total
        return computed
