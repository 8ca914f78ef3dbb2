"""Profiles: `lookahead tune --save` stores the config it chose for a model on a machine, and `load()` uses it.

A profile is specific to a model (its name and shape), device, dtype and backend. It can change the speed of an answer,
never its text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lookahead.backends.base import Backend
from lookahead.cache import key_of, read_json, write_json
from lookahead.config import LookaheadConfig
from lookahead.loading.fitting import identity_of
from lookahead.machine import processor

FOLDER = "profiles"
VERSION = 3
"""The format of a profile. Version 1 had step costs of chains, not trees; version 2 had no version field."""


def save(
    label: str, backend: Backend, config: LookaheadConfig, name: str, measured: Mapping[str, Any], folder: Path
) -> Path:
    """Store a config for this model on this machine, replacing an earlier one. `measured` says why it was chosen."""
    facts = _facts(label, backend)
    path = folder / FOLDER / f"{key_of(facts)}.json"
    try:
        write_json(path, {"of": facts, "name": name, "config": asdict(config), "measured": dict(measured)}, VERSION)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ValueError(f"cannot save the profile {path}: {why}; set LOOKAHEAD_CACHE to a folder") from error
    return path


def find(
    label: str, backend: Backend, folder: Path, log: Callable[[str], None] | None = None
) -> LookaheadConfig | None:
    """The saved config for this model on this machine, or None. `log` gets a line about it.

    None for a tensor-parallel model: its ranks must choose the same trees, and each might find another profile.
    """
    if backend.capabilities.ranks > 1:
        return None
    facts = _facts(label, backend)
    path = folder / FOLDER / f"{key_of(facts)}.json"
    say = log or (lambda _: None)
    try:
        stored = read_json(path, VERSION)
        if stored["of"] != json.loads(json.dumps(facts)):
            return None
        name, config = str(stored["name"]), LookaheadConfig.from_json(stored["config"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        say(f"note: the profile {path} cannot be used ({why:.80}): run `lookahead tune --save` again, or delete it")
        return None
    say(f"using the tuned profile: {name}")
    return config


def _facts(label: str, backend: Backend) -> dict[str, Any]:
    """What identifies a profile. It includes the model's name: two models of the same shape accept differently."""
    named = str(Path(label).resolve()) if Path(label).exists() else label
    return {**identity_of(backend), "name": named, "machine": processor(), "cores": os.cpu_count()}
