"""What docs/development.md says of adding a model family."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from model_table import ROUNDING, error, stock_logits
from tiny import VOCABULARY, tiny

from lookahead.models import reference
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import FeedForward, MoE, Router
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.norm import Norm
from lookahead.models.recurrent import Convolution, GatedDelta, Mamba2, ShortConv
from lookahead.models.spec import Attention, Block, Branch, Decoder, Rope, SideBySide

PAGE = (Path(__file__).parents[2] / "docs" / "development.md").read_text(encoding="utf-8")
TOKENS = [(7 * i * i + 3) % VOCABULARY for i in range(30)]


def test_the_example_of_the_docs() -> None:
    """The reader of docs/development.md describes its family, and refuses as it says there."""
    _, _, example = PAGE.partition("## A worked example")
    code, rows = re.findall(r"^```python\n(.*?)^```", example, flags=re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    exec(rows, scope)
    assert len(scope["ROWS"]) == 3
    for name, kind, changes in scope["ROWS"][1:]:
        model = tiny(kind, **changes)
        found = reference.forward(scope["READERS"][type(model).__name__](model), TOKENS)
        assert error(found, stock_logits(model, TOKENS)) < ROUNDING, name
    with pytest.raises(UnsupportedModelError, match="its activation is 'mish'") as refused:
        scope["READERS"]["Phi3ForCausalLM"](tiny("Phi3", hidden_act="mish"))
    assert f"the graph backend does not run this model: {refused.value}" in PAGE


@pytest.mark.parametrize(
    "part",
    [
        Decoder, Block, SideBySide, Branch, Attention, GatedDelta, Mamba2, ShortConv, Convolution, FeedForward, MoE,
        Router, Norm, Rope, Matrix, ExpertMatrix,
    ],
)  # fmt: skip
def test_the_docs_name_every_field(part: type) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{part.__name__}.")]
    assert rows
    missing = [field.name for field in fields(part) if not any(re.search(rf"\b{field.name}`", row) for row in rows)]
    assert missing == []
