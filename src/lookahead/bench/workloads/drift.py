"""Weights that change a little between epochs, as training changes them, and are put back in the end."""

from __future__ import annotations

from types import TracebackType

import torch

from lookahead.generate import LookaheadModel


class Drift:
    """A context in which `step` multiplies all vectors of the model's weights (norms and biases) by 1 + `size` x noise.

    They are a small part of the weights, so that a copy costs little, and every layer computes something else. The end
    of the context puts the old numbers back.
    """

    def __init__(self, lm: LookaheadModel, size: float, seed: int) -> None:
        self.lm, self.size = lm, size
        self._noise = torch.Generator().manual_seed(seed)
        self._vectors = [one for one in lm.model.parameters() if one.dim() == 1 and one.is_floating_point()]
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> Drift:
        self._before = [vector.detach().clone() for vector in self._vectors]
        return self

    @torch.no_grad()
    def step(self) -> None:
        for vector in self._vectors:
            factor = 1 + self.size * torch.randn(vector.shape, generator=self._noise)
            vector.mul_(factor.to(vector))
        self.lm.reload_weights()

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for vector, before in zip(self._vectors, self._before, strict=True):
            vector.copy_(before)
        self.lm.reload_weights()
