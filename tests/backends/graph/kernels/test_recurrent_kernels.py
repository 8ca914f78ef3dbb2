"""The kernels of recurrent layers against their twins; and the same bits along every walk."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from flat import Part, random_parents
from marks import slow_but
from rounding import DTYPES, close
from walking import RING, state_rows_of

from lookahead.backends.graph.kernels import convolve, gated_norm, gates, reference_states, scan, walks
from lookahead.backends.graph.kernels.state_rows import NO_INPUT, StateRows
from lookahead.backends.graph.kernels.state_shapes import Channels, Columns, Gating, ScanShape
from lookahead.models.feed_forward import Activation
from lookahead.models.norm import Norm

SHAPES = {
    "delta": ScanShape(2, 1, 8, 8, 0, 8, 16, delta=True),
    "delta, odd sizes": ScanShape(3, 1, 6, 20, 0, 6, 12, delta=True),
    "mamba": ScanShape(2, 1, 8, 4, 16, 8, 0, delta=False),
    "mamba, odd sizes": ScanShape(2, 2, 5, 7, 24, 14, 0, delta=False),
}


def columns_of(shape: ScanShape) -> int:
    return 2 * shape.key_heads * shape.key + shape.heads * shape.value


def parts_of(sizes: list[tuple[int, int, int]]) -> list[Part]:
    """Sequences of these cached tokens, chunks and nodes, with random trees."""
    rng = random.Random(repr(sizes))
    return [Part(length, chunk, random_parents(nodes, rng)) for length, chunk, nodes in sizes]


STEPS = [
    [(7, 0, 33)],
    [(0, 2, 3), (1, 0, 4), (5, 40, 0), (2, 1, 9)],
    [(3, 0, 1)] * 5,
    [(0, 5, 40), (9, 0, 25), (0, 0, 7)],
]
QUICK = ("delta", "mamba, odd sizes")


@pytest.mark.parametrize("sizes", STEPS)
@pytest.mark.parametrize("reach", [1, 3])
@pytest.mark.thinned(1, most=3)
def test_list_walks(device: torch.device, sizes: list[tuple[int, int, int]], reach: int) -> None:
    """Random trees, chunks and rows that are left over."""
    parts = parts_of(sizes)
    rows = state_rows_of(parts, device, padding=5, kept_base=50, reach=reach, slots=range(3, 3 + len(parts)))
    names = ("above", "kept", "flags", "order", "chunk_walks", "tree_walks", "chunk_count", "tree_count")
    found = replace(rows, **{name: torch.full_like(getattr(rows, name), -77) for name in names})
    walks.list_walks(found)
    for name in ("above", "kept", "chunk_count", "tree_count"):
        assert torch.equal(getattr(found, name), getattr(rows, name)), name
    chunks, trees = int(rows.chunk_count), int(rows.tree_count)
    assert torch.equal(found.chunk_walks[:chunks], rows.chunk_walks[:chunks])
    assert torch.equal(found.tree_walks[:trees], rows.tree_walks[:trees])
    for begin, count in [walk[2:4] for walk in rows.tree_walks[:trees].tolist()]:
        assert torch.equal(found.order[begin : begin + count], rows.order[begin : begin + count])
    assert torch.equal(found.order[: len(rows.kept)], torch.arange(len(rows.kept), device=device))


@pytest.mark.parametrize("sizes", STEPS)
def test_every_node_is_written_by_one_walk(device: torch.device, sizes: list[tuple[int, int, int]]) -> None:
    """Walks are paths from roots to leaves. Each row is written once, and what comes before it is its parent."""
    parts = parts_of(sizes)
    rows = state_rows_of(parts, device, padding=2)
    written, order = list[int](), rows.order.tolist()
    for walk in rows.tree_walks[: int(rows.tree_count)].tolist():
        path = order[walk[2] : walk[2] + walk[3]]
        for row, after in pairwise(path):
            assert rows.above[after, 0] == row
        written += path[walk[4] :]
    for walk in rows.chunk_walks[: int(rows.chunk_count)].tolist():
        written += range(walk[2], walk[2] + walk[3])
    assert sorted(written) == list(range(len(rows.kept) - 2))


class States:
    """Random states, projections and weights of one layer, and a step on them."""

    def __init__(self, shape: ScanShape, device: torch.device, dtype: torch.dtype, taps: int = 4) -> None:
        torch.manual_seed(0)
        self.shape, self.device, self.dtype = shape, device, dtype
        columns, heads = columns_of(shape), shape.heads
        self.width = columns + heads * shape.value + 2 * heads
        given = Columns(bias=self.random(self.width), scales=torch.rand(self.width).to(device))
        self.channels = Channels(self.random(columns, taps), self.random(columns), Activation.SILU, given)
        at = {"time_at": self.width - heads, "beta_at": self.width - 2 * heads}
        self.gating = Gating(self.random(heads).float(), self.random(heads), given, **at)
        self.matrices = torch.randn(8, heads, shape.key, shape.value).to(device)
        self.inputs = self.random(8, taps - 1, columns)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.device, self.dtype)

    def copy(self) -> States:
        made = object.__new__(States)
        made.__dict__ |= {**vars(self), "matrices": self.matrices.clone(), "inputs": self.inputs.clone()}
        return made

    def step(self, rows: StateRows, projected: torch.Tensor, *, kernels: bool) -> dict[str, torch.Tensor]:
        """What the launches of a layer compute; the states change."""
        size, columns, heads = len(rows.kept), self.channels.count, self.shape.heads
        zeros = {"dtype": self.dtype, "device": self.device}
        made = {
            "mixed": torch.zeros(size, columns, **zeros),
            "kept_inputs": torch.zeros(RING, columns, **zeros),
            "kept_mixed": torch.zeros(RING, columns, **zeros),
            "gates": torch.zeros(size, self.shape.gates, device=self.device),
            "kept_gates": torch.zeros(RING, self.shape.gates, device=self.device),
            "out": torch.zeros(size, heads * self.shape.value, **zeros),
        }
        of: Any = (convolve, gates, scan) if kernels else (reference_states,) * 3
        kept = made["kept_inputs"], made["kept_mixed"]
        of[0].convolve(projected, self.channels, self.inputs, made["mixed"], *kept, rows)
        of[0].store_inputs(projected, self.channels, self.inputs, rows)
        of[1].gate(projected, made["mixed"], self.gating, self.shape, made["gates"], made["kept_gates"], rows)
        given = self.matrices[None], made["mixed"][None], made["gates"][None], self.skip, made["out"]
        of[2].scan(*given, rows.chunk_walks, rows.chunk_count, rows.order, self.shape, stores=True)
        of[2].scan(*given, rows.tree_walks, rows.tree_count, rows.order, self.shape, stores=False)
        return made | {"matrices": self.matrices, "inputs": self.inputs}

    @property
    def skip(self) -> torch.Tensor | None:
        return None if self.shape.delta else torch.linspace(-1, 1, self.shape.heads, device=self.device)

    def replay(self, made: dict[str, torch.Tensor], slot: int, begins: bool, kept: list[int], *, kernels: bool) -> None:
        whole = {"dtype": torch.int32, "device": self.device}
        replays = torch.tensor([[slot, int(begins), 0, len(kept), len(kept)]], **whole)
        count, order = torch.tensor([1], **whole), torch.tensor(kept, **whole)
        of: Any = (convolve, scan) if kernels else (reference_states,) * 2
        of[0].replay_inputs(self.inputs[None], made["kept_inputs"][None], replays, count, order)
        of[1].scan(
            self.matrices[None], made["kept_mixed"][None], made["kept_gates"][None], self.skip, made["out"], replays,
            count, order, self.shape, stores=True,
        )  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[(0, 2, 3), (1, 0, 2), (5, 4, 0)], [(6, 0, 1)]])
@pytest.mark.thinned(1, most=2)
def test_a_layer_against_its_twin(
    device: torch.device, name: str, dtype: torch.dtype, sizes: list[tuple[int, int, int]]
) -> None:
    shape = SHAPES[name]
    ours = States(shape, device, dtype)
    twin, projected = ours.copy(), ours.random(30, ours.width)
    rows = state_rows_of(parts_of(sizes), device, padding=2, kept_base=60, slots=[5, 0, 3, 7][: len(sizes)])
    found, expected = (one.step(rows, projected, kernels=kernels) for one, kernels in ((ours, True), (twin, False)))
    for what, tensor in expected.items():
        assert bool(tensor.isfinite().all())
        assert close(found[what].to(dtype), tensor.to(dtype), 40 if what in ("out", "matrices") else 8), what
    last = int(rows.kept.max()) if len(sizes) == 1 else int(rows.kept[rows.kept >= 0][-1])
    for one, made, kernels in ((ours, found, True), (twin, expected, False)):
        one.replay(made, 3, True, [last, (last - 1) % RING], kernels=kernels)
    assert torch.equal(ours.inputs, twin.inputs)
    assert close(ours.matrices.to(dtype), twin.matrices.to(dtype), 40)


TRUE_SHAPES = {
    "delta, true size": ScanShape(32, 16, 128, 128, 0, 2048, 4096, delta=True),
    "mamba, true size": ScanShape(48, 1, 128, 64, 3200, 3072, 0, delta=False),
}
"""Those of Qwen3.5-9B and Granite-4-H-Tiny."""
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize(
    "name", [*slow_but(SHAPES, *QUICK), *[pytest.param(name, marks=ON_GPU) for name in TRUE_SHAPES]]
)
@pytest.mark.parametrize("kernels", slow_but([True, False], True))
@pytest.mark.thinned(1, most=1)
def test_bits_do_not_depend_on_how_tokens_run(device: torch.device, name: str, kernels: bool) -> None:
    """One text: in one chunk; in chunks of 1, 2 and 5 beside another sequence; token by token; and by a tree whose
    accepted path is replayed. Outputs and states are equal bit for bit, on numbers that cancel. The twins do the same
    up to rounding: torch computes single numbers in other ways than vectors."""
    shape, count = {**SHAPES, **TRUE_SHAPES}[name], 8
    start = States(shape, device, torch.bfloat16 if name in TRUE_SHAPES else torch.float32)
    text = start.random(count, start.width)
    text[1::2] = -text[0:-1:2] * (1 + 1e-5)
    results = []
    # 1. One chunk.
    states = start.copy()
    made = states.step(state_rows_of([Part(0, count, ())], device), text, kernels=kernels)
    results.append((made["out"][:count], states.matrices[0], states.inputs[0]))
    # 2. Three chunks, beside a tree of another sequence.
    states, outs, first = start.copy(), list[torch.Tensor](), 0
    for size in (1, 2, 5):
        rows = state_rows_of([Part(4, 0, (-1, 0)), Part(first, size, ())], device, slots=[6, 0], padding=1)
        projected = torch.cat([start.random(2, start.width), text[first : first + size], start.random(1, start.width)])
        outs.append(states.step(rows, projected, kernels=kernels)["out"][2 : 2 + size])
        first += size
    results.append((torch.cat(outs), states.matrices[0], states.inputs[0]))
    # 3. Token by token: each is a root, and is replayed.
    states, outs = start.copy(), []
    for index in range(count):
        made = states.step(state_rows_of([Part(index)], device), text[index : index + 1], kernels=kernels)
        outs.append(made["out"][:1])
        states.replay(made, 0, index == 0, [0], kernels=kernels)
    results.append((torch.cat(outs), states.matrices[0], states.inputs[0]))
    # 4. A chunk of two, then a tree in which the rest of the text is one path among others.
    states = start.copy()
    parents = (-1, 0, 0, 2, 1, 2, 5, 6, 7)
    path = [0, 2, 5, 6, 7, 8]
    projected = start.random(2 + len(parents), start.width)
    projected[:2], projected[[2 + node for node in path]] = text[:2], text[2:]
    rows = state_rows_of([Part(0, 2, parents)], device, kept_base=60)
    made = states.step(rows, projected, kernels=kernels)
    states.replay(made, 0, False, [(60 + node) % RING for node in path], kernels=kernels)
    out = torch.cat([made["out"][:2], made["out"][[2 + node for node in path]]])
    results.append((out, states.matrices[0], states.inputs[0]))
    for found in results[1:]:
        for one, expected in zip(found, results[0], strict=True):
            assert torch.equal(one, expected) if kernels else close(one.to(start.dtype), expected.to(start.dtype), 200)


@pytest.mark.parametrize("kernels", [True, False])
def test_short_convolution(device: torch.device, kernels: bool) -> None:
    """Two gates and the taps of a tree, against the definition."""
    torch.manual_seed(1)
    module: Any = convolve if kernels else reference_states
    count, parents = 24, (-1, 0, 1, 0, 2)
    channels = Channels(torch.randn(count, 3).to(device), None, None, Columns(), gated=True)
    projected = torch.randn(2 + 5, 3 * count).to(device)
    stored, rows = torch.randn(2, 2, count).to(device), state_rows_of([Part(9, 2, parents)], device, slots=[1], reach=2)
    mixed, kept = torch.zeros(7, count).to(device), torch.zeros(RING, count).to(device)
    module.convolve(projected, channels, stored, mixed, kept, None, rows)
    b, c, x = projected.chunk(3, dim=1)
    inputs, text = b * x, [5, 6, 0, 1, 2, 3, 5]  # rows 5 and 6 stand for the stored inputs
    for row, path in ((0, "s"), (1, "s0"), (2, "s01"), (3, "s012"), (5, "s012"), (4, "s0123"), (6, "s01234")):
        before = [stored[1, 0], stored[1, 1], *[inputs[int(at)] for at in path[1:]]]
        if row == 6:
            before = [*before[:-2], inputs[3], inputs[4]]
        y = sum(one * weight for one, weight in zip([*before[-2:], inputs[row]], channels.weight.T, strict=True))
        assert close(mixed[row], c[row] * y, 20), row
    assert len(text) == 7
    assert torch.equal(kept[:5], inputs[2:])
    module.store_inputs(projected, channels, stored, rows)
    assert torch.equal(stored[1], inputs[:2])


def test_nothing_before_a_text_is_read(device: torch.device) -> None:
    """What a slot's last sequence left behind is not seen: here it is NaN."""
    for name in QUICK:
        shape = SHAPES[name]
        states = States(shape, device, torch.float32)
        states.matrices[:], states.inputs[:] = torch.nan, torch.nan
        for parts in ([Part(0, 0, (-1, 0, 1, 1))], [Part(0, 2, (-1, 0))], [Part(0, 5, ())]):
            for kernels in (True, False):
                made = states.step(state_rows_of(parts, device), states.random(8, states.width), kernels=kernels)
                assert bool(made["out"].isfinite().all()), (name, kernels)
    assert NO_INPUT < -1000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["none", "shared", "own", "own, rounds last"])
@pytest.mark.thinned(2, most=4)
def test_gated_norm(device: torch.device, dtype: torch.dtype, first: bool, kind: str) -> None:
    torch.manual_seed(2)
    parts, part, rows = 3, 10, 4
    x, projected = (torch.randn(rows + 1, width).to(device, dtype) for width in (parts * part, 50))
    weight = torch.rand(part if kind == "shared" else (parts, part)).to(device, dtype)
    norm = None if kind == "none" else Norm(weight, 1e-3, rounds_first="last" not in kind)
    order = torch.randperm(50, dtype=torch.int32).to(device)
    bias = torch.randn(50).to(device, dtype)
    for columns in (Columns(), Columns(bias, order), Columns(scales=torch.rand(50).to(device))):
        outs = [torch.zeros(rows, parts * part, dtype=dtype, device=device) for _ in range(2)]
        for module, out in zip((gated_norm, reference_states), outs, strict=True):
            module.gated_norm(x, projected, 7, norm, parts, out, norm_first=first, columns=columns)
        assert close(*outs, 6)
        assert bool(outs[0].any())


@pytest.mark.parametrize("time", slow_but([-30.0, -9.0, -2.0, 0.0, 3.0, 19.9, 25.0], -9.0, 3.0))
def test_time_steps_are_accurate(device: torch.device, time: float) -> None:
    """log(1 + exp(x)) where exp(x) is small: an error of the sum would be a large one of the time step."""
    shape = SHAPES["mamba"]
    states = States(shape, device, torch.float32)
    states.gating = replace(states.gating, time_bias=torch.zeros(2, device=device), columns=Columns())
    projected = torch.full((2, states.width), time, device=device)
    made = states.step(state_rows_of([Part(3, 0, (-1, 0))], device), projected, kernels=True)
    expected = torch.nn.functional.softplus(torch.tensor(time, dtype=torch.float64))
    assert float((made["gates"][0, 2:].double().cpu() / expected - 1).abs().max()) < 2e-6  # exp(-30) on a GPU: 1.2e-6
