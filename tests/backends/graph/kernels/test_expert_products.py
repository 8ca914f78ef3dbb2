"""Routing and the products of experts: every router, every distribution of rows over experts, the same bits for a row
among any others."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import slow_but, slow_interpreted
from quantising import cancelling_layer
from rounding import DTYPES
from routing import ROUTERS, listed, random_experts, random_mixture, random_router

from lookahead.backends.graph.kernels import grouped
from lookahead.backends.graph.kernels.experts import ExpertRows, choose_experts, most_tiles
from lookahead.backends.graph.kernels.grouped import Launch
from lookahead.backends.graph.kernels.splits import SplitMemory
from lookahead.backends.graph.layers.experts import MoELayer
from lookahead.backends.graph.matrices.lowering import Matrices
from lookahead.backends.graph.matrices.products import Products, cancelling
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.models import reference
from lookahead.models.feed_forward import Activation, MoE, Router
from lookahead.models.matrix import ExpertMatrix
from lookahead.models.number_formats import Codes, Format
from lookahead.models.quantised import QuantisedLinear

LAUNCHES = (Launch(64, 16, 4, 2, parallel=True), Launch(128, 32, 8, 2, parallel=False))
DISTRIBUTIONS = {
    "one row": [[2, 0]],
    "all to one": [[1, 4]] * 40,
    "one each": [[0, 1], [2, 3], [4, 5]],
    "some have none": [[i % 3, 3 + i % 2] for i in range(23)],
}
"""The experts of each row, of six."""


def chosen_by(router: Router, x: torch.Tensor, block: int, padding: tuple[int, ...] = ()) -> ExpertRows:
    """Rows by expert from the router's own logits of x."""
    rows, bias = ExpertRows.new(router.logits.shape[0], router.top_k, len(x), x.device), router.logits.bias()
    sequence_of = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    sequence_of[list(padding)] = -1
    logits = x @ router.logits.weight().to(x.device).T
    choose_experts(logits, None if bias is None else bias.to(x.device), router, sequence_of, rows, block)
    return rows


def check_listed(rows: ExpertRows, chosen: torch.Tensor, block: int, used: list[int]) -> None:
    """Every pair of a used row is in one tile, of its expert; no tile is empty."""
    experts, top_k = len(rows.counts), chosen.shape[1]
    found: list[tuple[int, int]] = []
    for expert, first in rows.tiles[: int(rows.numbers[0])].tolist():
        own = rows.table[expert, first : min(first + block, int(rows.counts[expert]))].tolist()
        assert own
        found += [(expert, pair) for pair in own]
    expected = [(int(chosen[row, rank]), row * top_k + rank) for row in used for rank in range(top_k)]
    assert sorted(found) == sorted(expected)
    assert int(rows.numbers[0]) <= most_tiles(len(chosen), top_k, experts, block)
    assert int(rows.numbers[2]) == len({expert for expert, _ in found})


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("block", [16, 4])
@pytest.mark.thinned(1, most=7)
def test_routers_choose_and_weigh_as_the_reference(name: str, block: int, device: torch.device) -> None:
    """Some rows are padding: they have no experts."""
    router = random_router(name)
    if router.choice_bias is not None:
        router = replace(router, choice_bias=router.choice_bias.to(device))
    if router.expert_scale is not None:
        router = replace(router, expert_scale=router.expert_scale.to(device))
    x = torch.randn(21, 32, generator=torch.Generator().manual_seed(1))
    padding = (3, 19, 20)
    on_cpu = replace(
        router,
        choice_bias=None if router.choice_bias is None else router.choice_bias.cpu(),
        expert_scale=None if router.expert_scale is None else router.expert_scale.cpu(),
    )
    chosen, weights = reference.route(on_cpu, x)
    rows = chosen_by(router, x.to(device), block, padding)
    found = rows.chosen.view(len(x), -1).cpu()
    assert torch.equal(found.long(), chosen)
    assert torch.allclose(rows.weights.view(len(x), -1).cpu(), weights.float(), rtol=1e-5, atol=1e-7)
    check_listed(rows, chosen, block, [row for row in range(len(x)) if row not in padding])


def test_of_equal_experts_the_first_is_chosen(device: torch.device) -> None:
    router = random_router("softmax")
    logits = torch.tensor([[1.0, 3, 3, 0] * 3, [0.0] * 12, [float("nan")] * 12], device=device)
    rows = ExpertRows.new(12, 3, 3, device)
    choose_experts(logits, None, router, torch.zeros(3, dtype=torch.int32, device=device), rows, 16)
    assert rows.chosen.view(3, 3).tolist() == [[1, 2, 5], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.block_n}x{launch.block_m}")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(72, 160), (64, 128), (10, 50)], ids=str)
@pytest.mark.thinned(1, most=4)
def test_products_of_experts(
    name: str, launch: Launch, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """A pair's x is that of its row, or its own."""
    chosen, source = DISTRIBUTIONS[name], torch.Generator().manual_seed(0)
    experts = random_experts(6, *shape, source, bias=True)
    assert isinstance(experts.weights, torch.Tensor)
    assert experts.bias is not None
    weights, bias = experts.weights.to(device, dtype), experts.bias.to(device, dtype)
    rows = listed(chosen, 6, launch.block_m, device)
    pairs = [expert for own in chosen for expert in own]
    tiles = most_tiles(len(chosen), 2, 6, launch.block_m)
    for per in (2, 1):
        x = torch.randn(2 * len(chosen) // per, shape[1], generator=source).to(device, dtype)
        out = torch.full((len(pairs) + 1, shape[0]), float("nan"), device=device, dtype=dtype)
        memory = SplitMemory.new(
            device, tiles * 2 * -(-shape[0] // launch.block_n) * launch.block_n * launch.block_m, 99
        )
        grouped.multiply(x, weights, out[:-1], launch, 2, memory, bias=bias, experts=rows, per=per, tiles=tiles)
        exact = torch.stack(
            [
                weights[expert].double() @ x[pair // per].double() + bias[expert].double()
                for pair, expert in enumerate(pairs)
            ]
        )
        eps = torch.finfo(dtype).eps
        assert torch.allclose(out[:-1].double(), exact, rtol=2 * eps, atol=1e-5)
        assert bool(out[-1].isnan().all())
        assert not memory.arrived.any()


class Buffers(dict[str, torch.Tensor]):
    """Activation buffers, with NaN where nothing was written."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._like = torch.empty(0, dtype=dtype, device=device)

    def rows(self, name: str, width: int) -> torch.Tensor:
        if name not in self:
            self[name] = self._like.new_full((ROW_SIZES[-1], width), float("nan"))
        return self[name]


def lowered(spec: MoE, ops: Ops, like: torch.Tensor) -> MoELayer:
    return MoELayer(spec, ops, Matrices(Products(like.device, like.dtype, invariant=True), ops))


def moved(part: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A description, or a part of one, on a device."""
    if isinstance(part, torch.Tensor):
        return part.to(device, dtype)
    if isinstance(part, torch.nn.Module):
        own = copy.deepcopy(part).to(device)
        return own if isinstance(own, QuantisedLinear) else own.to(dtype)
    if isinstance(part, tuple):
        return tuple(moved(one, device, dtype) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: moved(getattr(part, field.name), device, dtype) for field in fields(part)})
    return part


def run_layer(layer: MoELayer, x: torch.Tensor, size: int, ops: Ops) -> torch.Tensor:
    """x [rows, hidden] through a layer, in a step of `size` rows."""
    buffers = Buffers(x.dtype, x.device)
    sequence_of = torch.full((size,), -1, dtype=torch.int32, device=x.device)
    sequence_of[: len(x)] = 0
    step: Any = SimpleNamespace(
        kind=SimpleNamespace(rows=size), buffers=buffers, rows=[SimpleNamespace(sequence_of=sequence_of)]
    )
    run = layer.plan(step)
    buffers["normed"][: len(x)] = x
    for _ in range(2):  # counters are zero again
        run()
    delta = buffers["delta"]
    assert not bool(ops.experts.rows.counts.any())
    assert not bool(delta[len(x) : size].any())
    return delta[: len(x)].clone()


MIXTURES = {
    "plain": random_mixture(),
    "shared": random_mixture(shared=True, bias=True),
    "clamped": random_mixture("chosen", bias=True, activation=Activation.CLAMPED),
    "int4": random_mixture(hidden=256, inner=256, format=Format(Codes.INT4, 32)),
    "mxfp4 padded": random_mixture(experts=3, hidden=480, inner=32, format=Format(Codes.E2M1, 32)),
    "fp8 blocks": random_mixture(hidden=256, inner=128, format=Format(Codes.E4M3, 128, rows=128)),
}


@pytest.mark.parametrize("name", slow_but(MIXTURES, "shared", "mxfp4 padded"))
@pytest.mark.parametrize("steps", [((6, 8), (1, 1)), slow_interpreted(((19, 32), (1, 1), (3, 4)))])
def test_a_layer_gives_what_the_reference_does(
    name: str, steps: tuple[tuple[int, int], ...], device: torch.device
) -> None:
    """In steps of some sizes with padding; the reference on the same weights before and after they were laid out."""
    spec = MIXTURES[name]
    x = torch.randn(19, spec.router.logits.shape[1], generator=torch.Generator().manual_seed(3))
    expected = reference.mixture(spec, x)
    ops = Ops(device, compiled=True, processors=4)
    spec, x, expected = moved(spec, device), x.to(device), expected.to(device)
    layer = lowered(spec, ops, x)
    for rows, size in steps:
        found = run_layer(layer, x[:rows], size, ops)
        scale = float(expected[:rows].abs().max())
        assert float((found - expected[:rows]).abs().max()) < 2e-5 * scale
    assert torch.allclose(reference.mixture(spec, x), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


CANCELLING = {
    "numbers": None,
    "fp8 blocks": Format(Codes.E4M3, 128, rows=128),
    "int4": Format(Codes.INT4, 128),
    "mxfp4": Format(Codes.E2M1, 32),
}


def cancelling_experts(format: Format | None, out: int, width: int, count: int) -> tuple[ExpertMatrix, torch.Tensor]:
    """Experts of bf16 or quantised weights, and x of 1,024 rows, whose products are all rounding errors."""
    if format is None:
        x, weights = cancelling(torch.zeros(count * out, width, dtype=torch.bfloat16))
        return ExpertMatrix(weights.view(count, out, width), count), x.repeat(ROW_SIZES[-1] // len(x), 1)
    layer, x = cancelling_layer(format, count * out, width, ROW_SIZES[-1])
    return ExpertMatrix(layer, count), x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("name", CANCELLING)
def test_a_row_has_the_same_bits_in_every_step(name: str, count: int, device: torch.device) -> None:
    """Whole layers, router included, in steps of all captured sizes; each with other rows for an expert."""
    gate_up, x = cancelling_experts(CANCELLING[name], 1024, 1024, count)
    source = torch.Generator().manual_seed(0)
    router = random_router("normalised", count, 1024, 4)
    down = random_experts(count, 1024, 512, source, CANCELLING[name])

    spec = moved(MoE(router, gate_up, down), device, torch.bfloat16)
    x, ops = x.to(device), Ops(device)
    layer = lowered(spec, ops, x)
    expected = run_layer(layer, x, len(x), ops)
    assert float(expected.float().std()) > 0
    assert not bool(expected.isnan().any())
    for rows in ROW_SIZES:
        for first in range(0, len(x) - rows + 1, max(rows, 150)):
            found = run_layer(layer, x[first : first + rows], rows, ops)
            assert torch.equal(found, expected[first : first + rows]), (rows, first)
    assert torch.equal(run_layer(layer, x[5:18], 16, ops), expected[5:18])
