"""Quantised weights: what a linear layer is whose matrix is stored in codes of 4 or 8 bits with scales.

    w[n, k] = (value of code[n, k] - zero[n, g]) * scale[n, g] + offset[n, g]        g: the group of columns of k

All formats are one layout, whatever library wrote them: codes in the order of the columns, scales per row and group.
The loaders (`loading.quantised`) bring checkpoints into it, and a backend lays it out as its kernels read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from lookahead.models.number_formats import (
    FP8_DYNAMIC,
    MXFP4,
    NAMES,
    Codes,
    Format,
    name_of,
    rounded,
    scale_values,
    values_of,
)
from lookahead.models.packing import BLOCK, INTERLEAVED_ROWS, in_order, interleaved, padded, without_padding

MOST_EXPANDED = {"cpu": 1 << 20, "cuda": 1 << 26}
"""The weights that a forward pass expands at once. On a CPU they then stay in its cache: the linear layers of the
embedded model in int8 take 48 ms of CPU time for 5 rows, and 119 if each is expanded as a whole."""


class QuantisedLinear(torch.nn.Module):
    """y = x W^T + b with quantised W [out, in].

    codes   uint8 [out, in] or, with two columns per byte, [out, in / 2] (see `packed`)
    scales  [out / rows, in / group], floating point; for powers of two uint8, the exponent plus 127 (e8m0)
    zeros   uint8 [out / rows, in / group], for int4 only; without them a nibble's zero is 8
    offsets floating point like scales
    order   integers [in]: the k-th column of the codes multiplies x[order[k]]. Without it columns are those of x
    bias    [out]

    The last group of a row may be shorter, and the last rows that share scales fewer. The forward pass expands W to x's
    dtype, some rows at a time: right everywhere, and slow. `weight` is W in `dtype`, the model's.

    A backend may replace the tensors by others with the same content, for instance by parts of larger ones;
    `is_interleaved` then says whether the codes are padded and in the order of `interleaved`. In a state dict they
    never are.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    offsets: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        format: Format,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        zeros: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        interleaved_width: int | None = None,
    ) -> None:
        """`interleaved_width`: if the codes are interleaved, the columns that they have without padding."""
        super().__init__()
        self.format, self.dtype, self.is_interleaved = format, dtype, interleaved_width is not None
        self.out_features = len(codes)
        self.in_features = interleaved_width or codes.shape[1] * 8 // format.codes.bits
        tensors = {"codes": codes, "scales": scales, "zeros": zeros, "offsets": offsets, "order": order}
        if not self.is_interleaved:
            _check(format, self.out_features, self.in_features, tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """W [out, in] in the model's dtype: a new tensor."""
        return self.dequantised(self.dtype)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [out, in], computed in fp32 and rounded to `dtype`; columns are those of x."""
        return self.dequantised_rows(0, self.out_features, dtype)

    def dequantised_rows(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of W from `first`, a multiple of `format.rows`, to `last`."""
        group, rows = self.format.group or self.in_features, self.format.rows
        shared = slice(first // rows, -(-last // rows))

        def spread(groups: torch.Tensor) -> torch.Tensor:
            wide = (groups.repeat_interleave(rows, 0) if rows > 1 else groups)[: last - first]
            return wide if wide.shape[1] == 1 else wide.repeat_interleave(group, 1)[:, : self.in_features]

        weight = values_of(self._codes(first, last), self.format.codes)
        if self.zeros is not None:
            weight += 8 - spread(self.zeros[shared].float())
        weight *= spread(scale_values(self.scales[shared]))
        if self.offsets is not None:
            weight += spread(self.offsets[shared].float())
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight.to(dtype)

    def _codes(self, first: int, last: int) -> torch.Tensor:
        """The codes of these rows, in the order of their columns."""
        if not self.is_interleaved:
            return self.codes[first:last]
        start, end = first // INTERLEAVED_ROWS * INTERLEAVED_ROWS, -(-last // INTERLEAVED_ROWS) * INTERLEAVED_ROWS
        return self._in_order(self.codes[start:end])[first - start : last - start]

    def _in_order(self, codes: torch.Tensor) -> torch.Tensor:
        return without_padding(in_order(codes), self.in_features, self.format.codes.bits)

    def set_interleaved(self, wanted: bool) -> None:
        """Bring the codes into the order of `interleaved`, or back. MXFP4's scales are then padded to those of whole
        blocks of 128 columns."""
        if wanted and not self.is_interleaved:
            self.codes, self.scales = self._interleaved(self.codes), self._padded_scales(self.scales)
        elif self.is_interleaved and not wanted:
            self.codes, self.scales = self._in_order(self.codes), self._plain_scales()
            self.zeros = None if self.zeros is None else self.zeros.contiguous()
        self.is_interleaved = wanted

    def _interleaved(self, codes: torch.Tensor) -> torch.Tensor:
        return interleaved(padded(codes, self.format.codes.bits))

    def _padded_scales(self, scales: torch.Tensor) -> torch.Tensor:
        if self.format != MXFP4 or scales.dtype is not torch.uint8:
            return scales
        return F.pad(scales, (0, -scales.shape[1] % (BLOCK // self.format.group)), value=127)

    def _plain_scales(self) -> torch.Tensor:
        return self.scales[:, : self.format.groups(self.in_features)].contiguous()

    def with_bias(self, bias: torch.Tensor | None) -> QuantisedLinear:
        """The same weights, which are not copied, with another bias."""
        others = {"zeros": self.zeros, "offsets": self.offsets, "order": self.order}
        width = self.in_features if self.is_interleaved else None
        return QuantisedLinear(
            self.format, self.codes, self.scales, bias=bias, dtype=self.dtype, interleaved_width=width, **others
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_interleaved:
            destination[f"{prefix}codes"] = self._in_order(self.codes)
            destination[f"{prefix}scales"] = self._plain_scales()
            if self.zeros is not None:
                destination[f"{prefix}zeros"] = self.zeros.contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.is_interleaved:
            lay_out = {"codes": self._interleaved, "scales": self._padded_scales}
            plain = {"codes": self.in_features * self.format.codes.bits // 8, "scales": self._plain_scales().shape[1]}
            for name, change in lay_out.items():
                given = state_dict.get(prefix + name)
                if given is not None and given.shape == (len(getattr(self, name)), plain[name]):
                    state_dict = {**state_dict, prefix + name: change(given)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, 0, self.out_features, self.bias)

    def product(self, x: torch.Tensor, start: int, stop: int, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b of the rows of W from `start`, a multiple of `format.rows`, to `stop`; bias [stop - start]."""
        if self.format.activations is not None:
            x = rounded(x, self.format.activations)
        most, least = MOST_EXPANDED.get(x.device.type, 1 << 26), self.in_features * self.format.rows
        step = max(1, most // least) * self.format.rows
        if step >= stop - start:
            return F.linear(x, self.dequantised_rows(start, stop, x.dtype), bias)
        out = x.new_empty(*x.shape[:-1], stop - start)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            part = slice(first - start, last - start)
            weight = self.dequantised_rows(first, last, x.dtype)
            out[..., part] = F.linear(x, weight, None if bias is None else bias[part])
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format}"


def formats_of(model: torch.nn.Module) -> tuple[Format, ...]:
    """The formats of a model's quantised layers, each once."""
    return tuple(dict.fromkeys(module.format for module in model.modules() if isinstance(module, QuantisedLinear)))


def weights_name(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """The number format of a model's weights as `load` takes it, such as 'fp8'; for one that is not quantised the name
    of its dtype. A mixture in 'fp8_dynamic' has experts in 'fp8', which are not named."""
    names = dict.fromkeys(map(name_of, formats_of(model)))
    if FP8_DYNAMIC in names:
        names.pop(NAMES[Codes.E4M3], None)
    return "+".join(names) or str(dtype).removeprefix("torch.")


def activations_name(model: torch.nn.Module) -> str | None:
    """The number format to which some layer rounds its activations; None if no layer does.

    Then a difference in the last bit may become a step of a code, so passes over one token and over several differ by
    more than the rounding of floats.
    """
    rounded = (format.activations for format in formats_of(model))
    return next((NAMES[codes] for codes in rounded if codes is not None), None)


def _check(format: Format, out: int, width: int, tensors: dict[str, torch.Tensor | None]) -> None:
    """Raise ValueError for tensors that do not have the format's shapes: a loader has mixed something up."""
    groups = -(-out // format.rows), format.groups(width)
    expected = {"zeros": format.zeros, "offsets": format.offsets, "order": format.ordered}
    for name, wanted in expected.items():
        if (tensors[name] is not None) != wanted:
            raise ValueError(f"{name} are {'missing' if wanted else 'given'} for {format}")
    for name in ("scales", "zeros", "offsets"):
        tensor = tensors[name]
        if tensor is not None and tuple(tensor.shape) != groups:
            raise ValueError(f"{name} of {list(tensor.shape)} for {out} x {width} in {format}; it needs {list(groups)}")
    if format.zeros and format.codes is not Codes.INT4:
        raise ValueError(f"{format.codes.value} has no zero points")
