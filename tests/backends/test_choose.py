"""The graph or the CPU backend where it runs the model, else the eager one, with one line that says why."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from pictures import model_of
from transformers import BertConfig, BertLMHeadModel

import lookahead
from lookahead.backends.choose import make_backend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.probe import probe
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.read import read

CpuBackend = pytest.importorskip("lookahead.backends.cpu.backend", reason="needs onnxruntime").CpuBackend


@pytest.fixture
def bert() -> Any:
    config = BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, is_decoder=True,
    )  # fmt: skip
    return BertLMHeadModel(config).eval()


def test_by_name(make_model: Any) -> None:
    model = make_model()
    assert type(make_backend(model, "eager")) is EagerBackend
    assert type(make_backend(model, "graph")) is GraphBackend
    assert type(make_backend(model, "cpu")) is CpuBackend
    assert type(make_backend(model)) is CpuBackend  # on a CPU the graph backend is there for tests only


def test_unknown_name(make_model: Any) -> None:
    with pytest.raises(ValueError, match="unknown backend 'fast'; choose from auto, cpu, eager, graph"):
        make_backend(make_model(), "fast")


def test_a_model_the_graph_backend_does_not_know(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it is an error; else the eager backend takes over and one line says so."""
    with pytest.raises(UnsupportedModelError, match=r"there is no reader for BertLMHeadModel"):
        make_backend(bert, "graph")
    lines: list[str] = []
    monkeypatch.setattr("lookahead.backends.choose.input_device", lambda model: type("Device", (), {"type": "cuda"})())
    monkeypatch.setattr("lookahead.backends.choose.graph_backend", lambda model: make_backend_fails(model))
    assert type(make_backend(bert, "auto", lines.append)) is EagerBackend
    assert len(lines) == 1
    assert "the eager backend runs it" in lines[0]


def make_backend_fails(model: Any) -> Any:
    return GraphBackend(model)


def test_a_model_the_cpu_backend_does_not_know(bert: Any, make_model: Any) -> None:
    refused = r"the cpu backend does not run this model: there is no reader for BertLMHeadModel"
    with pytest.raises(UnsupportedModelError, match=refused):
        make_backend(bert, "cpu")
    for model, why in ((bert, "no reader for BertLMHeadModel"), (make_model().to(torch.bfloat16), "are bfloat16")):
        lines: list[str] = []
        assert type(make_backend(model, "auto", lines.append)) is EagerBackend
        assert len(lines) == 1
        assert why in lines[0]
        assert lines[0].endswith("the eager backend runs it")


def test_a_model_whose_prompts_are_not_causal(tokenizer: Any) -> None:
    """PaliGemma's own forward pass has to run them, which `load` does not call: no backend runs it otherwise."""
    model = model_of("paligemma")
    with pytest.raises(UnsupportedModelError, match="cpu backend does not run this model: the tokens of its prompts"):
        make_backend(model, "cpu")
    with pytest.raises(UnsupportedModelError, match=r"the tokens of its prompts see each other; use model\.generate"):
        make_backend(model, "graph")
    lines: list[str] = []
    with pytest.raises(UnsupportedModelError, match="attention that is not causal"):
        make_backend(model, "auto", lines.append)
    assert "the tokens of its prompts see each other; the eager backend" in lines[0]
    with pytest.raises(UnsupportedModelError):
        lookahead.load((model, tokenizer))


def test_the_probe_after_a_prompt_of_the_model_itself() -> None:
    """The description is compared with the model on what follows its prompt."""
    model = model_of("paligemma2")
    described = read(model, "graph")
    for description, fits in ((described, True), (replace(described, logit_softcap=2.0), False)):
        backend = GraphBackend(model, description=description, adopts_prompts=True)
        assert not backend.capabilities.runs_prompts
        with nullcontext() if fits else pytest.raises(UnsupportedModelError, match="other logits than the tokens"):
            probe(backend)


def test_without_onnxruntime_one_line_says_what_is_missed(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lookahead.backends.cpu.backend", None)  # importing it fails
    lines: list[str] = []
    assert type(make_backend(make_model(), "auto", lines.append)) is EagerBackend
    assert len(lines) == 1
    assert "pip install 'lookahead-decoding[cpu]', with Python 3.11 or newer; the eager backend runs it" in lines[0]
    with pytest.raises(UnsupportedModelError, match="the cpu backend, which is faster, is not there"):
        make_backend(make_model(), "cpu")


def test_int8_takes_the_cpu_backend(make_model: Any, tokenizer: Any) -> None:
    model = make_model()
    lm = lookahead.load((model, tokenizer), dtype="int8", config=lookahead.LookaheadConfig())
    assert (type(lm.backend), lm.dtype, model.dtype) == (CpuBackend, torch.int8, torch.float32)
    with pytest.raises(ValueError, match="dtype='float16', device='auto': a model that is already loaded keeps"):
        lookahead.load((model, tokenizer), dtype="float16")


def test_load_takes_a_backend(make_model: Any, tokenizer: Any, settings: Any, plain: Any) -> None:
    model = make_model()
    ids = tokenizer("the quick brown fox")["input_ids"]
    expected = plain(model, ids, 24)
    for name, kind in (("graph", GraphBackend), ("cpu", CpuBackend), ("auto", CpuBackend)):
        lm = lookahead.load((model, tokenizer), config=settings, backend=name)
        assert isinstance(lm.backend, kind)
        assert lm.generate(ids, max_tokens=24).token_ids == expected
        assert [c.token_ids for c in lm.generate([ids, ids], max_tokens=24)] == [expected] * 2
