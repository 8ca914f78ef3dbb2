"""The CPU backend: transformers' tokens in fp32, the same bits in every step, K/V in place, and int8 on its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

from marks import slow_but
from tiny import PROMPTS, VOCABULARY, greedy, outputs, random_tree, root, run, tiny

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import NO_TREE
from lookahead.backends.cpu import backend as module
from lookahead.backends.cpu import int8, invariance
from lookahead.backends.cpu.backend import CpuBackend
from lookahead.backends.cpu.cells import HOME, SPARE
from lookahead.backends.cpu.invariance import PATH, SIZES, invariant_nodes, tree_around
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.sampling import top_tokens
from lookahead.config import SamplingParams
from lookahead.loading.formats import quantised_copy
from lookahead.models.facts import UnsupportedModelError

Plain = Callable[[Any, Sequence[int], int], list[int]]
AUTOREGRESSIVE = LookaheadConfig.autoregressive()
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "one head each": ("Llama", {"num_key_value_heads": 4}),
    "one head for all": ("Llama", {"num_key_value_heads": 1}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "two kinds of layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
}


@cache
def model(name: str) -> Any:
    kind, changes = MODELS[name]
    return tiny(kind, **{"max_position_embeddings": 2048, **changes})


@cache
def backend(name: str = "llama", *, quantised: bool = False) -> CpuBackend:
    return CpuBackend(quantised_copy(model(name), "int8") if quantised else model(name), probed=False)


# Tokens


@pytest.mark.parametrize("name", slow_but(MODELS, "biases", "one head for all", "two kinds of layers"))
@pytest.mark.thinned(1, most=1)
def test_greedy_tokens_are_transformers_own(name: str, settings: LookaheadConfig, plain: Plain) -> None:
    """Alone and in a batch, with trees of more nodes than fit into the spare cells."""
    expected = [plain(model(name), p, 24) for p in PROMPTS]
    made = backend(name)
    assert outputs(made, PROMPTS, settings) == expected
    assert [outputs(made, [p], settings)[0] for p in PROMPTS] == expected
    assert outputs(made, PROMPTS[:2], LookaheadConfig(window=8, budget=128)) == expected[:2]


@pytest.mark.parametrize("count", slow_but([100, 200], 100))
def test_a_long_text_crosses_blocks_and_outgrows_the_buffer(
    count: int, settings: LookaheadConfig, plain: Plain
) -> None:
    made = CpuBackend(model("llama"), probed=False)
    prompt = [(7 * i + i // 3) % VOCABULARY for i in range(300)]
    assert outputs(made, [prompt, PROMPTS[0]], settings, count) == [
        plain(model("llama"), prompt, count),
        plain(model("llama"), PROMPTS[0], count),
    ]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("sampling", [SamplingParams(0.9, seed=3), SamplingParams(1.3, top_k=9, top_p=0.9, seed=8)])
@pytest.mark.thinned(1, most=1)
def test_seeded_sampling_equals_autoregressive(
    settings: LookaheadConfig, sampling: SamplingParams, quantised: bool
) -> None:
    made = backend(quantised=quantised)
    drawn = outputs(made, PROMPTS, settings, 24, sampling)
    assert drawn == [outputs(made, [p], AUTOREGRESSIVE, 24, sampling)[0] for p in PROMPTS]
    assert drawn != outputs(made, PROMPTS, settings)


def test_pieces_of_a_prompt_are_cached_without_a_commit(plain: Plain) -> None:
    made = backend()
    slot = made.open()
    prompt = PROMPTS[2]
    made.step([greedy(slot, prompt[:11], NO_TREE)])
    assert made.length(slot) == 11
    found = made.step([greedy(slot, prompt[11:-1], root(prompt[-1]))])[0].targets
    made.commit([(slot, ())])
    assert (found, made.length(slot)) == (plain(model("llama"), prompt, 1), len(prompt))
    made.close(slot)


def test_a_chunk_longer_than_a_pass(monkeypatch: pytest.MonkeyPatch, plain: Plain) -> None:
    made = backend()
    expected = plain(model("llama"), PROMPTS[2], 1)
    for most in (1, 8, 28, 29, 30):
        monkeypatch.setattr(module, "MOST_ROWS", most)
        slot = made.open()
        assert made.step([greedy(slot, PROMPTS[2][:-1], root(PROMPTS[2][-1]))])[0].targets == expected
        made.commit([(slot, ())])
        assert made.length(slot) == len(PROMPTS[2])
        made.close(slot)


def test_what_a_step_returns() -> None:
    """Only the needed nodes' targets, top tokens and logits, as the eager backend has them."""
    tree = random_tree(12, 5, rows=7)
    results = []
    for made in (EagerBackend(model("llama")), backend()):
        slot, other = made.open(), made.open()
        made.step([greedy(slot, PROMPTS[0], root(3)), greedy(other, PROMPTS[2], root(3))])
        made.commit([(slot, ()), (other, ())])
        results.append(made.step([greedy(slot, (), tree, 5, logits=True), greedy(other, (), root(4), 3)]))
        made.close(slot)
        made.close(other)
    for ours, theirs in zip(*results, strict=True):
        assert ours.targets == theirs.targets
        assert np.array_equal(ours.top, theirs.top)
    assert torch.allclose(results[0][0].logits, results[1][0].logits, atol=1e-3, rtol=1e-3)
    assert np.array_equal(results[1][0].top, top_tokens(results[1][0].logits, 5).numpy())
    assert (results[1][0].logits.shape, results[1][1].logits) == ((7, VOCABULARY), None)


# Slots


def test_commit_keeps_what_the_model_would_cache() -> None:
    made = CpuBackend(model("llama"), probed=False)
    slot, other = made.open(), made.open()
    chunk = [(5 * i) % VOCABULARY for i in range(HOME - 2)]  # the path crosses into the next block
    made.step([greedy(slot, chunk, root(6)), greedy(other, [9] * 9, root(2))])
    made.commit([(slot, ()), (other, ())])
    tree = TokenTree([7, 11, 12, 13, 14], [-1, 0, 0, 2, 2], [0, 1, 1, 2, 2], [0, 1, 2, 3, 4])
    made.step([greedy(slot, (), tree), greedy(other, (), tree)])
    made.commit([(other, ()), (slot, [2, 4])])
    assert (made.length(slot), made.length(other)) == (HOME + 2, 11)
    with torch.inference_mode():
        cache = model("llama")(torch.tensor([[*chunk, 6, 7, 12, 14]]), use_cache=True).past_key_values
    for ours, theirs in zip(made.cached(slot), cache.layers, strict=True):
        assert torch.allclose(ours[0], theirs.keys[0], atol=1e-4)
        assert torch.allclose(ours[1], theirs.values[0], atol=1e-4)


def test_adopted_keys_continue_as_their_own(settings: LookaheadConfig) -> None:
    """What one slot has cached goes on in another one the same, also behind shifted positions."""
    made = CpuBackend(model("llama"), probed=False)
    first, second = made.open(), made.open()
    made.step([greedy(first, PROMPTS[2], root(3))])
    made.commit([(first, ())])
    made.adopt(second, made.length(first), made.cached(first))
    tree = random_tree(9, 2)
    expected, found = made.step([greedy(first, (), tree, logits=True), greedy(second, (), tree, logits=True)])
    assert torch.equal(expected.logits, found.logits)
    made.adopt(second, made.length(first), made.cached(first), offset=(5,))
    moved = made.step([greedy(second, (), tree, logits=True)])[0]
    assert not torch.equal(expected.logits, moved.logits)


def test_closing_a_slot_leaves_the_others(plain: Plain) -> None:
    made = CpuBackend(model("llama"), probed=False)
    slots = [made.open() for _ in range(3)]
    made.step([greedy(slot, p[:-1], root(p[-1])) for slot, p in zip(slots, PROMPTS, strict=False)])
    made.commit([(slot, ()) for slot in slots])
    made.close(slots[0])
    target = plain(model("llama"), PROMPTS[2], 2)
    assert made.step([greedy(slots[2], (), root(target[0]))])[0].targets == target[1:]


# The same bits in every step


def logits(made: CpuBackend, slot: int, tree: TokenTree) -> torch.Tensor:
    return made.step([greedy(slot, (), tree, logits=True)])[0].logits


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("length", slow_but([1, 90, 95, 96, 127, 128, 129, 190, 255, 256, 999], 90, 128, 256, 999))
@pytest.mark.parametrize("name", slow_but(MODELS, "llama", "one head each", "mistral"))
@pytest.mark.thinned(1, most=2)
def test_a_row_has_the_same_bits_in_every_step(name: str, length: int, quantised: bool) -> None:
    """Paths of random trees against single steps, alone and beside a neighbour."""
    made = backend(name, quantised=quantised)
    prefix = [(11 * i + i // 7) % VOCABULARY for i in range(length)]
    slot, other = made.open(), made.open()
    made.step([greedy(slot, prefix[:-1], root(prefix[-1])), greedy(other, [3] * 40, root(2))])
    made.commit([(slot, ()), (other, ())])
    kept = made.cached(slot)
    for size in (2, 3, 7, 16, SPARE + 1):
        tree = random_tree(size, seed=length)
        made.adopt(slot, length, kept)
        alone = logits(made, slot, tree)
        beside = made.step([greedy(slot, (), tree, logits=True), greedy(other, (), random_tree(5, 1))])[0].logits
        assert torch.equal(alone, beside)
        path = [size - 1]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        for node in path:
            assert torch.equal(logits(made, slot, root(tree.tokens[node]))[0], alone[node]), (size, node)
            made.commit([(slot, ())])
    made.close(slot)
    made.close(other)


def test_the_check_passes_here_and_leaves_no_slot() -> None:
    made = CpuBackend(model("llama"))
    assert made.capabilities.exact_nodes == SPARE + 1
    assert made._index == {}


@pytest.mark.parametrize(("from_size", "most"), [(0, 1), (6, 5), (24, 16), (99, SPARE + 1)])
def test_the_check_finds_where_bits_begin_to_differ(from_size: int, most: int) -> None:
    """A kernel that rounds otherwise from some number of rows on."""

    class Rounded(CpuBackend):
        def step(self, inputs: Any) -> Any:
            results = super().step(inputs)
            if len(inputs[0].tree) >= max(2, from_size):
                for result in results:
                    result.logits = result.logits * (1 + 1e-7)
            return results

    one_layer = tiny("Llama", num_hidden_layers=1)
    assert invariant_nodes(Rounded(one_layer, probed=False)) == most


@pytest.mark.parametrize("size", SIZES)
def test_the_tree_of_the_check(size: int) -> None:
    tree, path = tree_around(list(range(SPARE + 1)), size)
    assert (len(tree), len(path)) == (size, PATH + 1)
    assert [tree.tokens[node] for node in path] == list(range(PATH + 1))
    assert [tree.parents[node] for node in path] == [-1, *path[:-1]]
    assert all(tree.depths[node] == tree.depths[parent] + 1 for node, parent in enumerate(tree.parents) if node)
    assert size < 2 * PATH or path[-1] > PATH


def test_the_budget_falls_back_to_what_is_exact(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "invariant_nodes", lambda backend: 5)
    lm = lookahead.load((model, tokenizer))
    assert (type(lm.backend), lm.default_config.budget) == (CpuBackend, 5)


# int8


@pytest.mark.parametrize("name", slow_but(MODELS, "llama", "qwen2", "qwen3"))
@pytest.mark.thinned(1, most=1)
def test_int8_has_an_exact_text_of_its_own(name: str, settings: LookaheadConfig) -> None:
    made = backend(name, quantised=True)
    expected = [outputs(made, [p], AUTOREGRESSIVE)[0] for p in PROMPTS]
    done = run(made, PROMPTS, settings)
    assert [sequence.output for sequence in done] == expected
    assert sum(sequence.stats.steps for sequence in done) < 24 * len(PROMPTS)


def test_int8_is_near_fp32() -> None:
    near, far = [], []
    for quantised in (False, True):
        made = backend(quantised=quantised)
        slot = made.open()
        near.append(made.step([greedy(slot, PROMPTS[2], root(3), logits=True)])[0].logits)
        made.close(slot)
    far = near[0][:, torch.randperm(VOCABULARY)]
    assert 0 < (near[1] - near[0]).norm() < 0.3 * (far - near[0]).norm()


@pytest.mark.parametrize("signed", [False, True])
def test_unsigned_weights_where_signed_ones_would_overflow(signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if signed and not int8.signed_products_are_exact():
        pytest.skip("this processor adds products in 16 bits")
    made = backend(quantised=True)
    monkeypatch.setattr(int8, "signed_products_are_exact", lambda: signed)
    other = CpuBackend(quantised_copy(model("llama"), "int8"), probed=False)
    found = [m.step([greedy(m.open(), PROMPTS[2], root(3), logits=True)])[0].logits for m in (made, other)]
    assert torch.equal(*found)


# Refusals


def test_a_model_in_half_precision_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its weights are bfloat16; load it with dtype='float32'"):
        CpuBackend(copy.deepcopy(model("llama")).to(torch.bfloat16))


def test_a_short_context_skips_what_does_not_fit() -> None:
    assert CpuBackend(tiny("Llama", max_position_embeddings=48)).capabilities.exact_nodes == SPARE + 1
    assert max(invariance.LENGTHS) > 48
