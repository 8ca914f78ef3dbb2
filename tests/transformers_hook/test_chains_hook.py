"""Calls of `generate` with models whose steps are chains: tokens, scores, the returned cache, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chain_models import OTHERS, QUICK, RECURRENT, REFUSED, chain_model, known
from marks import slow_but
from pairs import CLOSE, Recorder, decoding, ids, output_of, run_both
from transformers import DynamicCache, StaticCache

from lookahead.transformers_hook import facts

LONG = [5, 9, 17, 23, 42, 9, 17, 30, 5, 9, 17, 23, 51, 8, 11, 9, 17, 23, 42, 33, 5, 9]
ONE, THREE = ids(LONG), ids(LONG, LONG[3:14], LONG[7:10])
GREEDY = {"max_new_tokens": 20, "pad_token_id": 0}
KEPT = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
NAMES = known((*RECURRENT, *OTHERS))
ALONE = ("RwkvForCausalLM", "MiniMaxM3VLForCausalLM")
"""Classes whose own rows behind padding depend on the length of a pass: their batches are refused."""
HYBRIDS = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "MiniMaxForCausalLM", "Qwen3_5ForCausalLM")


def hidden_of(cache: Any) -> list[torch.Tensor]:
    """Everything that a cache holds of tokens."""
    found = []

    def collect(held: Any) -> None:
        if isinstance(held, torch.Tensor):
            found.append(held)
        elif isinstance(held, dict):
            for key in sorted(held, key=str):
                collect(held[key])
        elif isinstance(held, list | tuple):
            for value in held:
                collect(value)
        elif hasattr(held, "layers"):
            collect(held.layers)
            collect(getattr(held, "linear_cache", []))
        elif hasattr(held, "rnn_state"):
            collect(held.rnn_state)
        elif hasattr(held, "keys") or hasattr(held, "conv_states"):
            for name in ("keys", "values", "conv_states", "recurrent_states", "cumulative_length"):
                collect(getattr(held, name, None))

    collect(cache)
    return found


def same_states(stock: Any, ours: Any) -> None:
    assert type(ours) is type(stock)
    a, b = hidden_of(stock), hidden_of(ours)
    assert len(a) == len(b) > 0
    for mine, theirs in zip(b, a, strict=True):
        assert not mine.is_inference()
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("name", slow_but(NAMES, *QUICK))
def test_tokens_logits_and_the_cache(name: str) -> None:
    hook = decoding(recycle_scope="model")
    run_both(chain_model(name), ONE, hook=hook, **GREEDY).same()
    pair = run_both(chain_model(name), ONE, hook=hook, **GREEDY, **KEPT).same()  # it remembers the text
    assert pair.compression > 1
    assert pair.hook.used == "eager"
    same_states(pair.stock.past_key_values, pair.ours.past_key_values)


@pytest.mark.parametrize("name", slow_but([name for name in NAMES if name not in ALONE], *QUICK))
@pytest.mark.thinned(1, most=1)
def test_batches_and_samples(name: str) -> None:
    pair = run_both(chain_model(name), THREE, **GREEDY, **KEPT).same()
    if name in HYBRIDS:
        same_states(pair.stock.past_key_values, pair.ours.past_key_values)
    for inputs in (ONE, THREE):
        run_both(chain_model(name), inputs, **GREEDY, do_sample=True, temperature=0.8, eos_token_id=7).same()


@pytest.mark.slow
@pytest.mark.parametrize("name", known(ALONE))
def test_batches_of_classes_that_contradict_themselves_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="other logits than generate's own passes"):
        chain_model(name).generate(**THREE, **GREEDY, custom_generate=decoding())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", slow_but(HYBRIDS, "Qwen3NextForCausalLM"))
@pytest.mark.thinned(1, most=1)
def test_a_second_turn_on_a_returned_cache(name: str, rows: int) -> None:
    model = chain_model(name)
    texts = [LONG, LONG[2:]][:rows]
    first = run_both(model, ids(*texts), **GREEDY, return_dict_in_generate=True).same()
    more = torch.cat([first.tokens, torch.tensor([[4, 9, 17]] * rows)], dim=1)
    mask = torch.nn.functional.pad(ids(*texts)["attention_mask"], (0, 23), value=1)
    caches = [first.stock.past_key_values, first.ours.past_key_values]
    second = run_both(
        model, {"input_ids": more, "attention_mask": mask}, **GREEDY,
        fresh=lambda: {"past_key_values": copy.deepcopy(caches.pop(0))},
    ).same()  # fmt: skip
    same_states(second.made_stock["past_key_values"], second.made_ours["past_key_values"])


def test_a_given_cache_is_as_it_was_after_an_error() -> None:
    model = chain_model("Qwen3NextForCausalLM")
    cache = model(torch.tensor([LONG[:8]]), use_cache=True).past_key_values
    before = [tensor.clone() for tensor in hidden_of(cache)]

    def fail(ids: torch.Tensor, scores: torch.Tensor, **unused: Any) -> Any:
        if ids.shape[1] > len(LONG) + 4:
            raise KeyError("after four tokens")
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyError, match="after four tokens"):
        model.generate(**ONE, **GREEDY, past_key_values=cache, stopping_criteria=[fail], custom_generate=decoding())
    for mine, old in zip(hidden_of(cache), before, strict=True):
        assert torch.equal(mine, old)


def test_end_tokens_streamers_and_hidden_states() -> None:
    model = chain_model("Qwen3NextForCausalLM")
    text = output_of(ONE, model.generate(**ONE, **GREEDY, do_sample=False))[0]
    end = next(token for place, token in enumerate(text) if place > 6 and token not in text[:place])
    run_both(model, ONE, **GREEDY, eos_token_id=end, fresh=lambda: {"streamer": Recorder()}).same()
    run_both(model, THREE, **GREEDY, eos_token_id=end, **KEPT).same()
    pair = run_both(model, ONE, **GREEDY, **KEPT, output_hidden_states=True).same()
    for stock, ours in zip(pair.stock.hidden_states, pair.ours.hidden_states, strict=True):
        torch.testing.assert_close(ours[-1][:, -1], stock[-1][:, -1], **CLOSE)
    with pytest.raises(ValueError, match="output_attentions=True cannot be given"):
        run_both(model, ONE, **GREEDY, **KEPT, output_attentions=True)


def test_caches_that_chains_do_not_run_in() -> None:
    model = chain_model("Qwen3NextForCausalLM")
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match=r"StaticLayer cannot be used .* use a DynamicCache"):
        model.generate(**ONE, **GREEDY, past_key_values=static, custom_generate=decoding())
    states = chain_model("Mamba2ForCausalLM")
    cache = DynamicCache(config=states.config)
    with pytest.raises(ValueError, match="cache_params cannot be given"):
        states.generate(**ONE, **GREEDY, cache_params=cache, custom_generate=decoding())


@pytest.mark.parametrize("name", slow_but(known(tuple(REFUSED)), "MambaForCausalLM"))
def test_what_stays_refused_says_why(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be decoded exactly"):
        chain_model(name).generate(**ONE, **GREEDY, custom_generate=decoding())


def test_a_class_whose_trees_fail_in_the_probe_runs_chains_from_the_first_call_on() -> None:
    model = copy.deepcopy(chain_model("BartForCausalLM"))
    hook = decoding(recycle_scope="model")
    run_both(model, ONE, hook=hook, **GREEDY).same()
    known_facts = facts.known[model]
    assert "tree of tokens" in known_facts.chains
    assert run_both(model, ONE, hook=hook, **GREEDY).same().compression > 1
    assert facts.known[model] is known_facts
