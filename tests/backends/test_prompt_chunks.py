"""Prompts that are longer than a pass, given straight to a backend: the same targets, and no pass has too many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tiny import PROMPTS, greedy, root, tiny

from lookahead.backends.base import Backend, StepInput
from lookahead.backends.cpu import backend as cpu
from lookahead.backends.cpu.backend import CpuBackend
from lookahead.backends.eager import backend as eager
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.prompts import run_prompt_chunks

Plain = Callable[[Any, Sequence[int], int], list[int]]


@pytest.mark.parametrize("kind", [EagerBackend, GraphBackend, CpuBackend])
@pytest.mark.parametrize("most", [4, 8, 1024])
@pytest.mark.thinned(1, most=3)
def test_long_prompts_of_a_step(kind: Any, most: int, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    monkeypatch.setattr(eager, "PREFILL_CHUNK", most)
    monkeypatch.setattr(cpu, "MOST_ROWS", most)
    backend: Backend = kind(model, **({"most_rows": most} if kind is GraphBackend else {}))
    launch, chunks = backend.launch, list[int]()

    def noting(inputs: Sequence[StepInput]) -> Any:
        chunks.extend(len(item.chunk) for item in inputs)
        if kind is not EagerBackend:  # which pads, and limits each input
            assert sum(len(item.chunk) + len(item.tree) for item in inputs) <= backend.most_rows
        return launch(inputs)

    monkeypatch.setattr(backend, "launch", noting)
    slots = [backend.open() for _ in PROMPTS[:3]]
    items = [greedy(slot, prompt[:-1], root(prompt[-1])) for slot, prompt in zip(slots, PROMPTS, strict=False)]
    found = backend.step(run_prompt_chunks(backend, items))
    backend.commit([(slot, ()) for slot in slots])
    assert [output.targets for output in found] == [plain(model, prompt, 1) for prompt in PROMPTS[:3]]
    assert [backend.length(slot) for slot in slots] == [len(prompt) for prompt in PROMPTS[:3]]
    assert max(chunks) == min(most, max(len(prompt) - 1 for prompt in PROMPTS[:3]))
    assert sum(chunks) == sum(len(prompt) - 1 for prompt in PROMPTS[:3])
