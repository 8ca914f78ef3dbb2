"""What the readers of formats share: a quantised matrix before it is a module, and moving codes between packings.

A word is an int32 of a checkpoint, with 8 nibbles or 4 bytes, the first one lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lookahead.models.number_formats import Codes, Format
from lookahead.models.packing import packed
from lookahead.models.quantised import QuantisedLinear

Tensors = Mapping[str, torch.Tensor]
"""The tensors of one linear layer in a checkpoint, by the last part of their names."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of a `QuantisedLinear` without its bias."""

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def linear(self, bias: torch.Tensor | None, dtype: torch.dtype) -> QuantisedLinear:
        return QuantisedLinear(
            self.format,
            self.codes.contiguous(),
            self.scales.contiguous(),
            zeros=None if self.zeros is None else self.zeros.contiguous(),
            offsets=None if self.offsets is None else self.offsets.contiguous(),
            order=self.order,
            bias=None if bias is None else bias.to(dtype),
            dtype=dtype,
        )


@dataclass(frozen=True)
class Reader:
    """Reads the layers of one checkpoint.

    A layer is quantised if it has a tensor of `marks`. It may have those of `known` besides, and `UNUSED` ones; another
    one would change the weights in a way that the reader does not know. `read` is called with the layer's name, its
    tensors and its shape (out, in), and raises ValueError for what it cannot read.
    """

    marks: frozenset[str]
    known: frozenset[str]
    read: Callable[[str, Tensors, tuple[int, int]], Weights]


UNUSED = frozenset({
    "activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "input_g_idx",
    "output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale",
})  # fmt: skip
"""Tensors that belong to rounded activations or a quantised K/V cache. Here both stay in the model's dtype."""


class UnreadableError(ValueError):
    """A layer that cannot be read; the message names it."""


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """A ValueError inside becomes one that names this layer, unless it names one."""
    try:
        yield
    except UnreadableError:
        raise
    except ValueError as error:
        raise UnreadableError(f"{layer} cannot be read: {error}") from error


def read_layer(
    reader: Reader, name: str, tensors: Tensors, shape: tuple[int, int], *, biased: bool, device: str
) -> tuple[Weights, torch.Tensor | None]:
    """The weights of a layer's tensors, and its bias, which is not moved to the device. `biased`: the model has one.

    Raises ValueError for what cannot be read.
    """
    bias = tensors.get("bias")
    own = {local: tensor for local, tensor in tensors.items() if local != "bias"}
    strange = sorted(own.keys() - reader.known - UNUSED)
    if strange:
        raise ValueError(f"it has a {strange[0]}, whose meaning is not known")
    if biased and bias is None:
        raise ValueError("it has no bias")
    if not biased and bias is not None and not bias.any():
        bias = None  # GPTQ's files have a bias for every layer
    weights = reader.read(name, {local: tensor.to(device) for local, tensor in own.items()}, shape)
    found = len(weights.codes), weights.codes.shape[1] * 8 // weights.format.codes.bits
    if found != shape:
        raise ValueError(f"it is {found[0]} x {found[1]}, and the model's {shape}")
    return weights, bias


def required(tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"it has no {name}")
    return tensors[name]


def check_dtype(name: str, tensor: torch.Tensor, *expected: torch.dtype) -> None:
    if tensor.dtype not in expected:
        raise ValueError(f"its {name} is {_plain(tensor.dtype)}, not {' or '.join(map(_plain, expected))}")


def check_size(name: str, tensor: torch.Tensor, *expected: int) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"its {name} is {list(tensor.shape)}, where {list(expected)} is expected")


def nibbles_of(stored: torch.Tensor) -> torch.Tensor:
    """Nibbles [n, 2 x m] of bytes [n, m], the low one of a byte first, as they are in all words."""
    return torch.stack([stored & 15, stored >> 4], 2).flatten(1)


def unpacked_words(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes [n, m] in the bytes of words."""
    return stored if bits == 8 else nibbles_of(stored)


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """The bytes uint8 [n, 4 x m] of int32 [n, m]."""
    check_dtype("packed tensor", words, torch.int32)
    return words.contiguous().flatten().view(torch.uint8).view(len(words), -1)


def bytes_down(words: torch.Tensor) -> torch.Tensor:
    """The bytes of words that are packed along the first dimension: int32 [n, m] -> uint8 [m, 4 x n]."""
    n, m = words.shape
    return bytes_of(words).view(n, m, 4).permute(1, 0, 2).reshape(m, 4 * n)


def per_row(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """The scales [rows, 1] of a tensor that has one for all rows or one for each."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1)
    if scale.numel() != rows:
        raise ValueError(f"it has {scale.numel()} scales for {rows} rows")
    return scale.reshape(rows, 1)


def order_of(index: torch.Tensor, width: int, group: int) -> torch.Tensor | None:
    """The columns [in] sorted by their groups, given the group [in] of each; None if they are sorted already."""
    check_dtype("group index", index, torch.int32, torch.int64)
    check_size("group index", index, width)
    expected = torch.arange(width, device=index.device) // (group or width)
    order = index.long().argsort(stable=True)
    if not torch.equal(index[order].long(), expected):
        raise ValueError(f"its groups do not all have {group} columns")
    return None if torch.equal(index.long(), expected) else order


def integers(
    codes: torch.Tensor,
    bits: int,
    group: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> Weights:
    """Weights of unsigned codes uint8 [out, in] in their own order of columns, one per byte.

    A code less its zero point, or less half of the codes, is what the scale multiplies. `zeros` [out, groups] and
    scales belong to the columns in `order`.
    """
    if order is not None:
        codes = codes[:, order]
    if bits == 8:
        if zeros is not None and not (zeros == 128).all():
            raise ValueError("its 8-bit weights have zero points, which are read for 4 bits only")
        return Weights(Format(Codes.INT8, group, ordered=order is not None), codes ^ 128, scales, order=order)
    if codes.shape[1] % 2:
        raise ValueError(f"its {codes.shape[1]} columns cannot be packed in pairs")
    format = Format(Codes.INT4, group, zeros=zeros is not None, ordered=order is not None)
    return Weights(format, packed(codes), scales, zeros=zeros, order=order)


def group_of(width: int, groups: int, size: int) -> int:
    """The columns of a group: the config's `size`, -1 or 0 for all, if that gives this number of groups.

    Some checkpoints have layers with other groups than the config; those must be of even sizes.
    """
    size = size if 0 < size < width else width
    if -(-width // size) != groups:
        if groups < 1 or width % groups:
            raise ValueError(f"it has {groups} groups of scales for {width} columns, and the config says {size} each")
        size = width // groups
    return 0 if size == width else size


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
