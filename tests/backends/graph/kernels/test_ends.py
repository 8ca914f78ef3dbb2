"""Embedding and logits against their twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from knobs import Maker
from rounding import DTYPES, close

from lookahead.backends.graph.kernels import ends, reference_layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 5.5])
@pytest.mark.parametrize("learned", [False, True])
def test_embed(device: torch.device, dtype: torch.dtype, scale: float, learned: bool) -> None:
    """Positions behind the table's end, of draft tokens that cannot be accepted, get its last row."""
    make = Maker(device, dtype)
    table, position_table = make.random(50, 100), make.random(9, 100)
    tokens = torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 8, 9, 5000], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"scale": scale, "positions": positions}
    outs = [torch.full((4, 100), float("nan"), dtype=dtype, device=device) for _ in range(3)]
    for module, out in zip((ends, reference_layers), outs[:2], strict=True):
        module.embed(table, tokens, out, position_table=position_table if learned else None, **options)
    assert torch.equal(outs[0], outs[1])
    expected = table[tokens.long()] * scale
    assert torch.equal(outs[0], expected + position_table[[0, 8, 8, 8]] if learned else expected)


def test_tokens_that_are_read_as_others(device: torch.device) -> None:
    """One pair after the other, as in `models.reference`."""
    table = Maker(device).random(50, 100)
    whole = {"dtype": torch.int32, "device": device}
    tokens, aliases = torch.tensor([3, 49, 0, 7, 4], **whole), torch.tensor([[3, 7], [7, 2], [49, 0]], **whole)
    outs = [torch.full((5, 100), float("nan"), device=device) for _ in range(2)]
    for module, out in zip((ends, reference_layers), outs, strict=True):
        module.embed(table, tokens, out, aliases=aliases)
        assert torch.equal(out, table[[2, 0, 0, 2, 4]])
    assert tokens.tolist() == [3, 49, 0, 7, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.3, None), (1.0, 2.0), (0.0625, 30.0)])
@pytest.mark.thinned(1, most=8)
def test_finish_logits(device: torch.device, dtype: torch.dtype, biased: bool, scale: float, cap: float | None) -> None:
    """In place, and of the given rows only; large logits do not overflow, and a row has the same bits alone."""
    make = Maker(device, dtype)
    logits, bias = make.random(4, 2100, size=3.0), make.random(2100, size=3.0) if biased else None
    logits[0, :4] = torch.tensor([6e4, -6e4, 0.0, 1e-3])
    results = [logits.clone(), logits.clone()]
    for module, result in zip((ends, reference_layers), results, strict=True):
        module.finish_logits(result[:3], bias, scale, cap)
    assert close(*results)
    assert torch.equal(results[0][3], logits[3])
    assert bool(results[0].isfinite().all())
    alone = logits[1:2].clone()
    ends.finish_logits(alone, bias, scale, cap)
    assert torch.equal(alone[0], results[0][1])
    assert torch.equal(results[0], logits) == (not biased and scale == 1.0 and cap is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "inner"), [(7, 4096), (1, 40), (54, 600)])
@pytest.mark.thinned(1, most=1)
def test_last_columns(device: torch.device, dtype: torch.dtype, columns: int, inner: int) -> None:
    """They are written to the end of longer rows, and a row has the same bits among any others, also where products
    cancel."""
    make = Maker(device, dtype)
    x, weight = make.random(5, inner), make.random(columns, inner)
    half = inner // 2
    x[1, half : 2 * half], weight[:, half : 2 * half] = x[1, :half].flip(0), -weight[:, :half].flip(1)
    results = [torch.full((5, 64 + columns), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    for module, result in zip((ends, reference_layers), results, strict=True):
        module.last_columns(x, weight, result[:, 64:])
    assert bool(results[0][:, :64].isnan().all())
    # A row's own errors are on the scale of its terms, also where these cancel.
    exact, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    errors = [((result[:, 64:].double() - exact).abs() / terms).max() for result in results]
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps
    for rows in (slice(1, 2), slice(1, 4)):
        some = torch.full((rows.stop - rows.start, columns), float("nan"), dtype=dtype, device=device)
        ends.last_columns(x[rows], weight, some)
        assert torch.equal(some, results[0][rows, 64:])
