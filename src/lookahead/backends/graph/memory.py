"""What the graph backend does when GPU memory is full: free what is unused, and retry once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from lookahead.backends.failures import DeviceMemoryError, memory_error, out_of_memory

R = TypeVar("R")


def with_room(
    make: Callable[[], R], free_unused: Callable[[], None], what: str, device: torch.device, slot: int | None = None
) -> R:
    """Call `make`, and again after `free_unused` if device memory is full. Raises DeviceMemoryError if that fails, too,
    for the sequence in `slot` or for all; `what` describes the allocation."""
    try:
        return make()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Outside the handler, whose error keeps references to what was allocated so far.
    free_unused()
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

    The first capture allocates two tensors for the random seed. If torch has no memory for them, freeing the graph
    crashes the process (seen with torch 2.11). So the smallest blocks are allocated here first, and two of them freed
    again, next to others that keep the segment with torch's allocator. A capture that cannot begin also leaves its
    stream current, so the previous stream is restored here.
    """
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            blocks = [torch.empty(1, device="cuda") for _ in range(4)]
        del blocks[::2]
        yield


def empty_cache(device: torch.device) -> None:
    """Return the memory cached by torch's allocator to the driver, from which graphs and cuBLAS allocate."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
