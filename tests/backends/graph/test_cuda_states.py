"""Recurrent states on CUDA, in half precision: a token's logits and states do not depend on how its text was run.

The bits are those of token-by-token decoding: in a tree, among other sequences, after a preemption, and behind a
snapshot. `test_graph_states.py` runs on CUDA as well, in fp32, captured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from model_table_recurrent import RECURRENT_ROWS
from tiny import VOCABULARY, greedy, outputs, random_tree, root, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import NO_TREE, StepInput
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import PAGE
from lookahead.config import SamplingParams
from lookahead.engine.plain_run import PlainRun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

KINDS = ("qwen3.5", "granite-mamba", "lfm2")
"""A row of each mixer: a gated delta net, Mamba-2, a short convolution."""
AUTOREGRESSIVE = LookaheadConfig.autoregressive()


def tokens(count: int, seed: int = 11) -> list[int]:
    return [(seed * i + i // 7) % VOCABULARY for i in range(count)]


def speaking(name: str, dtype: torch.dtype) -> Any:
    """A model whose states matter, of some size: random weights, with two best logits that are often neighbours."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 2048, "initializer_range": 0.06}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
             "linear_value_head_dim": 64}  # fmt: skip
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
    own = {"qwen3.5": delta, "granite-mamba": mamba, "lfm2": {}}[name]
    (row,) = [row for row in RECURRENT_ROWS if row[0] == name]
    return tiny(row[1], **{**row[2], **sizes, **own}).to("cuda", dtype)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lookahead_equals_token_by_token(name: str, dtype: torch.dtype) -> None:
    """Alone, among others that join, and preempted."""
    backend, rng = GraphBackend(speaking(name, dtype)), random.Random(1)
    prompts = [rng.choices(range(VOCABULARY), k=size) for size in (8, 40, 300, 1, 90, 65, 129, 700)]
    expected = [outputs(backend, [prompt], AUTOREGRESSIVE, 60)[0] for prompt in prompts]
    assert [outputs(backend, [prompt], LookaheadConfig(), 60)[0] for prompt in prompts] == expected
    assert outputs(backend, prompts, LookaheadConfig(), 60) == expected
    assert outputs(backend, prompts, AUTOREGRESSIVE, 60) == expected
    common = rng.choices(range(VOCABULARY), k=600)
    prompts = [[*common, *prompt] for prompt in prompts[:5]]
    expected = [outputs(GraphBackend(speaking(name, dtype)), [prompt], AUTOREGRESSIVE, 60)[0] for prompt in prompts]
    assert [outputs(backend, [prompt], LookaheadConfig(), 60)[0] for prompt in prompts] == expected
    assert outputs(backend, prompts, LookaheadConfig(), 60) == expected
    assert backend.pool.hit_tokens
    small = GraphBackend(speaking(name, dtype), kv_tokens=24 * PAGE, most_rows=128)
    assert outputs(small, prompts, LookaheadConfig(), 60) == expected


@pytest.mark.parametrize("name", KINDS)
def test_states_and_logits(name: str) -> None:
    """One text in one chunk, in chunks of any size, token by token, and by accepted paths of trees beside other
    sequences: logits, matrices and inputs of convolutions are equal bit for bit."""
    backend = GraphBackend(speaking(name, torch.bfloat16))
    text, results = tokens(150, 17), list[list[torch.Tensor]]()
    for way in ("chunk", "chunks", "tokens", "trees"):
        rng, slot, others = random.Random(way), backend.open(), [backend.open() for _ in range(3)]
        first = 0
        while first < len(text) - 1:
            beside = [greedy(other, tokens(rng.randrange(1, 20)), random_tree(rng.randrange(1, 9), first))
                      for other in others if way != "chunk"]  # fmt: skip
            left = len(text) - 1 - first
            if way in ("chunk", "chunks"):
                size = left if way == "chunk" else min(left, rng.randrange(1, 40))
                item = StepInput(slot, text[first : first + size], NO_TREE, SamplingParams(), ())
                backend.step([*beside, item])
                first += size
            else:
                size = 1 if way == "tokens" else min(left, rng.randrange(1, 7))
                tree, path = hidden_path(text[first : first + size], rng) if way == "trees" else (root(text[first]), [])
                backend.step([*beside, greedy(slot, (), tree)])
                backend.commit([(slot, path)])
                first += size
            for other in others:
                backend.close(other)
            others = [backend.open() for _ in range(3)]
        found = backend.step([greedy(slot, (), root(text[-1]), logits=True)])[0].logits
        index, kept = backend.slots[slot].table_index, [found]
        for group in backend.runner.state.states.groups:
            kept.append(group.inputs[:, index].clone())
            if group.recurrence is not None:
                kept.append(group.recurrence.matrices[:, index].clone())
        results.append(kept)
        for open_slot in (slot, *others):
            backend.close(open_slot)
    for found in results[1:]:
        for one, expected in zip(found, results[0], strict=True):
            assert torch.equal(one, expected)


@pytest.mark.parametrize("name", KINDS)
def test_captured_steps_are_the_uncaptured_ones(name: str) -> None:
    captured, direct = (GraphBackend(speaking(name, torch.bfloat16), capture=capture) for capture in (True, False))
    prompts = [tokens(50, 3), tokens(9, 5)]
    assert outputs(captured, prompts, LookaheadConfig(), 40) == outputs(direct, prompts, LookaheadConfig(), 40)


@pytest.mark.parametrize("name", KINDS)
def test_steps_ahead(name: str, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts token by token, and the states behind them, are those of steps that wait for the host."""
    prompts = [tokens(50, 3), tokens(9, 5), tokens(1)]

    def decoded() -> tuple[list[list[int]], list[torch.Tensor]]:
        backend = GraphBackend(speaking(name, torch.bfloat16))
        found, kept = outputs(backend, prompts, LookaheadConfig.autoregressive(), 60), list[torch.Tensor]()
        for group in backend.runner.state.states.groups:
            kept.append(group.inputs[:, : len(prompts)].clone())
            if group.recurrence is not None:
                kept.append(group.recurrence.matrices[:, : len(prompts)].clone())
        return found, kept

    found, kept = decoded()
    assert ran.count("ahead") > 50
    ran.clear()
    monkeypatch.setattr(PlainRun, "_continues", lambda *given: False)
    expected, wanted = decoded()
    assert "ahead" not in ran
    assert found == expected
    assert all(map(torch.equal, kept, wanted))


def hidden_path(text: Sequence[int], rng: random.Random) -> tuple[TokenTree, list[int]]:
    """A tree in which this text is one path from the root, and its nodes; the others are random."""
    nodes, parents, path, at = [text[0]], [-1], list[int](), 0
    for token in text[1:]:
        for _ in range(rng.randrange(3)):
            nodes.append(rng.randrange(VOCABULARY))
            parents.append(rng.randrange(len(nodes) - 1))
        nodes.append(token)
        parents.append(at)
        at = len(nodes) - 1
        path.append(at)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return TokenTree(nodes, parents, depths, range(len(nodes))), path
