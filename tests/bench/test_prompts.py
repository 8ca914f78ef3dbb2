"""Prompt sets: ours, and the paper's from a folder; what is missing is told in one line."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from lookahead.bench.run.prompts import PAPER_SETS, SETS, Prompt, load, messages, spread


def test_builtin_has_enough_of_every_kind() -> None:
    prompts = load("builtin")
    assert len(prompts) >= 32
    assert len({prompt.id for prompt in prompts}) == len({prompt.turns for prompt in prompts}) == len(prompts)
    kinds = Counter(prompt.kind for prompt in prompts)
    assert set(kinds) == {"chat", "code", "maths", "summarising", "extraction"}
    assert min(kinds.values()) >= 6
    assert len({prompt.kind for prompt in load("builtin", limit=5)}) == 5


@pytest.mark.parametrize("name", sorted(PAPER_SETS))
def test_a_set_of_a_folder(name: str, data_dir: Path) -> None:
    prompts = load(name, data_dir)
    assert len(prompts) == 2
    assert len({prompt.id for prompt in prompts}) == 2
    assert [len(prompt.turns) for prompt in prompts] == [2 if name == "mt-bench" else 1] * 2
    assert [prompt.raw for prompt in prompts] == [name == "humaneval"] * 2
    assert load(name, data_dir, limit=1) == prompts[:1]


def test_a_limit_takes_evenly_spaced_rows(tmp_path: Path) -> None:
    lines = "".join(f'{{"question": "q{i}", "answer": "a"}}\n' for i in range(10))
    (tmp_path / "gsm8k_test.jsonl").write_text(lines, encoding="utf-8")
    assert [prompt.id for prompt in load("gsm8k", tmp_path, 5)] == ["q0", "q2", "q4", "q6", "q8"]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 80, 164])
def test_every_beginning_is_spread_over_the_whole(count: int) -> None:
    order = spread(list(range(count)))
    assert sorted(order) == list(range(count))
    for first in range(1, count + 1):
        quarters = Counter(4 * row // count for row in order[:first])
        assert first < 8 or max(quarters.values()) <= 2 * min(quarters[quarter] for quarter in range(min(4, count)))
    assert spread(list(range(80)))[:4] == [0, 40, 20, 60]


def test_a_second_turn_holds_the_first_answer() -> None:
    prompt = Prompt("1", ("first", "second"), system="rules")
    assert [m["content"] for m in messages(prompt, ())] == ["rules", "first"]
    chat = messages(prompt, ["my own answer"])
    assert [(m["role"], m["content"]) for m in chat] == [
        ("system", "rules"),
        ("user", "first"),
        ("assistant", "my own answer"),
        ("user", "second"),
    ]


def test_an_unknown_set_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown prompt set 'mtbench': did you mean 'mt-bench'"):
        load("mtbench")


def test_a_missing_file_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set 'mbpp' needs .*mbpp\.jsonl.*google-research-datasets/mbpp on the hub"):
        load("mbpp", tmp_path)


def test_without_a_folder_or_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"datasets library, which is not installed: pip install .*--data-dir"):
        load("gsm8k")


@pytest.mark.parametrize(("text", "error"), [("{broken\n", "line 1: not JSON"), ('{"other": 1}\n', "not as expected")])
def test_a_broken_file(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=error):
        load("gsm8k", tmp_path)


def test_every_set_has_a_name_of_its_own() -> None:
    assert len(set(SETS)) == len(SETS) == 8
