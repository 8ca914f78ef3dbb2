"""Every class with a reader decodes as `model.generate` does on both fast backends, and by trees as token by token.

In fp32 on a CPU, the graph backend on its kernels' slow twins; in half precision on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from marks import slow_but
from model_table import ROWS, build
from pictures import widen
from tiny import PROMPTS, outputs

from lookahead import LookaheadConfig
from lookahead.backends.choose import cpu_backend, graph_backend
from lookahead.backends.exact import exact_config
from lookahead.config import SamplingParams

QUICK = ("gemma3", "gpt2")
"""The rows that `make test` tries; `make test-all` tries every one."""
SETTINGS = LookaheadConfig(window=3, ngram=4, guesses=4, budget=24)
PLAIN = LookaheadConfig.autoregressive()
SAMPLING = SamplingParams(temperature=1.3, top_p=0.95, seed=3)
MANY = 24
BACKENDS = {"cpu": cpu_backend, "graph": graph_backend}


@cache
def stock_texts(name: str) -> list[list[int]]:
    """Greedy texts of transformers."""
    model = build(name)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=MANY, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def alone(backend: Any, config: LookaheadConfig, sampling: SamplingParams | None = None) -> list[list[int]]:
    return [outputs(backend, [prompt], config, MANY, sampling)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", slow_but([row[0] for row in ROWS], *QUICK))
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.thinned(1)
def test_texts_in_fp32(name: str, kind: str) -> None:
    """Greedy and sampled, alone and in a batch, with windows where the row has them."""
    if kind == "cpu":
        pytest.importorskip("onnxruntime")
    backend = BACKENDS[kind](build(name))
    expected = stock_texts(name)
    assert alone(backend, SETTINGS) == expected
    assert outputs(backend, PROMPTS, SETTINGS, MANY) == expected
    drawn = alone(backend, PLAIN, SAMPLING)
    assert drawn != expected
    assert alone(backend, SETTINGS, SAMPLING) == drawn
    assert outputs(backend, PROMPTS, SETTINGS, MANY, SAMPLING) == drawn


WIDENED = ("persimmon", "xglm", "biogpt", "ctrl")
"""Rows whose weights are wider than their configs can say; as they come, all of their texts are alike."""


def wide_model(name: str) -> Any:
    """The row's model, with weights under which texts do not collapse."""
    model = build(name, seed=3 if name == "neox" else 1)
    if name in WIDENED:
        widen(model, 3)
    return model


def classes() -> Sequence[str]:
    """The first row of each class."""
    first: dict[str, str] = {}
    for name, kind, _ in ROWS:
        first.setdefault(kind, name)
    return list(first.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", classes())
def test_texts_in_bf16(name: str) -> None:
    """Trees give the text of token-by-token decoding, alone and 16 at once."""
    backend = graph_backend(wide_model(name).to("cuda", torch.bfloat16))
    config = exact_config(LookaheadConfig(), backend)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(61, (3 + 5 * i,), generator=generator).tolist() * 2 for i in range(16)]
    for sampling in (None, SAMPLING):
        expected = [outputs(backend, [prompt], PLAIN, 48, sampling)[0] for prompt in prompts]
        assert len(set(map(tuple, expected))) > 8
        assert [outputs(backend, [prompt], config, 48, sampling)[0] for prompt in prompts] == expected
        assert outputs(backend, prompts, config, 48, sampling) == expected
