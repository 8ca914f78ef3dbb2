"""On CUDA: the tokens of the model's own `generate`, and sampling equal to autoregressive sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import lookahead
from lookahead import LookaheadConfig, LookaheadModel
from lookahead.config import METHODS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PROMPTS = ["the fox", "once more", "a dog and a fox jumps over the naïve café", "end"]
TOKENS = 32


@pytest.fixture(scope="module")
def lm(make_model: Callable[..., Any], tokenizer: Any, settings: LookaheadConfig) -> LookaheadModel:
    return lookahead.load((make_model().to("cuda"), tokenizer), config=settings)


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """fp32 as such: tf32 would leave ten bits of mantissa, too few to compare tokens."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_greedy_equals_transformers(lm: LookaheadModel, plain: Callable[[Any, Sequence[int], int], list[int]]) -> None:
    assert lm.device.type == "cuda"
    expected = [plain(lm.model, lm.encode(p), TOKENS) for p in PROMPTS]
    alone = [lm.generate(p, max_tokens=TOKENS) for p in PROMPTS]
    assert [done.token_ids for done in alone] == expected
    assert all(done.stats.steps < TOKENS for done in alone)
    assert [done.token_ids for done in lm.generate(PROMPTS, max_tokens=TOKENS)] == expected


@pytest.mark.parametrize("method", METHODS)
def test_sampling_equals_autoregressive(lm: LookaheadModel, method: str) -> None:
    common: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    expected = [lm.generate(p, method="autoregressive", **common).token_ids for p in PROMPTS]
    assert [lm.generate(p, method=method, **common).token_ids for p in PROMPTS] == expected
    assert [done.token_ids for done in lm.generate(PROMPTS, method=method, **common)] == expected
