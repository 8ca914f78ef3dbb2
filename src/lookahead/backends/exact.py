"""Fit a config to the trees that a backend runs exactly. Everybody who takes a config from a user does it here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lookahead.backends.base import Backend
from lookahead.config import LookaheadConfig


def exact_limits(backend: Backend) -> tuple[int | None, int | None]:
    """The most nodes of a tree, and the depth of its guesses, that a config may have on this backend; None: any.

    In fp32 a larger tree differs from single steps by fp32 rounding alone, which is what exact means there, so only the
    default config keeps to `exact_nodes`. In half precision and int8 such rounding changes texts.
    """
    if backend.dtype == torch.float32:
        return None, None
    return backend.exact_nodes, backend.exact_depth


def exact_config(
    config: LookaheadConfig, backend: Backend, log: Callable[[str], None] | None = None
) -> LookaheadConfig:
    """The config with its budget and depth lowered to what is exact on this backend; `log` gets one line about it.

    ValueError if its window alone is too large. A config with `exact=False` is returned as it is.
    """
    if not config.exact:
        return config
    fitted = config.within(*exact_limits(backend))
    if fitted is not config and log is not None:
        changes = []
        if fitted.budget < config.budget:
            changes.append(f"budget={config.budget} to {fitted.budget} tokens")
        if fitted.deepest < config.deepest:
            changes.append(f"guesses of {config.deepest} tokens to {fitted.deepest}")
        dtype = str(backend.dtype).removeprefix("torch.")
        log(f"note: {' and '.join(changes)}: more is not exact in {dtype} on this backend (exact=False allows it)")
    return fitted


def default_within(backend: Backend) -> LookaheadConfig:
    """The default config with the trees that this backend runs exactly, and no window where that would fill them."""
    config, nodes = LookaheadConfig(), backend.exact_nodes
    if nodes is not None and nodes < config.budget:
        config = config.adapted(budget=nodes)
    return exact_config(config, backend)


def check_exact(config: LookaheadConfig, backend: Backend) -> None:
    """Raise ValueError for a config that `exact_config` would change."""
    if config.exact:
        nodes, depth = exact_limits(backend)
        if not config.is_within(nodes, depth):
            raise ValueError(
                f"steps of {config.budget} tokens with guesses of {config.deepest} are not exact on this backend, "
                f"which is exact up to {nodes} tokens and a depth of {depth}; fit the config with `exact_config`, or "
                "say exact=False"
            )
