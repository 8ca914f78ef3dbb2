"""Quantised weights: what a linear layer is whose matrix is stored in codes of 4 or 8 bits with scales.

    w[n, k] = (value of code[n, k] - zero[n, g]) * scale[n, g] + offset[n, g]        g: the group of columns of k

All formats are one layout, whatever library wrote them: codes in the order of the columns, scales per row and group.
The loaders (`loading.quantised`) bring checkpoints into it, and a backend lays it out as its kernels read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.nn import functional as F

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7 of FP4. Codes 8 to 15 are their negatives."""


BLOCK = 128
"""Columns that are packed together, two to a byte."""


INTERLEAVED_ROWS, INTERLEAVED_BYTES = 8, 128
"""Rows of a matrix that are interleaved together, and the bytes of a row that are padded to a multiple of this."""


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


NAMES = {Codes.E4M3: "fp8", Codes.INT8: "int8", Codes.INT4: "int4", Codes.E2M1: "mxfp4"}
"""What number formats are called."""
FP8_DYNAMIC = "fp8_dynamic"
"""FP8 weights whose rows of x are rounded, too."""


def _name_of(format: Format) -> str:
    rounds = format.codes is format.activations is Codes.E4M3
    return FP8_DYNAMIC if rounds else NAMES[format.codes]


def formats_of(model: torch.nn.Module) -> tuple[Format, ...]:
    """The formats of a model's quantised layers, each once."""
    return tuple(dict.fromkeys(module.format for module in model.modules() if isinstance(module, QuantisedLinear)))


def weights_name(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """The number format of a model's weights as `load` takes it, such as 'fp8'; for one that is not quantised the name
    of its dtype. A mixture in 'fp8_dynamic' has experts in 'fp8', which are not named."""
    names = dict.fromkeys(map(_name_of, formats_of(model)))
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


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Nibbles [out, in], two per byte: [out, in / 2] uint8.

    In every block of 128 columns byte j holds column j in its low nibble and column j + 64 in its high one, so that the
    low nibbles of 64 bytes are columns in a row, and the high ones the next. A shorter last block is halved likewise.
    """

    def halves(block: torch.Tensor) -> torch.Tensor:
        low, high = block.unflatten(1, (-1, 2, block.shape[1] // 2 if block.shape[1] < BLOCK else BLOCK // 2)).unbind(2)
        return (low | high << 4).flatten(1)

    return torch.cat([halves(block) for block in _blocks(nibbles.to(torch.uint8), BLOCK)], 1)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`: nibbles [out, in] uint8."""

    def nibbles(block: torch.Tensor) -> torch.Tensor:
        bytes = block.unflatten(1, (-1, min(block.shape[1], BLOCK // 2)))
        return torch.stack([bytes & 15, bytes >> 4], 2).flatten(1)

    return torch.cat([nibbles(block) for block in _blocks(codes, BLOCK // 2)], 1)


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    """Codes [out, bytes] of 8 n rows of 64 m bytes, in the order in which the threads of matrix instructions take them.

    Of the columns of a row, such an instruction wants 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of every 16 from thread q of
    four. In 64 bytes these are next to one another, thread by thread, so that each reads 16 bytes at once; and the 64
    bytes of 8 rows are, whose 32 threads so read 512 bytes in a row.
    """
    split = codes.unflatten(1, (-1, 4, 2, 4, 2)).unflatten(
        0, (-1, INTERLEAVED_ROWS)
    )  # groups, rows; 64 bytes: 16s, 8s, thread, byte
    return split.permute(0, 2, 1, 5, 3, 4, 6).reshape(codes.shape)


def in_order(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleaved`."""
    split = codes.reshape(-1, codes.shape[1] // 64, INTERLEAVED_ROWS, 4, 4, 2, 2)
    return split.permute(0, 2, 1, 4, 5, 3, 6).reshape(codes.shape)


def padded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [out, bytes] with zeros as further columns, up to a multiple of INTERLEAVED_BYTES."""
    missing = -codes.shape[1] % INTERLEAVED_BYTES
    if not missing or bits == 8:
        return F.pad(codes, (0, missing))
    whole = codes.shape[1] // (BLOCK // 2) * (BLOCK // 2)
    last = F.pad(unpacked(codes[:, whole:]) if whole < codes.shape[1] else codes[:, whole:], (0, 2 * missing))
    return torch.cat([codes[:, :whole], packed(last)], 1)


def without_padding(codes: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """The inverse of `padded`: the codes of the first `width` columns."""
    size = width * bits // 8
    if size == codes.shape[1] or bits == 8:
        return codes[:, :size]
    whole = size // (BLOCK // 2) * (BLOCK // 2)
    if whole == size:
        return codes[:, :size]
    return torch.cat([codes[:, :whole], packed(unpacked(codes[:, whole:])[:, : width - 2 * whole])], 1)


def _blocks(tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
    """All whole blocks of columns as one tensor, and the columns after them, without what is empty."""
    whole = tensor.shape[1] // block * block
    return [part for part in (tensor[:, :whole], tensor[:, whole:]) if part.shape[1]]


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
