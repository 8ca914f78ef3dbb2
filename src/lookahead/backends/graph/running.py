"""A step running on the device: waiting for it, and reading its results."""

from __future__ import annotations

from ctypes import memmove
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.output import StepResults
from lookahead.backends.graph.steps import CapturedStep


@dataclass(slots=True)
class RunningStep:
    """A launched step.

    `turn` is the index of the host copy that receives its results, `stream` the CUDA stream it runs on (None on a CPU).
    `done` is set when a step ahead follows on the same stream: waiting for the stream would wait for that step, too, so
    the host waits for this event instead.
    """

    step: CapturedStep
    turn: int
    stream: torch.cuda.Stream | None
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Block until the results are on the host. On a CPU they are available at once."""
        if self.done is not None:
            self.done.synchronize()
        elif self.stream is not None:
            self.stream.synchronize()

    def new_results(self, rows: int) -> StepResults:
        """Memory for the results of the first `rows` needed rows; see `ops.TopTokens`."""
        return StepResults(np.empty((rows, self.step.top.out.shape[1]), dtype=np.int32))

    # After waiting. Later steps overwrite all of a step's memory, so these are copies.

    def copy_results(self, results: StepResults) -> None:
        """Fill the results, without NumPy, which takes ten times as long after a pause."""
        memmove(results.address, self.step.top.addresses[self.turn], results.rows.nbytes)

    def expert_reads(self) -> int:
        """See `Backend.expert_reads`."""
        reads = self.step.targets.expert_reads
        return 0 if reads is None else reads.total(self.turn)

    @torch.inference_mode()
    def logits(self, start: int, end: int) -> torch.Tensor:
        """The logits of needed rows, on the device."""
        return self.step.targets.logits[start:end].clone()

    def logprobs(self, start: int, end: int, count: int) -> tuple[Any, Any] | None:
        """The `count` likeliest tokens of needed rows [rows, count], and the log-probabilities of target and likeliest
        tokens [rows, 1 + count]. None if the step computes none."""
        logprobs = self.step.logprobs
        if logprobs is None:
            return None
        return logprobs.likely[start:end, :count].copy(), logprobs.array[start:end, : 1 + count].copy()


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The current CUDA stream. None on a CPU, where work is done when a call returns."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
