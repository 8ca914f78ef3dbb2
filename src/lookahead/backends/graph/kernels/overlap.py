"""Programmatic dependent launch: on Hopper a kernel's programs are placed while those of the one before still run.

Between two kernels of a step lie one to two microseconds in which neither runs, as long as many of the kernels. With
this a kernel begins early, does what needs nothing of the step, and waits until all kernels before it have ended.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """To be called by every program of a kernel before it reads or writes anything that a step's kernels write.

    Also lets the next kernel's programs begin when all programs of this one have come here.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch(pointers):
    """Bring the lines of 128 bytes that hold these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


def overlapping(like: torch.Tensor) -> dict[str, Any]:
    """The launch arguments of a kernel that calls `wait_for_previous`."""
    return {"OVERLAPS": True, "launch_pdl": True} if like.is_cuda and _overlaps(like.device) else {"OVERLAPS": False}


@cache
def _overlaps(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
