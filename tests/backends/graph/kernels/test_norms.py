"""The residual stream between two layers: `add_norm` against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from knobs import Maker
from marks import slow_interpreted
from rounding import DTYPES, close

from lookahead.backends.graph.kernels import norms, reference_layers
from lookahead.backends.graph.kernels.delta import Delta
from lookahead.models.norm import Norm

NORMS: dict[str, dict[str, Any]] = {
    "RMS": {},
    "no weight": {"weight": None},
    "1 + weight": {"offset": 1.0, "rounds_first": False},
    "1 + weight, rounded first": {"offset": 1.0},
    "in fp32": {"rounds_first": False},
    "layer norm": {"bias": True, "centered": True, "rounds_first": False},
    "layer norm without bias": {"centered": True, "rounds_first": False},
    "layer norm without weight": {"weight": None, "centered": True, "rounds_first": False},
    "bias, rounded first": {"bias": True},
}


def norm_of(make: Maker, width: int, name: str | None) -> Norm | None:
    """A norm of this kind, with a large eps."""
    if name is None:
        return None
    fields = dict(NORMS[name])
    weight = None if "weight" in fields else make.random(width, size=1.0)
    bias = make.random(width, size=1.0) if fields.pop("bias", False) else None
    fields.pop("weight", None)
    return Norm(weight, 0.1, bias, **fields)


def run(module: Any, stream: torch.Tensor, arguments: dict[str, Any], outs: int = 1) -> list[torch.Tensor]:
    """The outputs and the residual stream afterwards."""
    stream, rows = stream.clone(), arguments.get("rows")
    shape = (len(stream) if rows is None else len(rows), stream.shape[1])
    found = [torch.full(shape, float("nan"), dtype=stream.dtype, device=stream.device) for _ in range(outs)]
    module.add_norm(stream, outs=found, **arguments)
    return [*found, stream]


def check(stream: torch.Tensor, arguments: dict[str, Any], roundings: int = 2) -> list[torch.Tensor]:
    """The kernel's results, which are its twin's, and those of each row alone to the bit."""
    outs = len(arguments["norms"])
    found, expected = (run(module, stream, arguments, outs) for module in (norms, reference_layers))
    for ours, theirs in zip(found, expected, strict=True):
        assert close(ours, theirs, roundings)
    for row in (0, len(stream) - 1):
        deltas = [delta._replace(values=delta.values[row : row + 1].clone()) for delta in arguments["deltas"]]
        alone = run(norms, stream[row : row + 1], {**arguments, "deltas": deltas}, outs)
        assert all(torch.equal(one[0], whole[row]) for one, whole in zip(alone, found, strict=True))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), slow_interpreted(5, 576)])
@pytest.mark.parametrize("with_delta", [False, True])
def test_add_norm(device: torch.device, dtype: torch.dtype, rows: int, width: int, with_delta: bool) -> None:
    """As in Llama: without a delta the stream stays, with one the sum is exact."""
    make = Maker(device, dtype)
    stream, delta = make.random(rows, width, size=1.0), make.random(rows, width, size=1.0)
    deltas = [Delta(delta)] if with_delta else []
    *_, after = check(stream, {"deltas": deltas, "norms": [Norm(make.random(width, size=1.0), 1e-5)]})
    assert torch.equal(after, stream + delta if with_delta else stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.thinned(1, most=9)
def test_kinds_of_norms(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Before the layer, and of what is added; the mean of a row is far from 0."""
    make = Maker(device, dtype)
    stream, delta = make.random(3, 100, size=1.0) + 2, make.random(3, 100, size=1.0) - 3
    plain, norm = norm_of(make, 100, "RMS"), norm_of(make, 100, name)
    before = check(stream, {"deltas": [], "norms": [norm]}, 4)
    after = check(stream, {"deltas": [Delta(delta, None, norm)], "norms": [plain]}, 8)
    assert name == "RMS" or not close(before[0], check(stream, {"deltas": [], "norms": [plain]}, 4)[0], 8)
    assert not close(after[1], stream + delta, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kinds",
    [
        {"norms": [None]},
        {"norms": [None], "biases": [True]},
        {"norms": ["RMS"], "biases": [True], "posts": ["layer norm"], "scale": 0.22},
        {"norms": ["RMS"], "output_scale": True},
        {"norms": ["layer norm", "RMS"], "biases": [False, True], "posts": [None, None]},
        {"norms": [None, "1 + weight"], "biases": [True, True], "posts": ["RMS", "in fp32"], "output_scale": True},
        {"norms": ["RMS"], "biases": [True, False], "posts": ["1 + weight", None], "scale": 1.7, "output_scale": True},
    ],
    ids=["no norm", "bias", "all of one", "output scale", "parallel", "parallel, scaled", "all of two"],
)
@pytest.mark.thinned(1, most=7)
def test_structures_of_blocks(device: torch.device, dtype: torch.dtype, kinds: dict[str, Any]) -> None:
    """Biases, norms after a layer, scales, and the two halves of a parallel block."""
    make = Maker(device, dtype)
    stream, biases = make.random(4, 100, size=1.0), kinds.get("biases", [False])
    deltas = [
        Delta(make.random(4, 100, size=1.0), make.random(100, size=1.0) if bias else None, norm_of(make, 100, post))
        for bias, post in zip(biases, kinds.get("posts", [None] * len(biases)), strict=True)
    ]
    arguments = {
        "deltas": deltas,
        "norms": [norm_of(make, 100, name) for name in kinds["norms"]],
        "scale": kinds.get("scale", 1.0),
        "output_scale": make.random(1, size=1.0) if "output_scale" in kinds else None,
    }
    *_, changed = check(stream, arguments, 8)
    rows = torch.tensor([3, 0, 0, 2], dtype=torch.int32, device=device)
    whole, some = (run(norms, stream, {**arguments, "rows": chosen}, len(kinds["norms"])) for chosen in (None, rows))
    assert torch.equal(some[-1], stream)
    assert not torch.equal(changed, stream)
    assert all(torch.equal(part, out[rows.long()]) for part, out in zip(some[:-1], whole[:-1], strict=True))


def test_add_norm_of_some_rows(device: torch.device) -> None:
    """The last norm reads only the rows whose logits are needed, in their order, and leaves the stream alone."""
    make = Maker(device)
    stream, delta = make.random(7, 96, size=1.0), make.random(7, 96, size=1.0)
    rows = torch.tensor([6, 0, 0, 3], dtype=torch.int32, device=device)
    arguments = {"deltas": [Delta(delta)], "norms": [Norm(make.random(96, size=1.0), 1e-5)], "rows": rows}
    found, expected = (run(module, stream, arguments) for module in (norms, reference_layers))
    assert close(found[0], expected[0])
    assert torch.equal(found[1], stream)
    assert torch.equal(expected[1], stream)
