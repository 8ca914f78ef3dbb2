"""Fits a config to the trees that a backend runs exactly. Every config from a user goes through here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lookahead.backends.base import Backend
from lookahead.config import LookaheadConfig


def exact_limits(backend: Backend) -> tuple[int | None, int | None]:
    """Maximum nodes of a tree and maximum depth of its draft tokens on this backend; None for no limit.

    In fp32 a larger tree differs from single steps only by fp32 rounding, which still counts as exact there, so only
    the default config respects `exact_nodes`. In half precision and int8 such rounding changes texts.
    """
    if backend.dtype == torch.float32:
        return None, None
    return backend.capabilities.exact_nodes, backend.capabilities.exact_depth


def exact_config(
    config: LookaheadConfig, backend: Backend, log: Callable[[str], None] | None = None
) -> LookaheadConfig:
    """The config with its budget and depth lowered to what is exact on this backend, and reduced to one chain of draft
    tokens on a backend whose trees cannot branch; `log` receives one line about it.

    Raises ValueError if its window alone is too large. With `exact=False` budget and depth are unchanged.
    """
    formed = config if backend.capabilities.branches else config.as_chain()
    fitted = formed.within(*exact_limits(backend)) if config.exact else formed
    if fitted is not config and log is not None:
        notes, smaller = [], []
        if formed is not config:
            notes.append("one chain of draft tokens per step, since trees cannot branch on this backend")
        if fitted.budget < formed.budget:
            smaller.append(f"the budget from {formed.budget} to {fitted.budget} tokens")
        if fitted.deepest < formed.deepest:
            smaller.append(f"the depth of draft tokens from {formed.deepest} to {fitted.deepest}")
        if smaller:
            dtype = str(backend.dtype).removeprefix("torch.")
            why = f"more is not exact in {dtype} on this backend (exact=False allows it)"
            notes.append(f"lowered {' and '.join(smaller)}: {why}")
        log(f"note: {'; '.join(notes)}")
    return fitted


def default_within(backend: Backend) -> LookaheadConfig:
    """The default config with the trees that this backend runs exactly, and no window where that would fill them."""
    config, nodes = LookaheadConfig(), backend.capabilities.exact_nodes
    if nodes is not None and nodes < config.budget:
        config = config.adapted(budget=nodes)
    return exact_config(config, backend)


def check_exact(config: LookaheadConfig, backend: Backend) -> None:
    """Raise ValueError for a config that `exact_config` would change."""
    if not backend.capabilities.branches and not config.is_chain:
        raise ValueError("trees cannot branch on this backend; fit the config with `exact_config`")
    if config.exact:
        nodes, depth = exact_limits(backend)
        if not config.is_within(nodes, depth):
            raise ValueError(
                f"steps of {config.budget} tokens with draft tokens {config.deepest} deep are not exact on this "
                f"backend, which is exact up to {nodes} tokens and a depth of {depth}; fit the config with "
                "`exact_config`, or set exact=False"
            )
