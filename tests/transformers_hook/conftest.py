"""Tiny models, prompts, and `both`: one call of `generate`, stock and hooked.

`llama` has wide random weights, so that tokens can be compared exactly and guesses are right now and then; `counting`
knows one thing, that t + 1 follows t, so that a prompt that counts makes for long accepted blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import Pair, ids, output_of, run_both
from tiny import tiny

TEXTS = ("once more the dog and the fox; once more the dog", "the quick brown fox", "def fox(dog): return [dog")
COUNTING = [*range(10, 40), 10]
"""After this the counting model says 11, 12, 13, ..., and the prompt has told so."""


@pytest.fixture(scope="session")
def both() -> Callable[..., Pair]:
    """(model, inputs, fresh=..., seed=..., hook=..., **kwargs of generate) -> both runs, not yet compared."""
    return run_both


@pytest.fixture(scope="session")
def llama(make_model: Callable[..., Any]) -> Any:
    """No end token of its own: tests choose one that its text has. Do not change it."""
    return make_model(eos_token_id=None)


@pytest.fixture(scope="session")
def counting(make_model: Callable[..., Any]) -> Any:
    """After token t comes t + 1; attention and MLP say nothing. Do not change it."""
    model = make_model(eos_token_id=None)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
    return model


@pytest.fixture(scope="session")
def prompt(tokenizer: Any) -> dict[str, Any]:
    """One row."""
    return ids(tokenizer(TEXTS[0]).input_ids)


@pytest.fixture(scope="session")
def batch(tokenizer: Any) -> dict[str, Any]:
    """Three rows of different lengths, padded on the left."""
    return ids(*(tokenizer(text).input_ids for text in TEXTS))


@pytest.fixture(scope="session", params=["one row", "three rows"])
def inputs(request: pytest.FixtureRequest, prompt: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Each of the two in turn."""
    return prompt if request.param == "one row" else batch


@pytest.fixture(scope="session")
def text(llama: Any, batch: dict[str, Any]) -> list[list[int]]:
    """40 tokens of what the three rows say when nothing is asked for; the first row is `prompt`'s."""
    return output_of(batch, llama.generate(**batch, max_new_tokens=40, do_sample=False))


@pytest.fixture(scope="session")
def count_up() -> dict[str, Any]:
    """For the counting model: guesses are right from the first step on."""
    return ids(COUNTING)


@pytest.fixture(scope="session")
def gpt2() -> Any:
    """Learned positions, 32 of them."""
    return tiny("GPT2", seed=0, stirred=False, n_inner=64, n_positions=32)


@pytest.fixture(scope="session")
def mistral() -> Any:
    """Every layer sees 8 positions back."""
    return tiny("Mistral", seed=0, stirred=False, sliding_window=8)


@pytest.fixture(scope="session")
def gemma() -> Any:
    """One layer sees 8 positions back, the other all."""
    kinds = ["sliding_attention", "full_attention"]
    return tiny("Gemma3Text", seed=0, stirred=False, head_dim=8, sliding_window=8, layer_types=kinds)


@pytest.fixture(scope="session")
def phi3() -> Any:
    """Rotary factors that change behind position 32, for all tokens of a pass."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope["original_max_position_embeddings"] = 32
    return tiny("Phi3", seed=0, stirred=False, rope_parameters=rope, original_max_position_embeddings=32)
