"""Drafting state that survives restarts: one file per key, model and tokenizer.

A file changes only the speed, never the output. It holds likely continuations of its key's earlier prompts, so only the
user can read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.successors import BEFORE_TEXT, MAX_SUCCESSORS
from lookahead.backends.failures import DeviceError
from lookahead.cache import check_version, read_arrays, write_arrays
from lookahead.generate import LookaheadModel
from lookahead.serve.keys import Owner
from lookahead.serve.settings import ServeSettings

log = logging.getLogger("lookahead.serve")

VERSION = 1
PUT_OFF = 4
"""How often a save may be postponed while the server is busy."""
WIDTH = 3 + 1 + 2 * MAX_SUCCESSORS
"""Columns per key: its three tokens, the count of numbers that follow, and successors with their levels."""
NO_TOKEN = -(1 << 31)
"""Pads keys of fewer than three tokens."""
MOST_BROKEN = 10
"""The most unreadable files kept under other names; then the first is overwritten."""
R = TypeVar("R")
Arrays = Mapping[str, npt.NDArray[Any]]


def folder_of(model: LookaheadModel, base: Path) -> Path:
    """The folder for this model and tokenizer."""
    facts = model.model.config.to_dict()
    shape = {name: value for name, value in facts.items() if isinstance(value, (int, float, str))}
    shape.pop("_name_or_path", None)
    words = hashlib.sha256(json.dumps(sorted(model.tokenizer.get_vocab().items())).encode()).hexdigest()
    known = json.dumps([VERSION, model.name, shape, words], sort_keys=True)
    return base / hashlib.sha256(known.encode()).hexdigest()[:16]


def to_arrays(memory: SharedMemory, most: int) -> Arrays:
    """Copy the newest `most` keys and the calibration. Call it between steps of the engine."""
    items = list(memory.successors.items())[-most:]
    keys = np.full((len(items), WIDTH), NO_TOKEN, dtype=np.int32)
    for row, (key, successors) in zip(keys, items, strict=True):
        row[3 - len(key) : 3] = key
        row[3] = len(successors)
        row[4 : 4 + len(successors)] = successors
    return {"version": np.array(VERSION), "keys": keys, **memory.calibration.state()}


def fill_from_arrays(memory: SharedMemory, arrays: Arrays) -> None:
    """Fill a memory from a copy. Raises ValueError if the arrays are malformed."""
    check_version(int(arrays["version"]) if "version" in arrays else None, VERSION)
    keys = arrays["keys"]
    if keys.ndim != 2 or keys.shape[1] != WIDTH or keys.dtype != np.int32:
        raise ValueError(f"keys of shape {keys.shape}")
    if len(keys) and not ((keys[:, 3] >= 0) & (keys[:, 3] <= 2 * MAX_SUCCESSORS) & (keys[:, 3] % 2 == 0)).all():
        raise ValueError("successors of an odd length")
    check_numbers(keys)
    memory.calibration.load_state(arrays)
    for row in keys.tolist():
        key = tuple(token for token in row[:3] if token != NO_TOKEN)
        memory.successors.put(key, tuple(row[4 : 4 + row[3]]))


def check_numbers(keys: npt.NDArray[np.int32]) -> None:
    """Raise ValueError if tokens or levels are out of range: levels index other tables."""
    key, count, numbers = keys[:, :3], keys[:, 3:4], keys[:, 4:]
    column = np.arange(2 * MAX_SUCCESSORS)
    tokens, levels = numbers[column < count // 2], numbers[(column >= count // 2) & (column < count)]
    if (key[:, 2] < 0).any() or ((key < BEFORE_TEXT) & (key != NO_TOKEN)).any() or (tokens < 0).any():
        raise ValueError("numbers that are no tokens")
    if ((levels < 0) | (levels >= LEVELS)).any():
        raise ValueError(f"levels that are not 0 to {LEVELS - 1}")


def read(path: Path, memory: SharedMemory) -> bool:
    """Fill a memory from a file. Returns False if it is missing, or unreadable: then it is renamed with a warning."""
    remove_parts(path)
    try:
        fill_from_arrays(memory, read_arrays(path))
    except FileNotFoundError:
        return False
    except Exception as error:  # zlib, zipfile and NumPy each raise their own errors on damage
        set_aside(path, f"{type(error).__name__}: {error}")
        return False
    return True


def remove_parts(path: Path) -> None:
    """Remove unfinished files of a server that was killed while writing."""
    try:
        for part in path.parent.glob(f"{path.stem}*.part"):
            part.unlink(missing_ok=True)
    except OSError as error:
        log.warning("unfinished files in %s cannot be removed: %s", path.parent, error)


def set_aside(path: Path, why: str) -> None:
    """Rename an unreadable file, so that it is neither read again nor overwritten."""
    names = [path.with_suffix(".broken"), *(path.with_suffix(f".broken-{number}") for number in range(2, MOST_BROKEN))]
    aside = next((name for name in names if not os.path.lexists(name)), names[0])
    try:
        os.replace(path, aside)
    except OSError as error:
        log.warning("the memory %s cannot be read (%s) nor renamed to %s: %s", path, why, aside, error)
    else:
        log.warning("the memory %s cannot be read (%s); it is set aside as %s", path, why, aside)


class MemorySaver:
    """Loads every owner's memory at startup, and saves it periodically and at shutdown.

    `in_worker` runs a function in a thread that may block. `busy` is true while requests are running: copying a memory
    pauses the engine.
    """

    def __init__(
        self,
        model: LookaheadModel,
        settings: ServeSettings,
        owners: Sequence[Owner],
        in_worker: Callable[[Callable[[], Any]], Awaitable[Any]],
        busy: Callable[[], bool],
    ) -> None:
        self.model, self.settings, self.owners, self.in_worker, self.busy = model, settings, owners, in_worker, busy
        self.folder = settings.memory_folder or Path()
        self._saving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.folder = await self.in_worker(partial(folder_of, self.model, self.folder))
        for owner in self.owners:
            await self.in_worker(partial(read, self.path(owner), owner.memory))
        self._saving = asyncio.ensure_future(self._save_periodically())

    async def close(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
            await self.save()

    def path(self, owner: Owner) -> Path:
        return self.folder / f"{owner.file}.npz"

    async def save(self) -> None:
        """Save every owner's memory. Each is copied between two steps of the engine."""
        for owner in self.owners:
            copy = partial(to_arrays, owner.memory, self.settings.memory_keys)
            try:
                arrays = await self.in_worker(partial(self._between_steps, copy))
                await self.in_worker(partial(write_arrays, self.path(owner), arrays))
            except (OSError, RuntimeError) as error:
                log.warning("the memory of %s cannot be written: %s", owner.name, error)

    def _between_steps(self, copy: Callable[[], R]) -> R:
        """Copy while no step runs, as after the loss of the device, of which the host's memory knows nothing."""
        try:
            return self.model.client.call(copy)
        except DeviceError:
            return copy()

    async def _save_periodically(self) -> None:
        put_off = 0
        while True:
            await asyncio.sleep(self.settings.memory_seconds)
            if self.busy() and put_off < PUT_OFF:
                put_off += 1
            else:
                put_off = 0
                await self.save()
