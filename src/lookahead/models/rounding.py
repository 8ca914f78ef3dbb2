"""Rounds plain weights to a number format, without calibration."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from lookahead.models.number_formats import Codes, Format, nearest_e2m1, scale_values
from lookahead.models.packing import packed
from lookahead.models.quantised import QuantisedLinear


@torch.no_grad()
def quantise(weight: torch.Tensor, format: Format, bias: torch.Tensor | None = None) -> QuantisedLinear:
    """Round W [out, in] to the nearest values of a format with a scale per row, or per group of a row's columns.

    A group's largest magnitude becomes the largest code. FP4's scales are the powers of two of OCP's MX formats: that
    magnitude over its scale is at least 4 and below 8, of which 6 is the largest code. With zero points a group's
    smallest number becomes code 0, and its largest 15; the range includes 0, which is a code itself, the zero point.
    """
    width = weight.shape[1]
    group = format.group or width
    wide = weight.float()
    blocks = (F.pad(wide, (0, -width % group)) if width % group else wide).unflatten(1, (-1, group))
    highest, lowest = blocks.amax(2), blocks.amin(2)
    largest = torch.maximum(highest, -lowest).clamp(min=1e-30)
    if format.zeros:
        lowest = lowest.clamp(max=0)
        scales = (highest.clamp(min=0) - lowest).clamp(min=1e-30) / 15
    elif format.codes is Codes.E2M1:
        scales = (torch.frexp(largest).exponent + (127 - 3)).clamp(0, 254).to(torch.uint8)
    else:
        scales = largest / {Codes.E4M3: 448.0, Codes.INT8: 127.0, Codes.INT4: 7.0}[format.codes]
    if format.codes is Codes.INT4:
        scales = scales.to(weight.dtype)  # two bytes per group: the codes are chosen for the scales as they are kept
    steps = scale_values(scales)
    steps = torch.where(steps > 0, steps, 1)  # in float16 the scale of tiny weights is 0
    scaled = (blocks / steps[:, :, None]).flatten(1)[:, :width]
    zeros = (-lowest / steps).round_().clamp_(0, 15) if format.zeros else None
    if zeros is not None:
        shift = zeros.repeat_interleave(group, 1)[:, :width]
        codes = packed(scaled.round_().add_(shift).clamp_(0, 15))
        zeros = zeros.to(torch.uint8)
    elif format.codes is Codes.E4M3:
        codes = scaled.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    elif format.codes is Codes.INT8:
        codes = scaled.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    elif format.codes is Codes.E2M1:
        codes = packed(nearest_e2m1(scaled))
    else:
        codes = packed(scaled.round_().clamp_(-8, 7) + 8)
    given = None if bias is None else bias.detach()
    return QuantisedLinear(format, codes.contiguous(), scales, zeros=zeros, bias=given, dtype=weight.dtype)
