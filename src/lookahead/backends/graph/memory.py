"""What the graph backend does when the GPU's memory is full: give back what nobody uses, and try once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def room_for_a_capture(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Make sure that a capture on this stream can begin, or raise torch's OutOfMemoryError.

    The first capture makes two tensors for the seed of random numbers. If torch has no memory for them, its graph ends
    the process when it is freed (seen with torch 2.11). So the smallest blocks are taken before, and two of them given
    back, beside others that keep their memory with torch. And a capture that cannot begin leaves its stream the current
    one: here the one before becomes that again.
    """
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            blocks = [torch.empty(1, device="cuda") for _ in range(4)]
        del blocks[::2]
        yield


def empty_cache(device: torch.device) -> None:
    """Let the driver have the memory that torch's allocator keeps: graphs and cuBLAS take theirs from there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
