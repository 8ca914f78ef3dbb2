"""What a layer adds to the residual stream."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lookahead.models.norm import Norm


class Delta(NamedTuple):
    """norm(values + bias), which a norm adds to the residual stream before it reads the stream.

    values [M, width] are the product of the layer's last matrix, bias [width] its bias, and `norm` the block's norm
    after the layer; None where there is none.
    """

    values: torch.Tensor
    bias: torch.Tensor | None = None
    norm: Norm | None = None
