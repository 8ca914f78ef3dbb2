"""The runner of transformers' own generation tests: what it compares, what it finds, and what it leaves alone."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Recorder, decoding, tokens_of
from transformers import DynamicCache, GenerationMixin, T5Config, T5ForConditionalGeneration
from transformers_suite import TREE, Call, Twice, main, summary, verdict

import lookahead

TESTS = """
import unittest

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class ToyTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, initializer_range=0.3, eos_token_id=None, pad_token_id=0)
        self.model = LlamaForCausalLM(config).eval()
        self.prompt = torch.tensor([[5, 9, 5, 9, 5, 9, 5]])

    @pytest.mark.generate
    def test_greedy(self):
        output = self.model.generate(self.prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
        self.assertEqual(output.past_key_values.get_seq_length(), 18)

    @pytest.mark.generate
    def test_sampled_goes_on_as_stock(self):
        torch.manual_seed(3)
        first = [self.model.generate(self.prompt, max_new_tokens=6, do_sample=True).tolist() for _ in range(2)]
        torch.manual_seed(3)
        again = [self.model.generate(self.prompt, max_new_tokens=6, do_sample=True).tolist() for _ in range(2)]
        self.assertEqual(first, again)
        self.assertNotEqual(first[0], first[1])

    @pytest.mark.generate
    def test_refused(self):
        self.model.generate(self.prompt, max_new_tokens=4, do_sample=False, use_cache=False)

    @pytest.mark.generate
    def test_beams(self):
        self.model.generate(self.prompt, max_new_tokens=4, num_beams=2, do_sample=False)

    def test_without_the_mark(self):
        raise AssertionError("not selected")
"""
BREAK = """
import lookahead

call = lookahead.Decoding.__call__

def wrong(self, *args, **kwargs):
    output = call(self, *args, **kwargs)
    getattr(output, "sequences", output)[:, -1] += 1
    return output

wrong.__wrapped__ = call
lookahead.Decoding.__call__ = wrong
"""


class Changed(lookahead.Decoding):
    """The output, after `change`."""

    def __init__(self, change: Any) -> None:
        super().__init__(decoding().config)
        self.change = change

    @functools.wraps(lookahead.Decoding.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        self.change(output)
        return output


def told(model: Any, *args: Any, hook: Any = decoding, **kwargs: Any) -> Call:
    """What came of one call, which has to give what stock gives."""
    calls: list[Call] = []
    torch.manual_seed(5)
    expected = model.generate(*args, **{**kwargs, "streamer": None, "past_key_values": None})
    after = torch.get_rng_state()
    torch.manual_seed(5)
    output = Twice(GenerationMixin.generate, calls.append, hook).method()(model, *args, **kwargs)
    assert tokens_of(output).tolist() == tokens_of(expected).tolist()
    assert torch.equal(torch.get_rng_state(), after)
    (call,) = calls
    return call


@pytest.mark.parametrize("sample", [False, True])
def test_equal_calls_are_the_same(llama: Any, inputs: dict[str, Any], sample: bool) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    call = told(llama, **inputs, max_new_tokens=8, do_sample=sample, **wants)
    assert (call.outcome, call.detail, call.model) == ("same", "", "LlamaForCausalLM")


def test_what_the_test_gave_is_used_by_stock_alone(llama: Any, prompt: dict[str, Any]) -> None:
    streamer, cache = Recorder(), DynamicCache(config=llama.config)
    options = {"max_new_tokens": 8, "do_sample": False, "streamer": streamer, "past_key_values": cache}
    assert told(llama, **prompt, **options).outcome == "same"
    assert (len(streamer.puts), streamer.ends) == (9, 1)
    assert cache.get_seq_length() == prompt["input_ids"].shape[1] + 7


def spoil(name: str) -> Any:
    """A hook that does one thing wrong."""

    def change(output: Any) -> None:
        if name == "tokens":
            output.sequences[:, -1] += 1
        elif name == "length":
            output.sequences = output.sequences[:, :-1]
        elif name == "scores":
            output.scores[2][0, 3] += 0.1
        elif name == "cache":
            output.past_key_values.layers[1].values[0, 0, 3] += 0.1
        elif name == "key":
            raise KeyError("mine")
        elif name == "value":
            raise ValueError("mine")

    return lambda: Changed(change)


@pytest.mark.parametrize("name", ["tokens", "length", "scores", "cache"])
def test_a_difference_is_found(llama: Any, prompt: dict[str, Any], name: str) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": True}
    call = told(llama, **prompt, max_new_tokens=8, do_sample=False, **wants, hook=spoil(name))
    assert call.outcome == "different"
    assert call.detail


@pytest.mark.parametrize(("name", "detail"), [("key", "KeyError: 'mine'"), ("value", "ValueError: mine")])
def test_a_crash_is_none_of_the_tests(llama: Any, prompt: dict[str, Any], name: str, detail: str) -> None:
    """Only what lookahead raises is a refusal."""
    call = told(llama, **prompt, max_new_tokens=8, do_sample=False, hook=spoil(name))
    assert (call.outcome, call.detail) == ("crashed", detail)


def test_refusals_and_calls_that_are_not_ours(llama: Any, prompt: dict[str, Any]) -> None:
    options = {"max_new_tokens": 4, "do_sample": False}
    call = told(llama, **prompt, **options, use_cache=False)
    assert call.outcome == "refused"
    assert "use_cache=False" in call.detail
    assert told(llama, **prompt, **options, num_beams=2).outcome == "not ours"
    assert told(llama, **prompt, **options, custom_generate=decoding()).detail == "custom_generate"
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    assert told(t5, torch.tensor([[5, 6, 7]]), **options).detail == "encoder-decoder"


def test_an_error_of_stock_reaches_the_test(llama: Any, prompt: dict[str, Any]) -> None:
    calls: list[Call] = []
    with pytest.raises(ValueError, match="nonsense"):
        Twice(GenerationMixin.generate, calls.append).method()(llama, **prompt, nonsense=1)
    assert [call.outcome for call in calls] == ["stock fails"]


def test_verdict_and_summary() -> None:
    good, bad = Call("same", "", "Llama"), Call("different", "row 0", "Llama", "a.py::b")
    refused = [Call("refused", f"model type '{name}' has {name} heads", name) for name in ("7", "11")]
    assert verdict(1, [good, *refused]) == ""
    assert "1 calls" in verdict(0, [good, bad])
    assert "no call" in verdict(0, refused)
    assert "ended with 4" in verdict(4, [good])
    said = summary([good, bad, *refused])
    assert "DIFFERENT: Llama: row 0 (a.py::b)" in said
    assert "refused: 2 x the model has N heads" in said


def toy_tree(folder: Path, more: str = "") -> Path:
    """A tree as transformers' is: tests in packages, a conftest.py at the root."""
    place = folder / "tests" / "models" / "toy"
    place.mkdir(parents=True)
    for parent in (place, *list(place.parents)[:2]):
        (parent / "__init__.py").touch()
    (place / "test_modeling_toy.py").write_text(TESTS, encoding="utf-8")
    mark = 'def pytest_configure(config):\n    config.addinivalue_line("markers", "generate: calls generate")\n'
    (folder / "conftest.py").write_text(mark + more, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_tree(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main([str(toy_tree(tmp_path / "tree")), "--models", "toy", "--report", str(report)]) == 0
    said = capfd.readouterr().out
    assert "4 passed, 1 deselected" in said
    assert "all well" in said
    calls = [Call(**call) for call in json.loads(report.read_text(encoding="utf-8"))]
    assert sorted(call.outcome for call in calls) == ["not ours", "refused", *["same"] * 5]
    assert {call.test.rpartition("::")[2] for call in calls if call.outcome == "refused"} == {"test_refused"}


@pytest.mark.slow
def test_a_tree_with_a_broken_hook(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(toy_tree(tmp_path, BREAK)), "--models", "toy", "-k", "greedy or refused"]) == 1
    said = capfd.readouterr().out
    assert "2 passed" in said
    assert "DIFFERENT: LlamaForCausalLM: row 0 has" in said
    assert "1 calls gave something else" in said


def test_a_tree_without_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--models", "toy"])
    assert "has no tests/models" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(TREE not in os.environ, reason=f"{TREE} names no source tree of transformers")
def test_transformers_own_tests() -> None:
    assert main(["--models", "llama,gpt2,mistral,gemma3,mixtral"]) == 0
