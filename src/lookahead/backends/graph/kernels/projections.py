"""How a layer's projections become the queries, keys and values of attention, as the kernels need it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lookahead.models.norm import Norm


@dataclass(frozen=True, eq=False)
class Projections:
    """The steps from the product qkv [M, sources x D] to H query heads and Hkv key and value heads, in this order.

    `kv_heads` is 0 for a layer that has queries only. `bias` [sources x D] is added. `order` [H + 2 Hkv] int32: the
    index of each head in qkv, if that has another order. `clip`: the heads are clamped. `q_norm`, `k_norm`, `v_norm`:
    the norm of each head, or with `whole_norms` of all query heads, and all key heads, as one vector. `cosine`, `sine`
    [positions, n] fp32: the first 2 n columns of queries and keys are rotated, in pairs of columns i and i + n, or
    2 i and 2 i + 1 if `interleaved`. With `norms_last` the norms come after the rotation. `query_scale` [positions]
    fp32 multiplies the queries. Every step rounds to qkv's dtype.
    """

    heads: int
    kv_heads: int
    dim: int
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None
    clip: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    whole_norms: bool = False
    norms_last: bool = False
    cosine: torch.Tensor | None = None
    sine: torch.Tensor | None = None
    interleaved: bool = False
    query_scale: torch.Tensor | None = None

    @property
    def total(self) -> int:
        """Query, key and value heads."""
        return self.heads + 2 * self.kv_heads

    @property
    def norms(self) -> tuple[Norm | None, Norm | None, Norm | None]:
        return self.q_norm, self.k_norm, self.v_norm

    @property
    def needs_norm_heads(self) -> bool:
        """Whether `norm_heads` has to run first: `rotate_write` has RMSNorms of single heads, with a weight that all
        heads share or none."""
        found = [norm for norm in self.norms if norm is not None]
        weighted = [norm for norm in found if norm.weight is not None]
        if any(norm.centered or norm.bias is not None for norm in found):
            return True
        if any(norm.weight is not None and norm.weight.dim() > 1 for norm in weighted):
            return True
        whole = self.whole_norms and (self.q_norm is not None or self.k_norm is not None)
        return whole or len({norm.rounds_first for norm in weighted}) > 1

    def after_norm_heads(self) -> Projections:
        """What remains for `rotate_write` after `norm_heads`."""
        done = {"bias": None, "order": None, "clip": None, "q_norm": None, "k_norm": None, "v_norm": None}
        return replace(self, **done, whole_norms=False)  # type: ignore[arg-type]
