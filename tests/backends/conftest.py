"""Where a test of the graph backend runs: on the kernels' slow twins, and where there is CUDA there, too, captured."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param
