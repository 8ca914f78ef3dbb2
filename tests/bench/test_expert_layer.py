"""`benchmarks/expert_layer.py`: kernels by their place in a layer, steps of both forms, and no GPU in one line."""

from __future__ import annotations

from typing import Any

import expert_layer
import pytest
import torch
from expert_layer import ONCE_PER_LAYER, Event, layer_of, main, tokens_of
from random_experts import RANDOM_SHAPES, random_mixture

from lookahead.backends.graph.backend import GraphBackend

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def test_kernels_are_told_apart_by_where_they_run_in_a_layer() -> None:
    """Two products of one name, a kernel before the first layer, and one that a single layer has."""
    events = [Event(0.0, 9.0, "embed")]
    for layer in range(4):
        start = 10.0 + 20 * layer
        own = [(ONCE_PER_LAYER, 1.0), ("multiply", 5.0 + layer), ("norm", 2.0), ("multiply", 3.0)]
        events += [Event(start + 4 * at, taken, name) for at, (name, taken) in enumerate(own)]
    events.append(Event(88.0, 7.0, "head"))
    whole, kernels = layer_of(reversed(events))
    assert whole == 20
    assert kernels == [(ONCE_PER_LAYER, 1.0), ("multiply", 6.5), ("norm", 2.0), ("multiply", 3.0)]


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="1 layers ran '_rotate_write'"):
        layer_of([Event(0.0, 1.0, ONCE_PER_LAYER)])


def tiny() -> Any:
    fields = {**TINY, "vocab_size": 150, "moe_intermediate_size": 16, "num_experts": 8}
    return random_mixture(RANDOM_SHAPES["qwen3-30b-a3b"], "cpu", dtype=torch.float32, **fields)


def test_two_backends_of_a_model_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_layer, "tree_of", lambda rows: tree_of_small(rows))
    model = tiny()
    found = [tokens_of(GraphBackend(model, most_rows=64, kv_tokens=512), 4) for _ in range(2)]
    assert found[0] == found[1]
    assert len(found[0]) > 1


def tree_of_small(rows: int) -> Any:
    from lookahead.bench.gpu.timing import tree_of

    return tree_of(rows, 150)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="there is no GPU"):
        main(["--names", "qwen3-30b-a3b"])
