"""The cost of a step is measured once per model and machine, and cached; the default config is fitted to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from time import time
from typing import Any

import torch

from lookahead.algorithm.budget import fit_config
from lookahead.algorithm.cost import CostCurve, PassCost, table_for_sizes
from lookahead.backends.base import Backend
from lookahead.cache import key_of, read_json, write_json
from lookahead.config import LookaheadConfig
from lookahead.loading.timing import MIN_CONTEXT, PASS_SIZES, measure, measure_passes, sizes_to_time
from lookahead.machine import processor
from lookahead.models.quantised import formats_of

ATTEMPTS, DAY = 4, 86400.0
"""Attempts before an unstable measurement is accepted, and for how many seconds it then is."""

VERSION = 5
"""The format of a curve's file. Version 1 timed chains, not trees, version 2 some captures; 3 had no version field, 4
no experts."""


def fitted(
    config: LookaheadConfig,
    backend: Backend,
    folder: Path,
    log: Callable[[str], None] | None = None,
    ranks: int = 1,
    quick: bool = False,
) -> LookaheadConfig:
    """The config fitted to a backend's model on this machine. The curve is cached in `folder`; `ranks` share a step.

    A tensor-parallel model gets the config unchanged: each of its ranks would measure another curve, choose other
    trees, and wait for the others forever.
    """
    if backend.capabilities.ranks > 1:
        return config
    identity = {**identity_of(backend), "torch": torch.__version__}
    return fit_config(config, cached_curve(backend, identity, folder, log, quick).across(ranks))


def pass_cost(backend: Backend, folder: Path, log: Callable[[str], None] | None = None) -> PassCost | None:
    """The cost of passes of 1 to 512 rows (or `backend.most_rows`): read from `folder`, or measured and written there.

    None for a backend that pads a pass to its longest input, for a tensor-parallel model (see `fitted`), and for a
    context too short to measure in.
    """
    if backend.capabilities.pads or backend.capabilities.ranks > 1 or (backend.max_length or MIN_CONTEXT) < MIN_CONTEXT:
        return None
    identity = {**identity_of(backend), "torch": torch.__version__, "passes": 1, "most_rows": backend.most_rows}
    curve = cached_curve(backend, identity, folder, log, measured=measure_passes)
    return cost_of_passes(curve, backend)


def cost_of_passes(curve: CostCurve, backend: Backend) -> PassCost:
    """The cost of a backend's passes by their measured curve."""
    rows = min(PASS_SIZES[-1], backend.most_rows, curve.reach)
    if curve.experts:  # rows that fill up a captured step read no experts
        return PassCost(curve.table(rows), curve.expert_cost(rows))
    return PassCost(table_for_sizes(curve.table(rows), backend.capabilities.row_sizes))


def cached_curve(
    backend: Backend,
    identity: dict[str, Any],
    folder: Path,
    log: Callable[[str], None] | None = None,
    quick: bool = False,
    measured: Callable[[Backend], CostCurve] | None = None,
) -> CostCurve:
    """The curve of this model on this machine: read from `folder`, or measured and written there.

    A curve that is not stable is measured again, unless the call is `quick`: that uses any cached curve, or else
    measures for about a second, which is never stable. If the folder cannot be written, the next call measures again.
    """
    facts = {**identity, "machine": processor(), "cores": os.cpu_count()}
    path = folder / "step-cost" / f"{key_of(facts)}.json"
    try:
        stored = read_json(path, VERSION)
        known = CostCurve(
            tuple(map(int, stored["sizes"])),
            tuple(map(float, stored["seconds"])),
            reads=tuple(map(float, stored["reads"])),
            experts=int(stored["experts"]),
        )
        attempts = int(stored["attempts"])
        recent = time() - path.stat().st_mtime < DAY
        if quick or stored["stable"] or (attempts >= ATTEMPTS and recent):
            return known
    except (OSError, ValueError, KeyError, TypeError):
        known, attempts = None, 0
    if log is not None:
        why = "once per model" if known is None else "again: the times of the last attempt were not stable"
        log(f"measuring what a step costs on this machine ({why}) ...")
    cost = measure(backend, sizes_to_time(backend), quick=quick) if measured is None else measured(backend)
    cost = cost if known is None else cost.with_faster(known)
    content = {field.name: getattr(cost, field.name) for field in fields(cost)}
    with suppress(OSError):
        write_json(path, {**content, "attempts": attempts + (not quick), "of": facts}, VERSION)
    return cost


def identity_of(backend: Backend) -> dict[str, Any]:
    """What determines the cost of a step: the model's shape, its dtype, its device and its backend."""
    model, device, capabilities = backend.model, backend.device, backend.capabilities
    facts = model.config.to_dict()
    return {
        "model": {k: v for k, v in facts.items() if isinstance(v, (int, float, str)) and k != "_name_or_path"},
        "weights": " ".join(map(str, formats_of(model))) or str(facts.get("quantization_config")),
        "places": {k: str(v) for k, v in (getattr(model, "hf_device_map", None) or {}).items()},
        "dtype": str(backend.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
        "backend": capabilities.name,
        "kernels": capabilities.kernels,
        "ranks": capabilities.ranks,
    }
