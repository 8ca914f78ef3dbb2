"""A tiny loaded model for the bench."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lm(make_model: Callable[..., Any], tokenizer: Any, settings: Any) -> Any:
    from lookahead.generate import LookaheadModel

    return LookaheadModel(make_model(), tokenizer, "tiny", settings)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The paper's sets, two rows each, of our own making."""
    import json

    rows: dict[str, Any] = {
        "mt_bench.jsonl": [
            {"question_id": i, "category": "writing", "turns": [f"the fox {i}", f"once more the dog {i}"]}
            for i in range(2)
        ],
        "humaneval.jsonl": [{"task_id": f"t/{i}", "prompt": f"def fox{i}(dog):\n"} for i in range(2)],
        "mbpp.jsonl": [{"task_id": i, "text": "the fox", "test_list": ["assert fox(1)"]} for i in range(2)],
        "gsm8k_test.jsonl": [{"question": f"how many dogs {i}", "answer": f"#### {i}"} for i in range(2)],
        "cnn_dm_sample.jsonl": [
            {"id": str(i), "article": f"the quick fox {i}", "highlights": "the fox and the dog"} for i in range(2)
        ],
        "xsum_sample.jsonl": [{"id": str(i), "document": f"the dog {i}", "summary": "the dog"} for i in range(2)],
    }
    folder = tmp_path / "data"
    folder.mkdir()
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    classes = [{"task_id": f"c{i}", "class_name": "Fox", "skeleton": f"class Fox:  # {i}\n"} for i in range(2)]
    (folder / "classeval.json").write_text(json.dumps(classes), encoding="utf-8")
    return folder
