"""Bigrams: what they are, what is kept of them, and that no text depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCABULARY, tiny

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources.recycle import RecycleSource
from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.sampling import top_tokens
from lookahead.cache import cache_dir, write_arrays
from lookahead.loading import bigrams as module
from lookahead.loading.bigrams import VERSION, bigrams, prefix_of
from lookahead.serve.keys import KeyRing

PREFIX = [3, 7]


def test_the_prefix_is_a_line_break_as_the_tokenizer_begins_a_text() -> None:
    known = {"\n": [3, 7], ",": [3, 8]}
    assert prefix_of(lambda text: {"input_ids": known[text]}) == [3, 7]
    assert prefix_of(lambda text: {"input_ids": [] if text == "\n" else known[text]}) == [3, 8]
    assert prefix_of(lambda text: {"input_ids": []}) == []


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass."""
    counts: list[int] = []
    compute = module.compute

    def counted(backend: Any, prefix: Any, tokens: Any) -> Any:
        counts.append(len(tokens))
        return compute(backend, prefix, tokens)

    monkeypatch.setattr(module, "compute", counted)
    return counts


@pytest.fixture(scope="module")
def backend() -> GraphBackend:
    return GraphBackend(tiny("Llama"), kv_tokens=2048)


def test_they_are_the_models_top_tokens_after_each_token(backend: GraphBackend, tmp_path: Path) -> None:
    found = bigrams(backend, PREFIX, 20, tmp_path)
    assert found is not None
    texts = torch.tensor([[*PREFIX, token] for token in range(VOCABULARY)])
    with torch.inference_mode():
        logits = backend.model(texts).logits[:, -1]
    expected = top_tokens(logits, MAX_SUCCESSORS).numpy()
    assert found.shape == (VOCABULARY, 2 * MAX_SUCCESSORS)
    assert (found[:, :MAX_SUCCESSORS] == expected[:, :MAX_SUCCESSORS]).all()
    assert (abs(found - expected)[:, MAX_SUCCESSORS:] <= 1).all()  # a probability at the limit of two levels
    assert backend.pool.used == 0


def test_they_are_computed_once(backend: GraphBackend, tmp_path: Path, passes: list[int]) -> None:
    said: list[str] = []
    first = bigrams(backend, PREFIX, 20, tmp_path, said.append)
    assert passes == [19, 19, 19, 4]
    assert len(said) == 1
    assert said[0].startswith(f"computed the bigrams of {VOCABULARY} tokens in ")
    again = bigrams(backend, PREFIX, 20, tmp_path, said.append)
    assert passes == [19, 19, 19, 4, 19]
    assert len(said) == 1
    assert np.array_equal(first, again)


def test_a_file_serves_any_prefix(backend: GraphBackend, tmp_path: Path, passes: list[int]) -> None:
    """That of a caller without a tokenizer, or with trees of another size."""
    first = bigrams(backend, PREFIX, 20, tmp_path)
    assert np.array_equal(bigrams(backend, [9], 10, tmp_path), first)
    assert np.array_equal(bigrams(backend, [], 10, tmp_path), first)
    assert passes == [19, 19, 19, 4, 9, 9]


def test_other_weights_have_their_own(backend: GraphBackend, tmp_path: Path, passes: list[int]) -> None:
    """The file is found by the config's facts, which say nothing of the weights."""
    first = bigrams(backend, PREFIX, 20, tmp_path)
    other = bigrams(GraphBackend(tiny("Llama", seed=2), kv_tokens=2048), PREFIX, 20, tmp_path)
    assert passes == [19, 19, 19, 4, 19, 19, 19, 19, 4]  # the first of the new ones shows that the file is of others
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("damage", ["bytes", "version", "shape", "folder"])
def test_a_file_of_no_use_is_replaced(backend: GraphBackend, tmp_path: Path, passes: list[int], damage: str) -> None:
    first = bigrams(backend, PREFIX, 20, tmp_path)
    assert first is not None
    (path,) = (tmp_path / "bigrams").iterdir()
    if damage == "bytes":
        path.write_bytes(path.read_bytes()[:-30])
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        top = first[:5] if damage == "shape" else first
        version = np.array(VERSION + (damage == "version"))
        write_arrays(path, {"version": version, "prefix": np.array(PREFIX), "top": top})
    for _ in range(2):
        assert np.array_equal(bigrams(backend, PREFIX, 20, tmp_path), first)
    assert len(passes) == (12 if damage == "folder" else 9)  # a folder cannot be replaced


def test_they_are_left_out_where_they_take_too_long(backend: GraphBackend, tmp_path: Path, passes: list[int]) -> None:
    assert bigrams(backend, PREFIX, 20, tmp_path, max_seconds=1e-6) is None
    assert 0 < len(passes) < 4
    passes.clear()
    assert bigrams(backend, PREFIX, 20, tmp_path, max_seconds=0.0) is None
    assert passes == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("why", ["eager", "ranks", "one node", "no prefix"])
def test_who_has_none(backend: GraphBackend, tmp_path: Path, passes: list[int], why: str) -> None:
    """Without captured steps they would cost too much, and ranks may not rely on files."""
    asked: Any = EagerBackend(tiny("Llama")) if why == "eager" else backend
    if why == "ranks":
        asked = type("Ranks", (), {"capabilities": replace(backend.capabilities, ranks=2)})
    prefix = [] if why == "no prefix" else PREFIX
    assert bigrams(asked, prefix, 1 if why == "one node" else 20, tmp_path) is None
    assert passes == []


def test_a_loaded_model_drafts_from_them_and_its_text_is_the_same(
    model: Any,
    tokenizer: Any,
    plain: Callable[[Any, Any, int], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    lm = lookahead.load((model, tokenizer), config=LookaheadConfig(window=2, ngram=3, budget=24), backend="graph")
    assert lm.memory.bigrams is not None
    assert len(lm.memory.bigrams) == lm.backend.vocab_size
    assert list((cache_dir() / "bigrams").iterdir())
    answer = lm.generate("the fox and the dog", max_tokens=40)
    assert answer.token_ids == plain(model, lm.encode("the fox and the dog"), 40)
    drawn, expected = (
        lm.generate("the fox", max_tokens=30, temperature=0.9, seed=1, method=method).token_ids
        for method in ("lookahead", "autoregressive")
    )
    assert drawn == expected
    # They are of no request: whoever shares nothing else has them, too.
    for memory in (
        lm.memory.new(),
        *(owner.memory for owner in KeyRing(["secret-one", "secret-two"], lm.memory).owners),
    ):
        assert memory is not lm.memory
        sequence = DecodingSequence([1, 2], LookaheadConfig(recycle_scope="request"), memory=memory)
        (source,) = (source for source in sequence._sources if isinstance(source, RecycleSource))
        assert source.tables.bigrams is lm.memory.bigrams
        assert source.tables.shared is None


def test_where_they_are_known_the_default_has_no_window(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are for draft tokens then. A given config keeps its window, and a tuned profile is as it was tuned."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr("lookahead.generate.fitted_default", lambda *_: without_cost(LookaheadConfig()))
    lm = lookahead.load((model, tokenizer), backend="graph")
    assert lm.memory.bigrams is not None
    assert (lm.default_config.window, lm.default_config.budget) == (0, LookaheadConfig().budget)
    assert lookahead.load((model, tokenizer), config=LookaheadConfig(), backend="graph").default_config.window == 5
    with monkeypatch.context() as without:
        without.setattr("lookahead.generate.bigrams", lambda *_: None)
        assert lookahead.load((model, tokenizer), backend="graph").default_config.window == 5
    monkeypatch.setattr("lookahead.loading.default.profiles.find", lambda *_: LookaheadConfig(window=3, budget=40))
    assert lookahead.load((model, tokenizer), backend="graph").default_config.window == 3


def test_a_full_device_leaves_the_model_without_them(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise DeviceMemoryError("cpu is full")

    monkeypatch.setattr(module, "compute", full)
    said: list[str] = []
    lm = lookahead.load((model, tokenizer), config=LookaheadConfig(), backend="graph", log=said.append)
    assert said[-1] == "note: the model has no bigrams: cpu is full"
    assert lm.memory.bigrams is None
    assert len(lm.generate("the fox", max_tokens=3).token_ids) == 3


def test_a_config_without_recycle_needs_none(model: Any, tokenizer: Any, passes: list[int]) -> None:
    lm = lookahead.load((model, tokenizer), config=LookaheadConfig.paper(3, 4, 3), backend="graph")
    assert (lm.memory.bigrams, passes) == (None, [])
