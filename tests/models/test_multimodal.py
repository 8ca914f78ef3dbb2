"""Readers of classes that also read images or sound: on text their description gives transformers' logits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from marks import slow_but
from model_table import ROUNDING, error, stock_logits
from pictures import FAMILIES, model_of

from lookahead.models import reference
from lookahead.models.families import multimodal
from lookahead.models.read import read

sys.path.append(str(Path(__file__).parents[2] / "docs"))

KNOWN = {family.name + family.ending: key for key, family in reversed(FAMILIES.items())}
TOKENS = torch.randint(50, (40,), generator=torch.Generator().manual_seed(5)).tolist()


CLASSES = sorted(multimodal.READERS.keys() - {"PaliGemmaForConditionalGeneration"})
OF_EACH_READER = {multimodal.READERS[name]: name for name in CLASSES}.values()


@pytest.mark.parametrize("name", slow_but(CLASSES, *OF_EACH_READER, *CLASSES[::4]))
def test_text(name: str) -> None:
    """Behind the usual positions, and in a model of this class with the default kind of text model."""
    if not hasattr(transformers, name):
        pytest.skip("this transformers does not know the class")
    if name in KNOWN:
        model = model_of(KNOWN[name])
    else:
        from tiny_models import tiny_model

        model = tiny_model(name)
    described = read(model, "some")
    assert described.causal_prompt
    # transformers folds prompts through gated delta nets in blocks, which is 5e-5 from its own single tokens.
    bound = 1e-4 if any(block.recurrent is not None for block in described.blocks) else ROUNDING
    assert error(reference.forward(described, TOKENS), stock_logits(model, TOKENS)) < bound


@pytest.mark.parametrize("name", ["paligemma", "paligemma2"])
def test_text_after_a_prompt_that_is_not_causal(name: str) -> None:
    """Where a mask is materialised, PaliGemma's tokens without types do not see those after them; else they do."""
    model = model_of(name)
    model.set_attn_implementation("eager")
    described = read(model, "some")
    assert not described.causal_prompt
    assert error(reference.forward(described, TOKENS), stock_logits(model, TOKENS)) < ROUNDING
    types = torch.zeros(1, len(TOKENS), dtype=torch.long)
    prompt = model(torch.tensor([TOKENS]), token_type_ids=types).logits[0].detach()
    assert error(reference.forward(described, TOKENS), prompt) > 0.1


def test_a_text_model_without_a_reader() -> None:
    model = model_of("llava")
    model.model.language_model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="there is no reader for its Linear"):
        read(model, "some")
