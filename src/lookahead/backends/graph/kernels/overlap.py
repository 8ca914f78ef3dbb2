"""Programmatic dependent launch: on Hopper a kernel's programs are placed while those of the one before still run.

Between two kernels of a step lie one to two microseconds in which neither runs, as long as many of the kernels. With
this a product with quantised weights begins early, asks for its first codes, and waits until the kernel before it has
ended. With cuBLASLt's products, which do not take part, an early start of the other kernels costs more than it saves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Called by all programs of a kernel: those of the next kernel may be placed when all of them have come here."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Called by all programs of a kernel that is launched early, before they read or write what other kernels do."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch(pointers):
    """Bring the lines of 128 bytes that hold these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


def overlaps(like: torch.Tensor) -> bool:
    """Whether kernels overlap on the device of this tensor."""
    return like.is_cuda and _overlaps(like.device)


@cache
def _overlaps(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def early_launch(like: torch.Tensor) -> dict[str, Any]:
    """The launch arguments of a kernel that calls `wait_for_previous`."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps(like) else {"OVERLAPS": False}
