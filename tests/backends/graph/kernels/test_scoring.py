"""Soft caps and sinks in the attention kernel: the results are right, and a row's bits do not depend on other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attending import Step, check_invariance, parts_of
from marks import slow_interpreted

from lookahead.backends.graph.kernels.softmax import tanh
from lookahead.backends.graph.kernels.tiles import HeadShape, Tiles

OPTIONS: list[dict[str, Any]] = [
    {"softcap": 3.0},
    {"sinks": True},
    {"softcap": 50.0, "sinks": True, "window": 20},
    {"softcap": 30.0, "sinks": True, "chunk": 22},
]


@triton.jit
def _tanh(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tanh(tl.load(x + at)))


def test_tanh_loses_no_digits(device: torch.device) -> None:
    """Near 0, where its terms would cancel, and where they would overflow."""
    some = torch.cat([torch.logspace(-20, 4, 2044), torch.tensor([0.0, 0.55, 1e30, float("inf")])])
    x = torch.cat([some, -some]).to(device)
    found = torch.empty_like(x)
    _tanh[(4,)](x, found, 1024)
    exact = x.double().tanh()
    assert ((found - exact).abs() <= 4e-7 * exact.abs()).all()
    assert torch.equal(found[:2048], -found[2048:])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "near_keys"), [(torch.float32, 0), (torch.float16, 64)])
@pytest.mark.parametrize(
    ("shapes", "heads", "dim"),
    [([(40, 0, 3)], 2, 16), slow_interpreted([(260, 0, 17), (3, 2, 5), (0, 0, 1), (90, 20, 0)], 4, 80)],
)
@pytest.mark.thinned(1, most=4)
def test_error_at_most_twice_pytorchs(
    device: torch.device,
    shapes: list[tuple[int, int, int]],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    near_keys: int,
    options: dict[str, Any],
) -> None:
    step = Step(device, dtype, parts_of(*shapes), heads, heads // 2, dim)
    step.options = options
    for unsplit in (False, True):
        ours, plain = step.errors(Tiles(16, 64, 2, near_keys=near_keys, unsplit=unsplit, programs=24))
        assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize(("dtype", "near_keys"), [(torch.float32, 0), (torch.float16, 64)])
def test_a_sink_only_takes_weight(device: torch.device, dtype: torch.dtype, near_keys: int) -> None:
    """A sink of no weight changes no bit, and one far above all scores leaves nothing."""
    step, tiles = Step(device, dtype, parts_of((40, 0, 3)), 2, 1, 16), Tiles(16, 64, 2, near_keys=near_keys, programs=2)
    plain = step.run(tiles)
    for sink, expected in ((-1e9, plain), (float("-inf"), plain), (60.0, torch.zeros_like(plain))):
        step.arguments = lambda window, sink=sink: {"scale": step.scale, "sinks": torch.full([2], sink, device=device)}
        torch.testing.assert_close(step.run(tiles), expected, rtol=0, atol=1e-9 if sink > 0 else 0)


@pytest.mark.parametrize("options", [*map(slow_interpreted, OPTIONS[:-1]), OPTIONS[-1]], ids=str)
@pytest.mark.parametrize(
    ("dim", "length", "ahead", "nodes"),
    [(16, 41, 2, 4), slow_interpreted(64, 131, 16, 70), slow_interpreted(256, 300, 16, 70)],
)
def test_a_row_is_the_same_alone_in_a_tree_and_in_a_prompt(
    device: torch.device, dim: int, length: int, ahead: int, nodes: int, options: dict[str, Any]
) -> None:
    """Also in chunks of 22 tokens, one of which begins within the tree."""
    check_invariance(device, torch.float16, HeadShape(2, 1, dim), length, options, ahead=ahead, nodes=nodes, spread=3)
