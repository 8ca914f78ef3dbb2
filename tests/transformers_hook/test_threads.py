"""One model, several threads: what a call knows is its own, and what calls share cannot change a token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from pairs import Recorder, decoding, in_threads, output_of

import lookahead
from lookahead import LookaheadConfig


def test_two_threads_one_model(make_model: Any, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    """The first two calls of a model at once, and many after them; the recycled guesses are shared by all."""
    model = make_model(eos_token_id=None)
    inputs = [prompt, batch] * 2
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = [output_of(one, model.generate(**one, **options)) for one in inputs]
    hooks = [lookahead.decoding(window=3, ngram=4, guesses=4, budget=40) for _ in inputs]

    def job(number: int) -> Callable[[], list[list[list[int]]]]:
        def run() -> list[list[list[int]]]:
            one, hook = inputs[number], hooks[number]
            return [output_of(one, model.generate(**one, **options, custom_generate=hook)) for _ in range(3)]

        return run

    for texts, wanted in zip(in_threads([job(n) for n in range(4)]), expected, strict=True):
        assert texts == [wanted] * 3
    assert all(hook.stats[0].compression > 1 for hook in hooks)


def test_threads_with_different_arguments(llama: Any, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    """Streamers, seeds and processors go to the call that they were given to."""
    streamer = Recorder()
    calls: list[dict[str, Any]] = [
        {**prompt, "do_sample": True, "custom_generate": decoding(seed=1)},
        {**batch, "do_sample": True, "custom_generate": decoding(seed=2)},
        {**prompt, "do_sample": False, "repetition_penalty": 1.3, "custom_generate": decoding()},
    ]
    expected = [llama.generate(**call, max_new_tokens=16).tolist() for call in calls]
    calls.append({**prompt, "do_sample": False, "custom_generate": decoding(), "streamer": streamer})
    expected.append(llama.generate(**prompt, do_sample=False, max_new_tokens=16).tolist())
    jobs = [lambda call=call: llama.generate(**call, max_new_tokens=16).tolist() for call in calls]
    assert in_threads(jobs) == expected
    assert torch.cat([streamer.puts[0][0], *streamer.puts[1:]]).tolist() == expected[3][0]
    assert streamer.ends == 1


def test_one_hook_in_two_threads(llama: Any, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    """Its stats are one call's or the other's; its tokens are right."""
    hook = lookahead.decoding(LookaheadConfig(window=3, ngram=4, guesses=4, budget=40))
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = [llama.generate(**one, **options).tolist() for one in (prompt, batch)]
    jobs = [lambda one=one: llama.generate(**one, **options, custom_generate=hook).tolist() for one in (prompt, batch)]
    assert in_threads(jobs) == expected
    assert len(hook.stats) in (1, 3)


def test_model_is_not_changed_while_it_is_looked_at(mistral: Any) -> None:
    """The first call tries out what the model does. Its config is everybody's: another thread, stock or ours, reads
    the window from it for its cache and its masks at the same time."""
    model = copy.deepcopy(mistral)
    before, seen = model.config.to_dict(), []
    model.register_forward_pre_hook(lambda *_: seen.append(model.config.to_dict()))
    model.generate(torch.tensor([[5, 9, 2] * 5]), max_new_tokens=8, do_sample=False, custom_generate=decoding())
    assert len(seen) > 8
    assert all(config == before for config in seen)
