"""In bf16 `models.reference` rounds where transformers rounds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from marks import slow_but
from model_table import EXPERT_ROWS, FIRST_ROWS, build, error, stock_logits
from tiny import VOCABULARY

from lookahead.models import reference, reference_parts
from lookahead.models.read import read

TOKENS = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(5)).tolist()
MIXTURES = [name for name, _, _ in EXPERT_ROWS if name in FIRST_ROWS]


@cache
def model_of_bf16(name: str) -> Any:
    return build(name, attn_implementation="eager").to(torch.bfloat16)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["llama", "qwen2-hybrid", "qwen3"])
def test_rounds_where_transformers_rounds(name: str) -> None:
    """Norms and rotations in bf16 have the bits of transformers; logits are as far from fp32 as transformers' are."""
    exact = stock_logits(build(name, attn_implementation="eager"), TOKENS)
    model = model_of_bf16(name)
    description = read(model, "reference")
    attention, module = description.blocks[0].attention, model.model.layers[0]
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(reference_parts.norm(description.blocks[0].mixer_norm, x), module.input_layernorm(x))

    head = torch.randn(9, 1, attention.head_dim, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    cosine, sine = model.model.rotary_emb(head, torch.arange(9)[None])
    half = attention.head_dim // 2
    swapped = torch.cat((-head[..., half:], head[..., :half]), dim=-1)
    turned = head * cosine[0, :, None] + swapped * sine[0, :, None]
    assert attention.rope is not None
    assert torch.equal(reference.rotate(attention.rope, head, torch.arange(9)), turned)

    assert error(reference.forward(description, TOKENS), exact) < 1.5 * error(stock_logits(model, TOKENS), exact)


@pytest.mark.parametrize("name", slow_but(FIRST_ROWS, *FIRST_ROWS[::3]))
@pytest.mark.thinned(1, most=5)
def test_norms_round_where_their_modules_round(name: str) -> None:
    """In bf16 every norm with a weight has the bits of the module that the weight is from.

    Torch's own LayerNorm computes in another order.
    """
    model = model_of_bf16(name)
    modules = {
        module.weight.data_ptr(): module
        for module in model.modules()
        if "Norm" in type(module).__name__ and not isinstance(module, torch.nn.LayerNorm) and hasattr(module, "weight")
    }
    description = read(model, "reference")
    norms = [description.norm]
    for block in description.blocks:
        attention = block.attention
        norms += [block.mixer_norm, block.feed_forward_norm, block.mixer_out_norm, block.feed_forward_out_norm]
        norms += [attention.q_norm, attention.k_norm]
    found = [norm for norm in norms if norm is not None and norm.weight is not None]
    own = [norm for norm in found if norm.weight.data_ptr() in modules]
    assert len(own) == len(found) or not modules
    for norm in own:
        x = torch.randn(9, *norm.weight.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        assert torch.equal(reference_parts.norm(norm, x), modules[norm.weight.data_ptr()](x))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", slow_but([name for name in FIRST_ROWS if name not in MIXTURES], *FIRST_ROWS[::3]))
@pytest.mark.thinned(1, most=8)
def test_half_precision_is_as_exact_as_transformers(name: str) -> None:
    """Most families even have the same bits; not those that rotate in fp32, or whose matrices add biases otherwise."""
    exact = stock_logits(build(name, attn_implementation="eager"), TOKENS)
    model = model_of_bf16(name)
    found = reference.forward(read(model, "reference"), TOKENS)
    assert error(found, exact) < 1.5 * error(stock_logits(model, TOKENS), exact)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.thinned(1, most=2)
def test_half_precision_of_mixtures_is_as_exact_as_transformers(name: str) -> None:
    """In most rows: where rounding turns a close choice between two experts, all of a row differs, and what follows."""
    exact_model, model = build(name, attn_implementation="eager"), model_of_bf16(name)
    description = read(model, "reference")
    found, own = [], []
    for start in range(0, len(TOKENS), 5):
        text = TOKENS[start : start + 5]
        exact = stock_logits(exact_model, text)
        for errors, logits in ((found, reference.forward(description, text)), (own, stock_logits(model, text))):
            errors.append((logits.float() - exact).abs().amax(1) / exact.abs().max())
    assert torch.cat(found).median() < 1.5 * torch.cat(own).median()
