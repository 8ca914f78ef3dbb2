"""Mistakes in the hook's own settings are told when it is made, not in the middle of a call."""

from __future__ import annotations

from typing import Any

import pytest

import lookahead
from lookahead import LookaheadConfig

BAD = [
    {"window": -1}, {"window": 1.5}, {"ngram": 1}, {"guesses": -1}, {"budget": 0}, {"seed": -1}, {"seed": "0"},
    {"sources": ["nothing"]}, {"sources": "suffix"}, {"recycle_scope": "world"}, {"window": 30, "budget": 40},
    {"suffix_key": 0}, {"step_cost": ()},
]  # fmt: skip


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_bad_value(settings: dict[str, Any]) -> None:
    """One line that names the setting."""
    with pytest.raises(ValueError, match=next(iter(settings)).rstrip("s")) as caught:
        lookahead.decoding(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["windows", "temperature", "max_new_tokens"])
def test_unknown_setting(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        lookahead.decoding(**{name: 3})


def test_settings_change_a_config() -> None:
    config = LookaheadConfig(window=4, ngram=3)
    assert lookahead.decoding(config).config == config
    assert lookahead.decoding(config, guesses=2).config == LookaheadConfig(window=4, ngram=3, guesses=2)


@pytest.mark.parametrize("method", ["autoregressive", "jacobi", "prompt-lookup"])
@pytest.mark.thinned(1, most=2)
def test_every_method_is_exact(both: Any, llama: Any, inputs: dict[str, Any], method: str) -> None:
    hook = lookahead.decoding(LookaheadConfig.for_method(method))
    pair = both(llama, inputs, max_new_tokens=20, hook=hook).same()
    assert method != "autoregressive" or pair.compression == 1


@pytest.mark.parametrize(
    "settings", [{}, {"recycle_scope": "model"}, {"ngram": 2}, {"window": 0}, {"budget": 1}], ids=str
)
@pytest.mark.thinned(1, most=3)
def test_settings_do_not_change_the_text(
    both: Any, counting: Any, count_up: dict[str, Any], settings: dict[str, Any], tmp_path: Any, monkeypatch: Any
) -> None:
    """With none at all the step cost of the model is measured first, and kept where this test looks alone."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    pair = both(counting, count_up, max_new_tokens=20, hook=lookahead.decoding(**settings)).same()
    assert sum(stats.generated_tokens for stats in pair.hook.stats) == 20


def test_hook_can_be_used_again(both: Any, llama: Any, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    """Its stats are those of the last call, one per row."""
    hook = lookahead.decoding(window=3, ngram=4, guesses=4, budget=40)
    for inputs in (prompt, batch, prompt):
        both(llama, inputs, max_new_tokens=12, hook=hook).same()
        assert [stats.generated_tokens for stats in hook.stats] == [12] * len(inputs["input_ids"])


def test_without_parentheses_one_line_says_so(llama: Any, prompt: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"needs its parentheses: custom_generate=lookahead.decoding\(\)"):
        llama.generate(**prompt, max_new_tokens=2, custom_generate=lookahead.decoding)
