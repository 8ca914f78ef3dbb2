"""Arguments that `generate` keeps from a callable: they reach us, or a warning says that a streamer may not have."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import Recorder, decoding, output_of
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

MANY = 12


@pytest.fixture
def unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers whose helper has another name: it drops the arguments, and its frame is not found."""

    def take_out(model: Any, hook: Any, kwargs: Any, synced_gpus: Any, assistant_model: Any, streamer: Any) -> Any:
        kwargs.pop("tokenizer", None)
        if hook is None:
            return {}
        usual = inspect.signature(GenerationMixin._sample).parameters
        own = [name for name in inspect.signature(hook).parameters if name not in usual]
        return {name: kwargs.pop(name) for name in own if name in kwargs}

    monkeypatch.setattr(GenerationMixin, "_extract_generation_mode_kwargs", take_out)


@pytest.fixture
def passing_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers that passes the arguments to a callable as it does to its own loops."""

    def pass_on(model: Any, hook: Any, kwargs: Any, synced_gpus: Any, assistant_model: Any, streamer: Any) -> Any:
        taken = {"tokenizer": kwargs.pop("tokenizer", None), "streamer": streamer, "synced_gpus": bool(synced_gpus)}
        return {name: value for name, value in taken.items() if value is not None}

    monkeypatch.setattr(GenerationMixin, "_extract_generation_mode_kwargs", pass_on)


@pytest.fixture
def generate(llama: Any, prompt: dict[str, Any]) -> Callable[..., list[int]]:
    """The new tokens of a greedy call."""
    return lambda **more: output_of(prompt, llama.generate(**prompt, max_new_tokens=MANY, do_sample=False, **more))[0]


def streamed(streamer: Recorder) -> list[int]:
    """The tokens after the prompt."""
    return [int(token) for put in streamer.puts[1:] for token in put]


def test_a_streamer_is_never_dropped_silently(generate: Any) -> None:
    """On the installed transformers: it gets every token, or the user is told. Here: it gets them, without a word."""
    streamer = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = generate(streamer=streamer, custom_generate=decoding())
    assert streamed(streamer) == output


@pytest.mark.usefixtures("unknown_version")
def test_an_unknown_version_is_warned_about(generate: Any) -> None:
    streamer = Recorder()
    with pytest.warns(UserWarning, match=r"streamer.*lookahead\.decoding\(streamer=") as caught:
        output = generate(streamer=streamer, custom_generate=decoding())
    assert streamed(streamer) != output
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)


@pytest.mark.usefixtures("unknown_version")
def test_the_warning_is_shown_once(generate: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            generate(custom_generate=decoding())
    assert len(caught) == 1


@pytest.mark.usefixtures("unknown_version")
def test_a_streamer_of_decoding_needs_no_frame(generate: Any) -> None:
    streamer = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = generate(custom_generate=decoding(streamer=streamer))
    assert streamed(streamer) == output
    assert streamer.ends == 1


@pytest.mark.usefixtures("unknown_version")
def test_stop_strings_need_no_frame_as_a_criterion(generate: Any, tokenizer: Any) -> None:
    """The tokenizer of `stop_strings` is dropped, too: transformers itself refuses then."""
    stop = tokenizer.decode(generate()[3:5])
    stopping = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    expected = generate(stopping_criteria=stopping)
    with pytest.warns(UserWarning, match="streamer"):
        assert generate(stopping_criteria=stopping, custom_generate=decoding()) == expected
    with pytest.raises(ValueError, match="tokenizer"):
        generate(stop_strings=[stop], tokenizer=tokenizer, custom_generate=decoding())


@pytest.mark.usefixtures("passing_version")
def test_a_version_that_passes_them_itself(generate: Any) -> None:
    streamer = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = generate(streamer=streamer, custom_generate=decoding())
    assert streamed(streamer) == output
    assert streamer.ends == 1


def test_a_wrapped_callable_is_warned_about(generate: Any) -> None:
    """A partial of ours is another callable: the call is not known to be ours, and nothing is written into it."""
    with pytest.warns(UserWarning, match="streamer"):
        generate(streamer=Recorder(), custom_generate=functools.partial(decoding()))


def test_the_streamer_of_decoding_is_as_generates(llama: Any, batch: dict[str, Any]) -> None:
    """The prompt first, then one tensor per position of a batch, then the end; again in the next call."""
    ours, theirs = Recorder(), Recorder()
    asked = {**batch, "max_new_tokens": MANY, "do_sample": False}
    llama.generate(**asked, custom_generate=decoding(streamer=ours))
    llama.generate(**asked, streamer=theirs)
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in theirs.puts]
    assert ours.ends == theirs.ends == 1


def test_one_streamer_given_twice_is_one(generate: Any) -> None:
    streamer = Recorder()
    output = generate(streamer=streamer, custom_generate=decoding(streamer=streamer))
    assert streamed(streamer) == output
    assert isinstance(streamer.puts[0], torch.Tensor)
    assert streamer.ends == 1


def test_two_streamers_are_refused(generate: Any) -> None:
    theirs = Recorder()
    with pytest.raises(ValueError, match="two streamers"):
        generate(streamer=theirs, custom_generate=decoding(streamer=Recorder()))
    assert theirs.ends == 1


def test_another_custom_generate_is_not_touched(llama: Any, prompt: dict[str, Any]) -> None:
    """The arguments of a call that is not ours are as transformers left them, also while one of ours exists."""
    seen: list[set[str]] = []

    def theirs(model: Any, input_ids: torch.Tensor, dropped: Any = None, **kwargs: Any) -> torch.Tensor:
        seen.append({"dropped" for _ in [0] if dropped is not None} | (kwargs.keys() & {"streamer", "tokenizer"}))
        return input_ids

    hook = decoding()
    inspect.signature(hook)
    llama.generate(**prompt, max_new_tokens=4, streamer=Recorder(), custom_generate=theirs)
    assert seen == [set()]
