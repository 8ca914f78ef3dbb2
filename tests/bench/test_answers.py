"""`benchmarks/answers.py` end to end on a tiny model, and its prompts."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from answers import PASSAGES, SETS, prompts_of, run

from lookahead.algorithm.successors import MAX_SUCCESSORS


def test_prompts_ask_for_what_the_articles_say(data_dir: Path) -> None:
    """They are made of different articles, and every passage that is asked for is there."""
    rows = [{"id": str(i), "document": f"Dog {i} ran. It was late. No one saw it. The end. More"} for i in range(12)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (data_dir / "xsum_sample.jsonl").write_text(lines, encoding="utf-8")
    translated, retrieved = ([one.turns[0] for one in prompts_of(name, data_dir, 3)] for name in SETS[2:5:2])
    assert [text.split("\n\n")[1] for text in translated] == [
        f"Dog {i} ran. It was late. No one saw it." for i in (0, 4, 8)
    ]
    for i, text in enumerate(retrieved):
        number = i % PASSAGES + 1
        assert f"Passage {number}: Dog {PASSAGES * i + number - 1} ran. It was late. No one saw it. The end." in text
        assert f"What does passage {number} report" in text


def test_every_set_is_measured(lm: Any, data_dir: Path, tmp_path: Path) -> None:
    """All texts equal, with bigrams and without, with a window and without; the model's own memory is as it was."""
    own = lm.memory
    own.bigrams = own.drafter.new_table()
    own.bigrams.put_tokens(np.zeros((lm.backend.vocab_size, 2 * MAX_SUCCESSORS), dtype=np.int32))
    out = tmp_path / "answers.json"
    try:
        options = Namespace(
            data_dir=data_dir, sets=SETS, limit=2, tokens=6, streams=[2], without_bigrams=True, with_window=True
        )
        records = run(lm, Namespace(**vars(options), out=out))
    finally:
        own.bigrams = None
    assert lm.memory is own
    assert list(records) == [*SETS, "sampled", "2 streams, plain", "2 streams, default"]
    for name in (*SETS, "sampled"):
        equal, texts = records[name]["equal"].split(" of ")
        assert equal == texts == str(6 * records[name]["prompts"])
    assert records["2 streams, default"]["tok_s"] > 0
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert stored["records"] == records
    assert stored["about"]["tokens"] == 6
