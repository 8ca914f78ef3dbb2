"""CUDA's current device, for objects whose methods launch work on a device of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class HasDevice(Protocol):
    device: torch.device


OwnerT = TypeVar("OwnerT", bound=HasDevice)
P = ParamSpec("P")
R = TypeVar("R")


def on_model_device(call: Callable[Concatenate[OwnerT, P], R]) -> Callable[Concatenate[OwnerT, P], R]:
    """Run a method that launches GPU work with the model's GPU as the current device."""

    @wraps(call)
    def run(self: OwnerT, /, *args: P.args, **options: P.kwargs) -> R:
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return call(self, *args, **options)
        with torch.cuda.device(self.device):
            return call(self, *args, **options)

    return run
