"""A mixture in steps of few rows, where a product's last programs do what follows it: the bits of the form for many."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import slow_but
from quantising import cancelling_layer
from routing import ROUTERS, listed, random_mixture, random_router
from test_expert_products import CANCELLING, cancelling_experts, lowered, moved, run_layer

from lookahead.backends.graph.kernels.choice import choice_options
from lookahead.backends.graph.kernels.expert_products import FEW_LOGITS, FEW_ROWS, ExpertProducts
from lookahead.backends.graph.kernels.experts import ExpertRows
from lookahead.backends.graph.kernels.finish import Finish
from lookahead.backends.graph.matrices.experts import StackedExperts
from lookahead.backends.graph.matrices.products import cancelling
from lookahead.backends.graph.ops import Ops
from lookahead.models.feed_forward import Activation, Router
from lookahead.models.matrix import ExpertMatrix
from lookahead.models.quantised import Codes, Format

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # which the interpreter can multiply
NONE = [-1, -1]
DISTRIBUTIONS = {
    "one row": [[2, 0]],
    "one row of padding": [NONE],
    "all to one": [[1, 4]] * 8,
    "one each": [[0, 1], [2, 3]],
    "some have none": [[i % 3, 3 + i % 2] for i in range(16)],
    "in another order": [[4, 1], [1, 4], [0, 4], [4, 0]],
    "padding": [[3, 2], NONE, [2, 5], NONE],
    "padding first": [NONE, [2, 5]],
    "padding alone": [NONE, NONE],
}
"""The experts of each row, of six."""
QUICK = ("one row", "in another order", "padding first", "padding alone")
FORMATS = {"every numbers": None, **CANCELLING, "fp8 rows": Format(Codes.E4M3, 0)}
FINISHES = {
    "silu": Finish(Activation.SILU),
    "clamped": Finish(Activation.CLAMPED, (7.0, 1.702), alternate=True),
    "no gate": Finish(Activation.RELU2, gated=False),
}


def given(format: Format | None, out: int, width: int, device: torch.device) -> tuple[Ops, StackedExperts, Any]:
    """Six experts with biases and 32 rows of x, whose products are all rounding errors."""
    if format is None:
        x, weights = cancelling(torch.zeros(6 * out, width, dtype=torch.bfloat16))
        matrix = ExpertMatrix(weights.view(6, out, width), 6)
    else:
        layer, x = cancelling_layer(format, 6 * out, width, 32)
        matrix = ExpertMatrix(layer, 6)
    bias = 1e-2 * torch.randn(6, out, generator=torch.Generator().manual_seed(2))
    ops = Ops(device, compiled=True, processors=4)
    matrix = moved(replace(matrix, bias=bias), device, HALF)
    return ops, StackedExperts(matrix, 2, ops), x[:32].to(device, HALF)


def rows_of(chosen: list[list[int]], ops: Ops, device: torch.device) -> torch.Tensor:
    """Give a step's experts to both forms, of which a tile holds all pairs of an expert. Returns sequence_of."""
    ops.experts.rows = rows = listed(chosen, 6, FEW_ROWS, device)
    rows.numbers[0] = max(int(rows.numbers[0]), 1)
    if not any(own != NONE for own in chosen):
        rows.tiles[0, 0] = -1
    rows.weights.copy_(torch.rand(len(rows.weights), generator=torch.Generator().manual_seed(4)))
    rows.shared.copy_(torch.rand(len(chosen), generator=torch.Generator().manual_seed(5)))
    return torch.tensor([-1 if own == NONE else 0 for own in chosen], dtype=torch.int32, device=device)


def filled(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=HALF, device=device)


def distributions(name: str) -> list[list[list[int]]]:
    """All of them on a GPU; few where the interpreter would take long."""
    every = name == "every numbers" or torch.cuda.is_available()
    return [chosen for key, chosen in DISTRIBUTIONS.items() if every or key in QUICK]


def columns(name: str) -> tuple[int, int]:
    """Rows and columns of an expert's matrix, so small that each of its products has some splits."""
    return 128, 2048 if name in ("int4", "mxfp4") else 1024


@pytest.mark.parametrize("finish", slow_but(FINISHES, "silu"))
@pytest.mark.parametrize("name", slow_but(FORMATS, "numbers"))
def test_activations_have_the_same_bits(finish: str, name: str, device: torch.device) -> None:
    """Of every distribution of rows over experts."""
    (out, width), after = columns(name), FINISHES[finish]
    ops, experts, x = given(FORMATS[name], out, width, device)
    inner = out // 2 if after.gated else out
    for chosen in distributions(name):
        rows = len(chosen)
        rows_of(chosen, ops, device)
        used = torch.tensor([own != NONE for own in chosen], device=device).repeat_interleave(2)
        both, before, found = (filled(2 * rows, size, device=device) for size in (out, inner, inner))
        if chosen != [NONE] * rows:  # what larger steps list of padding alone are no tiles
            experts.plan(rows, 2)(x[:rows], both)
        ops.activate(
            both, None, before, after.activation, after.constants, gated=after.gated, alternate=after.alternate
        )
        experts.plan_few(rows, after)(x[:rows], found)
        assert torch.equal(found[used], before[used])
        assert bool(found[~used].isnan().all())
        assert not ops.experts._memory.arrived.any()
        assert not bool(used.any()) or float(found[used].float().std()) > 0


@pytest.mark.parametrize("shared", slow_but([True, False], True))
@pytest.mark.parametrize("name", slow_but(FORMATS, "numbers"))
def test_sums_over_experts_have_the_same_bits(shared: bool, name: str, device: torch.device) -> None:
    """Of every distribution of rows over experts. Each pair has an x of its own."""
    out, width = columns(name)
    ops, experts, x = given(FORMATS[name], out, width, device)
    source = torch.Generator().manual_seed(6)
    other, bias = (torch.randn(*size, out, generator=source).to(device, HALF) for size in ((16,), ()))
    for chosen in distributions(name):
        rows = len(chosen)
        sequence_of = rows_of(chosen, ops, device)
        parts, before, found = (filled(size, out, device=device) for size in (2 * rows, rows, rows))
        beside = (other[:rows], bias) if shared else (None, None)
        experts.plan_few(rows, Finish(None, (), shared, False, *beside))(x[: 2 * rows], found)
        if chosen != [NONE] * rows:
            experts.plan(rows, 1)(x[: 2 * rows], parts)
        ops.experts.combine(parts, sequence_of, before, *beside, gated=shared)
        assert torch.equal(found, before)
        assert not bool(found[sequence_of < 0].any())
        assert not ops.experts._memory.arrived.any()


def routed(
    router: Router, gate: torch.Tensor | None, x: torch.Tensor, used: torch.Tensor, few: bool, device: torch.device
) -> tuple[ExpertRows, ExpertProducts]:
    products = Ops(device, compiled=True, processors=4).experts
    weight, bias = router.logits.weight().to(device, x.dtype), router.logits.bias()
    products.reserve_router(weight, router.top_k)
    plan = products.plan_few_router if few else products.plan_router
    choose = plan(router, weight, None if bias is None else bias.to(device, x.dtype), gate, len(x))
    for _ in range(2):  # counters are zero again
        products.rows.counts.zero_()
        choose(x, used)
    return products.rows, products


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.thinned(4, most=4)
def test_routers_choose_the_same(name: str, rows: int, device: torch.device) -> None:
    """And weigh with the same bits, on logits that are all rounding errors."""
    router = moved(random_router(name, 12, 1024), device, HALF)
    x, weight = cancelling(torch.zeros(12, 1024, dtype=torch.bfloat16))
    router.logits.parts[0].weight.data = weight.to(device, HALF)
    x, gate = x[:rows].to(device, HALF), torch.randn(1, 1024, generator=torch.Generator().manual_seed(1))
    used = torch.tensor([0, 0, -1, 0, 0, -1, 0, 0] * 2, dtype=torch.int32, device=device)[:rows]
    (few, own), (many, _) = (routed(router, gate.to(x), x, used, kind, device) for kind in (True, False))
    pairs, top_k = rows * router.top_k, router.top_k
    known = (used >= 0).repeat_interleave(top_k)
    assert torch.equal(few.chosen[:pairs], torch.where(known, many.chosen[:pairs], -1))
    assert torch.equal(few.weights[:pairs][known], many.weights[:pairs][known])
    assert torch.equal(few.shared[:rows], many.shared[:rows])
    assert not own._memory.arrived.any()
    distinct = sorted({int(expert) for expert in few.chosen[:pairs] if expert >= 0})
    assert int(few.numbers[0]) == len(distinct)
    assert int(few.numbers[2]) == int(many.numbers[2]) == 2 * len(distinct)
    if rows > 1:
        assert few.tiles[: len(distinct), 0].tolist() == distinct


def test_padding_alone_has_one_expert_that_is_none(device: torch.device) -> None:
    router = moved(random_router("softmax"), device)
    x, used = torch.randn(2, 32, device=device), torch.full((2,), -1, dtype=torch.int32, device=device)
    rows, _ = routed(router, None, x, used, True, device)
    assert rows.chosen[:6].tolist() == [-1] * 6
    assert rows.numbers.tolist() == [1, 0, 0]
    assert rows.tiles[0, 0] == -1


@pytest.mark.parametrize("shared", slow_but([True, False], True))
def test_a_layer_has_the_same_bits_in_both_forms(shared: bool, device: torch.device) -> None:
    """Its router included, in steps with padding and without."""
    spec = moved(random_mixture(experts=4, inner=64, shared=shared, bias=True), device)
    ops = Ops(device, compiled=True, processors=4)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(3)).to(device)
    layer = lowered(spec, ops, x)
    for rows, size in ((3, 4), (1, 1)):
        found = list[torch.Tensor]()
        for few in (FEW_ROWS, 0):
            ops.experts.few_rows = few
            finish = Finish(spec.activation)
            assert layer.gate_up.takes_few(size, spec.router, finish) is bool(few)
            found.append(run_layer(layer, x[:rows], size, ops))
        assert torch.equal(*found)
        assert bool(found[0].any())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("top_k", [2, 8])
def test_layers_of_true_sizes_have_the_same_bits_in_both_forms(name: str, top_k: int, device: torch.device) -> None:
    gate_up, x = cancelling_experts(FORMATS[name], 1536, 2048, 64)
    down, _ = cancelling_experts(FORMATS[name], 2048, 768, 64)
    shape = random_mixture(shared=True)
    router = random_router("normalised", 64, 2048, top_k)
    spec = moved(replace(shape, router=router, gate_up=gate_up, down=down, shared=None, shared_gate=None), device)
    spec, ops, x = moved(spec, device, torch.bfloat16), Ops(device), x.to(device)
    layer = lowered(spec, ops, x)
    for rows in (1, 2, 4, 8, 16):
        found = list[torch.Tensor]()
        for few in (FEW_ROWS, 0):
            ops.experts.few_rows = few
            found.append(run_layer(layer, x[:rows], rows, ops))
        assert torch.equal(*found), rows
        assert not bool(found[0].isnan().any())


@pytest.mark.parametrize(
    ("rows", "experts", "inner", "few"),
    [(4, 128, 768, True), (8, 128, 768, False), (16, 32, 768, True), (32, 8, 768, False), (1, 128, 72, False)],
)
def test_which_steps_are_few(rows: int, experts: int, inner: int, few: bool, device: torch.device) -> None:
    products = ExpertProducts(device)
    router: Any = SimpleNamespace(top_k=8, logits=torch.empty(experts, 64))
    weights = torch.empty(experts, 2 * inner, 64)
    assert products.takes_few(rows, router, weights, Finish(Activation.SILU)) is few
    assert not few or rows * triton_width(experts) <= FEW_LOGITS


def triton_width(experts: int) -> int:
    router: Any = SimpleNamespace(
        top_k=8, logits=torch.empty(experts, 64), scoring=random_router("softmax").scoring, normalised=False, groups=1,
        kept_groups=1, group_best=1,
    )  # fmt: skip
    return int(choice_options(router)["WIDTH"])
