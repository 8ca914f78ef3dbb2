"""What the graph backend does when the GPU's memory is full: give back what nobody uses, and try once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lookahead.backends.failures import DeviceMemoryError, memory_error, out_of_memory

R = TypeVar("R")


def with_room(
    make: Callable[[], R], give_back: Callable[[], None], what: str, device: torch.device, slot: int | None = None
) -> R:
    """Call `make`, and once more after `give_back` if the device's memory is full. Raises DeviceMemoryError if it still
    is. `what` is made, for the sequence in `slot` or for all."""
    try:
        return make()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Outside of the handler, whose error holds on to what was made so far.
    give_back()
    empty_cache(device)
    try:
        return make()
    except RuntimeError as error:
        if isinstance(error, DeviceMemoryError) or not out_of_memory(error):
            raise
        raise memory_error(error, what, device, slot) from error


def empty_cache(device: torch.device) -> None:
    """Let the driver have the memory that torch's allocator keeps: graphs and cuBLAS take theirs from there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
