"""A given cache after a call that was refused or failed: it is as it was, and the next call can have it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import decoding, ids, output_of
from tiny import tiny
from transformers import DynamicCache, StaticCache

LONG = [5, 9, 2, 5, 9, 2, 5, 9, 7, 1, 5, 9, 2, 44, 17, 3, 30]
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": {
        "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
    "bare": lambda model: DynamicCache(),
}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def add_up(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook with which no tree can be decoded: the probe refuses it, after the prompt."""
    return output.cumsum(dim=1)


def raising(ids: torch.Tensor, scores: torch.Tensor, **unused: Any) -> Any:
    """A criterion of the user's that fails after a few tokens."""
    if ids.shape[1] > len(LONG) + 3:
        raise KeyError("after three tokens")
    return torch.zeros(len(ids), dtype=torch.bool)


def same_state(cache: Any, before: Any) -> None:
    assert len(cache.layers) == len(before.layers)
    for layer, old in zip(cache.layers, before.layers, strict=True):
        assert vars(layer).keys() == vars(old).keys()
        for name, value in vars(old).items():
            now = getattr(layer, name)
            assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value, name


@pytest.mark.parametrize("held", [0, 4, 12])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("failure", ["refused", "failed"])
@pytest.mark.thinned(1)
def test_a_given_cache_is_as_it_was(family: str, kind: str, held: int, failure: str) -> None:
    model = tiny(family, seed=0, **FAMILIES[family])
    cache = CACHES[kind](model)
    if held:
        model.generate(**ids(LONG[: held - 1]), **{**GREEDY, "max_new_tokens": 2}, past_key_values=cache)
        assert cache.get_seq_length() == held
    before = copy.deepcopy(cache)
    addresses = [layer.keys.data_ptr() for layer in cache.layers if layer.is_initialized]
    if failure == "refused":
        handle = model.get_input_embeddings().register_forward_hook(add_up)
        with pytest.raises(ValueError, match="cannot be decoded exactly"):
            model.generate(**ids(LONG), **GREEDY, past_key_values=cache, custom_generate=decoding())
        handle.remove()
    else:
        more = {"stopping_criteria": [raising], "past_key_values": cache}
        with pytest.raises(KeyError, match="after three tokens"):
            model.generate(**ids(LONG), **GREEDY, **more, custom_generate=decoding())
    same_state(cache, before)
    if kind == "static" and held:  # passes that were compiled know them
        assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    stock = model.generate(**ids(LONG), **GREEDY, past_key_values=before)
    ours = model.generate(**ids(LONG), **GREEDY, past_key_values=cache, custom_generate=decoding())
    assert output_of(ids(LONG), ours) == output_of(ids(LONG), stock)


def test_room_that_is_missing_at_the_end() -> None:
    """The cache is found to be too small after all tokens; it does not keep the prompt."""
    model = tiny("Llama", seed=0)
    cache = StaticCache(config=model.config, max_cache_len=len(LONG) + 2)
    with pytest.raises(ValueError, match="past_key_values has room for"):
        model.generate(**ids(LONG), **GREEDY, past_key_values=cache, custom_generate=decoding())
    assert not cache.get_seq_length()
    model.generate(**ids(LONG), **{**GREEDY, "max_new_tokens": 3}, past_key_values=cache, custom_generate=decoding())
    assert cache.get_seq_length() == len(LONG) + 2
