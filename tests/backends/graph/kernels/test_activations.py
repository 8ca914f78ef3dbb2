"""The activation of a feed-forward, with bias and gate, against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounding import DTYPES, close

from lookahead.backends.graph.kernels import activations, reference_layers
from lookahead.models.feed_forward import Activation

XIELU = (0.8, 0.6, 0.5, -1e-6)


CONSTANTS = {Activation.XIELU: XIELU, Activation.CLAMPED: (1.5, 1.7)}
UNGATED = [activation for activation in Activation if activation is not Activation.CLAMPED]


def run(
    module: Any, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation, gated: bool, **options: bool
) -> torch.Tensor:
    out = x.new_full((len(x), x.shape[1] // (2 if gated else 1)), float("nan"))
    module.activate(x, bias, out, activation, CONSTANTS.get(activation, ()), gated=gated, **options)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "gated"), [*((each, True) for each in Activation), *((each, False) for each in UNGATED)]
)
@pytest.mark.thinned(1, most=7)
def test_activate(device: torch.device, dtype: torch.dtype, activation: Activation, gated: bool) -> None:
    """With a bias and without; a row has the same bits alone."""
    torch.manual_seed(0)
    width = 1100 if activation is Activation.SILU else 90  # more than one block
    x = (2 * torch.randn(3, (2 if gated else 1) * width)).to(device, dtype)
    bias = torch.randn(x.shape[1]).to(device, dtype)
    results = []
    for given in (None, bias):
        found, expected = (run(module, x, given, activation, gated) for module in (activations, reference_layers))
        # 1 + erf(x) cancels below 0, and a GPU's fp32 exponential and division are approximations.
        approximate = activation is Activation.GELU or (device.type == "cuda" and dtype == torch.float32)
        assert close(found, expected, 8 if approximate else 2)
        assert torch.equal(run(activations, x[1:2].clone(), given, activation, gated)[0], found[1])
        results.append(found)
    assert not close(*results)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, where a GPU has infinity
@pytest.mark.parametrize("activation", UNGATED)
def test_far_and_small_inputs(device: torch.device, activation: Activation) -> None:
    """No overflow far from 0, and no cancellation near it."""
    if activation is Activation.XIELU:
        values = [-90.0, -20.0, -1.0, -0.51, -0.49, -0.01, -1e-4, -1e-6, -1e-7, 0.0, 1e-5, 3.0, 90.0]
    else:
        values = [-1e15, -200.0, -20.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 20.0, 200.0, 1e15]
    x = torch.tensor([values], device=device)
    found, expected = (run(module, x, None, activation, False) for module in (activations, reference_layers))
    assert bool(found.isfinite().all())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-9 if activation is Activation.XIELU else 1e-6)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.CLAMPED])
def test_gate_and_up_may_alternate(activation: Activation, device: torch.device) -> None:
    torch.manual_seed(0)
    halves, bias = 2 * torch.randn(3, 180, device=device), torch.randn(180, device=device)

    def alternating(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (2, 90)).transpose(-1, -2).flatten(-2)

    expected = run(activations, halves, bias, activation, True)
    mixed = alternating(halves), alternating(bias)
    assert torch.equal(run(activations, *mixed, activation, True, alternate=True), expected)
    assert close(run(reference_layers, *mixed, activation, True, alternate=True), expected, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [90, 1100])
def test_apply_gate(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """With a bias and without; a row has the same bits alone. The gate may have more rows."""
    torch.manual_seed(0)
    x, gate = (torch.randn(rows, width).to(device, dtype) for rows in (3, 5))
    for bias in (None, torch.randn(width).to(device, dtype)):
        found, expected, alone = x.clone(), x.clone(), x[1:2].clone()
        activations.apply_gate(found, gate, bias)
        reference_layers.apply_gate(expected, gate, bias)
        activations.apply_gate(alone, gate[1:2].clone(), bias)
        assert close(found, expected)
        assert torch.equal(alone[0], found[1])
        assert not close(found, x)
