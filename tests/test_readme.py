"""The README's examples run, on the embedded model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lookahead
from lookahead.loading.embedded import EMBEDDED, resolve

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
STOCK = [example for example in EXAMPLES if "custom_generate" in example]
OWN = [example for example in EXAMPLES if example not in STOCK]
HUB = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


@pytest.mark.parametrize("which", ["tiny", pytest.param("embedded", marks=[pytest.mark.slow, pytest.mark.model])])
def test_the_examples_run(
    which: str,
    make_model: Callable[..., Any],
    tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if which == "tiny":
        parts, load = (make_model(), tokenizer), lookahead.load
        monkeypatch.setattr(lookahead, "load", lambda: load(parts))
    names: dict[str, Any] = {}
    for example in OWN:
        exec(example.replace("max_tokens=64", "max_tokens=12"), names)
        if "model" in names:  # the later examples leave the length open
            generate, stream = names["model"].generate, names["model"].stream
            names["model"].generate = lambda p, generate=generate, **kw: generate(p, **{"max_tokens": 12, **kw})
            names["model"].stream = lambda p, stream=stream, **kw: stream(p, **{"max_tokens": 12, **kw})
    assert names["out"].stats.generated_tokens == 12
    assert len(names["outs"]) == 2
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.model
def test_the_example_with_stock_transformers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model's folder stands in for its name on the hub; the output is that of `generate` alone."""
    (example,) = STOCK
    assert HUB in example
    example = example.replace(HUB, repr(str(resolve(EMBEDDED)))).replace("max_new_tokens=64", "max_new_tokens=24")
    exec(example, {})
    with_lookahead = capsys.readouterr().out
    exec(example.replace(", custom_generate=lookahead.decoding()", ""), {})
    assert with_lookahead == capsys.readouterr().out
    assert len(with_lookahead) > len("The tides are caused by")


def test_there_are_examples() -> None:
    assert len(OWN) >= 3
    assert len(STOCK) == 1
    assert len(STOCK[0].strip().splitlines()) <= 7  # two imports and five lines
    assert "make demo" in README.split("## ")[1]
    assert "make test" in README.split("## ")[1]
