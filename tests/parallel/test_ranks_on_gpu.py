"""Two processes that share one GPU, and so exchange by gloo: the graph backend's tokens, captured, on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import backend_of, decode, random_cases
from tiny import tiny
from worlds import World

import lookahead
from lookahead import LookaheadConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CONFIG = {"window": 3, "ngram": 4, "guesses": 4, "budget": 40}


def test_two_ranks_of_one_gpu(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{**case, "backend": "graph"} for case in random_cases(7, 12)]
    with World(tmp_path, 2, {"do": "identity", "cases": cases, "check": True, "device": "cuda"}) as world:
        model = tiny("Llama", device="cuda")
        expected = [decode(backend_of(case, model), case) for case in cases]
        reports = [report[0] for report in world.reports(300)]
    for report in reports:
        for found, one in zip(report, expected, strict=True):
            assert found["outputs"] == one["outputs"]
            assert found["steps_each"] == one["steps_each"]


def test_load_on_a_shared_gpu(folder: Path, tmp_path: Path) -> None:
    requests = [
        {"prompt": "the fox", "settings": {"max_tokens": 24}},
        {"prompt": ["the fox", "once more"], "settings": {"max_tokens": 24, "temperature": 0.8, "seed": 2}},
    ]
    task = {"do": "requests", "model": str(folder), "config": CONFIG, "requests": requests}
    with World(tmp_path, 2, task) as world:
        alone = lookahead.load(folder, dtype="float32", config=LookaheadConfig(**CONFIG))
        reports = world.reports(300)
    assert alone.device.type == "cuda"
    for request, first, second in zip(requests, *(report[0][1:] for report in reports), strict=True):
        assert first == second
        answers: Any = alone.generate(request["prompt"], **request["settings"])
        answers = answers if isinstance(answers, list) else [answers]
        assert [one[0] for one in first] == [answer.token_ids for answer in answers]
