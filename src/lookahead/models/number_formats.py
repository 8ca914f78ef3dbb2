"""Number formats of quantised weights: what a code stands for, and what its scale multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from lookahead.models.packing import unpacked

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7 of FP4. Codes 8 to 15 are their negatives."""


class Codes(Enum):
    """What a code stands for: an FP8 number (e4m3fn), a signed byte, a nibble less 8 or a zero point, an FP4 number."""

    E4M3 = "e4m3"
    INT8 = "int8"
    INT4 = "int4"
    E2M1 = "e2m1"

    @property
    def bits(self) -> int:
        return 8 if self in (Codes.E4M3, Codes.INT8) else 4


@dataclass(frozen=True)
class Format:
    """A number format of weights. `group`: columns that share a scale, 0 for all; `rows`: rows that do.

    `zeros` and `offsets`: whether groups have them. `ordered`: the columns were sorted (see `QuantisedLinear.order`).
    `activations`: codes that a row of x is rounded to before the product, with one scale per row; None for x as it is.
    """

    codes: Codes
    group: int
    rows: int = 1
    zeros: bool = False
    offsets: bool = False
    ordered: bool = False
    activations: Codes | None = None

    def groups(self, width: int) -> int:
        """The groups of a row of this many columns."""
        return -(-width // self.group) if self.group else 1


MXFP4 = Format(Codes.E2M1, 32)
"""FP4 in groups of 32, as OCP's MX formats; their scales are powers of two."""

NAMES = {Codes.E4M3: "fp8", Codes.INT8: "int8", Codes.INT4: "int4", Codes.E2M1: "mxfp4"}
"""What number formats are called."""
FP8_DYNAMIC = "fp8_dynamic"
"""FP8 weights whose rows of x are rounded, too."""


def name_of(format: Format) -> str:
    """What `load` calls a number format."""
    rounds = format.codes is format.activations is Codes.E4M3
    return FP8_DYNAMIC if rounds else NAMES[format.codes]


def values_of(codes: torch.Tensor, kind: Codes) -> torch.Tensor:
    """The values of codes [out, bytes], fp32 [out, in]."""
    if kind is Codes.E4M3:
        return codes.view(torch.float8_e4m3fn).float()
    if kind is Codes.INT8:
        return codes.view(torch.int8).float()
    nibbles = unpacked(codes)
    if kind is Codes.INT4:
        return nibbles.float() - 8
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[nibbles.long()]


def nearest_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """The codes of the FP4 numbers that are nearest, of two equally near ones the even code. uint8, one per number."""
    sizes = numbers.abs()
    steps = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    sizes = ((sizes / steps).round() * steps).clamp(max=E2M1[-1])
    found = torch.searchsorted(torch.tensor(E2M1, device=numbers.device), sizes.contiguous())
    return (found + 8 * (numbers < 0)).to(torch.uint8)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales in fp32."""
    if scales.dtype is torch.uint8:
        return torch.exp2(scales.float() - 127)
    return scales.float()


def rounded(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    """x with each row rounded to codes of 8 bits and one scale: its largest magnitude becomes the codes' largest."""
    most = 127.0 if codes is Codes.INT8 else 448.0
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / most
    scaled = x.float() / scale
    whole = scaled.round() if codes is Codes.INT8 else scaled.to(torch.float8_e4m3fn).float()
    return (whole * scale).to(x.dtype)
