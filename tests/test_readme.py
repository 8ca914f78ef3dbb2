"""The README's examples run, on the embedded model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.model
def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        exec(example.replace("max_tokens=64", "max_tokens=12"), names)
        if "model" in names:  # the later examples leave the length open
            generate, stream = names["model"].generate, names["model"].stream
            names["model"].generate = lambda p, generate=generate, **kw: generate(p, **{"max_tokens": 12, **kw})
            names["model"].stream = lambda p, stream=stream, **kw: stream(p, **{"max_tokens": 12, **kw})
    assert names["out"].stats.generated_tokens == 12
    assert len(names["outs"]) == 2
    assert capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
    assert "make demo" in README.split("## ")[1]
    assert "make test" in README.split("## ")[1]
