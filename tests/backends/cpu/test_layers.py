"""Models whose layers differ: each is lowered with its own heads, K/V heads, width, rope, window, norms and biases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

pytest.importorskip("onnxruntime")

from described import VOCABULARY, uneven_decoder
from marks import slow_but
from model_table import FIRST_ROWS, ROWS, build
from quantising import quantised
from tiny import PROMPTS, greedy, outputs, random_tree, root, tiny

from lookahead import LookaheadConfig
from lookahead.backends.cpu import lower
from lookahead.backends.cpu.backend import CpuBackend
from lookahead.backends.cpu.cells import HOME, SPARE
from lookahead.backends.cpu.groups import layer_groups
from lookahead.backends.cpu.invariance import invariant_nodes, reduced_model
from lookahead.backends.cpu.rows import BatchSequence, layout
from lookahead.models.read import read
from lookahead.models.reference import forward_tree
from lookahead.models.spec import Decoder, Rope

Plain = Callable[[Any, Sequence[int], int], list[int]]
LENGTHS = [1, 5, HOME - 1, 2 * HOME + 30]


@cache
def carrier() -> Any:
    """A model that lends a described decoder its vocabulary and context."""
    return tiny("Llama", max_position_embeddings=2048)


@cache
def backend(*, head_bias: bool = False, int8: bool = False) -> CpuBackend:
    decoder = uneven_decoder(head_bias=head_bias)
    return CpuBackend(carrier(), probed=False, description=quantised(decoder) if int8 else decoder)


def tokens(count: int) -> list[int]:
    return [(11 * i + i // 7) % VOCABULARY for i in range(count)]


def path_to(tree: Any, node: int) -> list[int]:
    """The nodes from the root's child down to this one."""
    path: list[int] = []
    while node:
        path.insert(0, node)
        node = tree.parents[node]
    return path


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).norm() <= 1e-5 * expected.norm()


# Logits


@pytest.mark.parametrize("name", slow_but([row[0] for row in ROWS], *FIRST_ROWS))
@pytest.mark.thinned(1, most=12)
def test_every_model_of_the_table(name: str) -> None:
    """A tree behind prefixes shorter and longer than the windows."""
    decoder, tree = read(build(name), "cpu"), random_tree(20, 4)
    made = CpuBackend(carrier(), probed=False, description=decoder)
    for length in (1, 70):
        slot, prefix = made.open(), tokens(length)
        found = made.step([greedy(slot, prefix, tree, logits=True)])
        assert_near(found[0].logits, forward_tree(decoder, prefix, tree.tokens, tree.parents))
        made.close(slot)


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.thinned(1, most=3)
def test_logits_are_those_of_the_description(length: int, head_bias: bool) -> None:
    """A prompt, a tree behind it beside a neighbour, and a tree behind the path that is kept of the first one."""
    made = backend(head_bias=head_bias)
    decoder, prefix = made.description, tokens(length)
    slot, other = made.open(), made.open()
    *prompt, last = prefix
    found = made.step([greedy(slot, prompt, root(last), logits=True), greedy(other, [3] * 40, root(2))])
    assert_near(found[0].logits, forward_tree(decoder, prompt, [last], [-1]))
    made.commit([(slot, ()), (other, ())])
    tree, beside = random_tree(20, length), random_tree(7, 1)
    found = made.step([greedy(slot, (), tree, logits=True), greedy(other, (), beside, logits=True)])
    assert_near(found[0].logits, forward_tree(decoder, prefix, tree.tokens, tree.parents))
    assert_near(found[1].logits, forward_tree(decoder, [3] * 40 + [2], beside.tokens, beside.parents))
    path = path_to(tree, 19)
    made.commit([(other, ()), (slot, path)])
    kept = prefix + [tree.tokens[node] for node in [0, *path]]
    found = made.step([greedy(slot, (), beside, logits=True)])
    assert_near(found[0].logits, forward_tree(decoder, kept, beside.tokens, beside.parents))
    made.close(other)
    made.close(slot)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "rope of another theta": lambda a: replace(a, rope=Rope(uneven_decoder().blocks[3].attention.rope.module, 8)),
    "no rope": lambda a: replace(a, rope=None),
    "window": lambda a: replace(a, window=9),
    "scale": lambda a: replace(a, scale=0.5),
    "q_norm": lambda a: replace(a, q_norm=uneven_decoder().blocks[2].attention.q_norm),
    "k_norm": lambda a: replace(a, k_norm=uneven_decoder().blocks[3].attention.k_norm),
    "other heads": lambda a: replace(uneven_decoder().blocks[2].attention, q_norm=None),
    "other width": lambda a: uneven_decoder().blocks[1].attention,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.thinned(1, most=4)
def test_one_layer_that_differs_in_one_way(change: str) -> None:
    """Of two layers that are alike, the second one is changed. That must show, and as the description has it."""
    whole = uneven_decoder()
    block = whole.blocks[0]
    changed = replace(block, mixer=CHANGES[change](block.attention))
    same, decoder = (replace(whole, blocks=[block, second]) for second in (block, changed))
    made = CpuBackend(carrier(), probed=False, description=decoder)
    slot, prefix, tree = made.open(), tokens(50), random_tree(12, 3)
    made.step([greedy(slot, prefix[:-1], root(prefix[-1]))])
    made.commit([(slot, ())])
    found = made.step([greedy(slot, (), tree, logits=True)])[0].logits
    expected = forward_tree(decoder, prefix, tree.tokens, tree.parents)
    assert_near(found, expected)
    assert (expected - forward_tree(same, prefix, tree.tokens, tree.parents)).norm() > 1e-2 * expected.norm()


def uneven_llama() -> Any:
    """A Llama whose second layer has other K/V heads than the first and the third."""
    model = tiny("Llama", num_hidden_layers=3)
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = 4
    torch.manual_seed(5)
    model.model.layers[1].self_attn = LlamaAttention(config, layer_idx=1).eval()
    for parameter in model.model.layers[1].self_attn.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def test_greedy_tokens_are_transformers_own(settings: LookaheadConfig, plain: Plain) -> None:
    model = uneven_llama()
    made = CpuBackend(model)  # with the probe
    expected = [plain(model, p, 24) for p in PROMPTS]
    assert [block.attention.kv_heads for block in made.description.blocks] == [2, 4, 2]
    assert outputs(made, PROMPTS, settings) == expected
    assert [outputs(made, [p], settings)[0] for p in PROMPTS] == expected
    assert made.capabilities.exact_nodes == SPARE + 1


# The same bits in every step


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.thinned(1, most=3)
def test_a_row_has_the_same_bits_in_every_step(length: int, int8: bool) -> None:
    made, prefix = backend(int8=int8), tokens(length)
    slot, other = made.open(), made.open()
    made.step([greedy(slot, prefix[:-1], root(prefix[-1])), greedy(other, [3] * 40, root(2))])
    made.commit([(slot, ()), (other, ())])
    kept = made.cached(slot)
    assert {tuple(keys.shape) for keys, _ in kept} == {(2, length, 8), (4, length, 16)}
    for size in (2, 7, SPARE + 1):
        tree = random_tree(size, seed=length)
        made.adopt(slot, length, kept)
        alone = made.step([greedy(slot, (), tree, logits=True)])[0].logits
        beside = made.step([greedy(slot, (), tree, logits=True), greedy(other, (), random_tree(5, 1))])[0].logits
        assert torch.equal(alone, beside)
        for node in [0, *path_to(tree, size - 1)]:
            single = made.step([greedy(slot, (), root(tree.tokens[node]), logits=True)])[0].logits[0]
            assert torch.equal(single, alone[node]), (size, node)
            made.commit([(slot, ())])
    made.close(slot)
    made.close(other)


def test_no_group_multiplies_a_single_row() -> None:
    """Such a product may have a kernel of its own, also if the other groups have more query heads to a K/V head."""
    groups = layer_groups(uneven_decoder())
    inputs, _, _ = layout([BatchSequence.of(greedy(0, (), root(3)), 0, 5, 0)], 1, groups)
    rows = [inputs[group.input("query")].shape[-1] for group in groups]
    assert rows == [inputs[group.input("mask")].shape[-2] for group in groups]
    assert (rows, [group.sharing for group in groups]) == ([4, 2, 6, 4, 4], [2, 1, 3, 2, 2])


def test_the_check_runs_a_layer_of_each_kind() -> None:
    """The fourth layer differs from the first in its positions and window alone, the last one in its biases."""
    decoder = uneven_decoder(head_bias=True)
    again = replace(decoder, blocks=[*decoder.blocks, *decoder.blocks])
    small = reduced_model(again)
    assert small.blocks == decoder.blocks
    assert (small.vocabulary, reduced_model(replace(decoder, blocks=[decoder.blocks[0]] * 3)).blocks) == (
        61,
        decoder.blocks[:1],
    )
    assert torch.equal(small.head.bias(), decoder.head.bias())
    assert invariant_nodes(CpuBackend(carrier(), probed=False, description=small), (1, HOME - 2)) == SPARE + 1


# What layers share


def inputs_of(decoder: Decoder) -> set[str]:
    made = CpuBackend(carrier(), probed=False, description=decoder)
    names = [value.name for value in made._session._session.get_inputs()]
    return {name for name in names if not name.startswith(("keys", "values"))}


def test_layers_share_the_inputs_in_which_they_agree() -> None:
    decoder = read(carrier(), "cpu")
    rows = {f"{kind}_4_2" for kind in ("vectors", "query", "key", "value", "cells", "answers")}
    one = {"tokens", "ones", "needed", "cosine_4_2_rope_0", "sine_4_2_rope_0", "mask_2_per_kv_full", *rows}
    assert inputs_of(decoder) == one
    first, second = decoder.blocks
    sliding = second.with_attention(window=7)
    assert inputs_of(replace(decoder, blocks=[first, sliding])) == one | {"mask_2_per_kv_window_7"}
    still = [block.with_attention(rope=None) for block in decoder.blocks]
    assert inputs_of(replace(decoder, blocks=[first, still[1]])) == one
    assert inputs_of(replace(decoder, blocks=still)) == {
        name for name in one if not name.startswith(("vectors", "cosine", "sine"))
    }


def test_groups_of_layers() -> None:
    found = layer_groups(uneven_decoder())
    assert found[0] == found[4]
    assert len(set(found)) == 4
    assert [group.rope for group in found] == [0, 1, None, 2, 0]


def test_single_matrices_share_the_models_memory() -> None:
    decoder = read(carrier(), "cpu")
    _, arrays = lower.lower(decoder)
    own = carrier().model.layers[1]
    assert np.shares_memory(arrays["1.down"], own.mlp.down_proj.weight.detach().numpy())
    assert np.shares_memory(arrays["1.mixer_norm"], own.input_layernorm.weight.detach().numpy())
    assert np.shares_memory(arrays["embedding"], carrier().model.embed_tokens.weight.detach().numpy())
