"""The dtypes that kernels are tested in, and how far a kernel may be from its twin."""

from __future__ import annotations

import pytest
import torch

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=[] if torch.cuda.is_available() else pytest.mark.skip("needs CUDA")),
]


def close(found: torch.Tensor, expected: torch.Tensor, roundings: int = 2) -> bool:
    """Whether the difference is within this number of roundings of the dtype."""
    eps = torch.finfo(expected.dtype).eps
    return torch.allclose(found.double(), expected.double(), rtol=roundings * eps, atol=2 * roundings * eps)
