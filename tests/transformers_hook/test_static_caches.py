"""Static caches at their limits: prompts of one token, room for hardly any, and the old names of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import decoding, ids, same_cache
from tiny import tiny
from transformers import StaticCache

LONG = [5, 9, 2, 5, 9, 2, 5, 9, 7, 1, 5, 9, 2, 44, 17, 3, 30]
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT2": {},
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": {
        "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
TURN = {"max_new_tokens": 12, "pad_token_id": 0, "return_dict_in_generate": True}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    """One of its own: a model remembers the largest static cache, and which calls were probed."""
    return tiny(request.param, seed=0, **FAMILIES[request.param])


@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.thinned(1, most=2)
def test_prompts_of_one_token(both: Any, model: Any, backend: str) -> None:
    """The cache that is probed for its shapes has room for more than it holds."""
    for inputs in (ids([5]), ids([5], [7])):
        pair = both(model, inputs, cache_implementation="static", hook=decoding(backend=backend), **TURN).same()
        assert pair.hook.used == backend
        same_cache(pair.stock.past_key_values, pair.ours.past_key_values)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.thinned(1, most=2)
def test_given_to_a_prompt_of_one_token(both: Any, model: Any, length: int) -> None:
    pair = both(
        model, ids(LONG[:length]),
        fresh=lambda: {"past_key_values": StaticCache(config=model.config, max_cache_len=32)}, **TURN,
    ).same()  # fmt: skip
    same_cache(pair.made_stock["past_key_values"], pair.made_ours["past_key_values"])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 4, len(LONG)])
@pytest.mark.thinned(1, most=2)
def test_hidden_states_of_few_tokens(both: Any, model: Any, count: int, length: int) -> None:
    """The model's own passes that a tree is compared with are longer than the cache has room for."""
    options = {**TURN, "max_new_tokens": count, "output_hidden_states": True, "cache_implementation": "static"}
    pair = both(model, ids(LONG[:length]), **options).same()
    same_cache(pair.stock.past_key_values, pair.ours.past_key_values)
    for stock, ours in zip(pair.stock.hidden_states, pair.ours.hidden_states, strict=True):
        for one, other in zip(stock, ours, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["sliding_window", "hybrid", "hybrid_chunked"])
@pytest.mark.thinned(1, most=1)
def test_old_names(both: Any, model: Any, name: str) -> None:
    """transformers makes the cache that 'static' names, and its layers follow the model's."""
    pair = both(model, ids(LONG), cache_implementation=name, **TURN).same()
    same_cache(pair.stock.past_key_values, pair.ours.past_key_values)


@pytest.mark.parametrize("length", [3, 7])
def test_a_window_that_does_not_fit(length: int) -> None:
    """Stock forgets tokens that the window still sees, and says nothing."""
    model = tiny("Mistral", seed=0, sliding_window=8)
    prompt, long = ids(LONG[:3]), ids(LONG)
    for inputs in (prompt, long):
        cache = StaticCache(config=model.config, max_cache_len=length)
        with pytest.raises(ValueError, match=f"room for {length} tokens, and"):
            model.generate(**inputs, max_new_tokens=12, past_key_values=cache, custom_generate=decoding())
