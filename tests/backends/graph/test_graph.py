"""The graph backend gives the tokens of `model.generate` for every family, batch, K, and state of its K/V pages.

On a CPU its steps run on the kernels' slow twins. Where there is CUDA, every test runs there as well, captured.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chains import chain
from marks import slow_but
from tiny import PROMPTS, VOCABULARY, greedy, outputs, random_tree, root, run, tiny
from torch import nn

from lookahead import LookaheadConfig
from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sampling import NO_DRAW, Adjustment
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import accept
from lookahead.backends.base import NO_TREE, StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph import backend as graph
from lookahead.backends.graph import kv, packet
from lookahead.backends.graph import packet as packets
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.kernels.tiles import TileSize, Tiling
from lookahead.backends.graph.kinds import ForwardKind, Sampler, TargetsKind
from lookahead.backends.graph.matrices.dense import fuse_weights
from lookahead.backends.graph.model import check_lowered
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.planner import LAZY_CAPTURE
from lookahead.backends.graph.sizes import (
    INVARIANT_NODES,
    INVARIANT_ROWS,
    MOST_NEEDED,
    PAGE,
    bucket,
    needed_bucket,
    sizes_to,
)
from lookahead.backends.graph.steps import CapturedStep
from lookahead.backends.prompts import run_prompt_chunks
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.processors import PathVerifier, Rule
from lookahead.engine.request import Request
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.read import read

Plain = Callable[[Any, Sequence[int], int], list[int]]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-odd-heads": (
        "Llama",
        {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    ),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-hybrid": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-mqa": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}),
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 128,
    },
}
SAMPLING = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
AUTOREGRESSIVE = LookaheadConfig.autoregressive()


def make(name: str, device: str = "cpu", **changes: Any) -> Any:
    kind, fields = MODELS[name]
    return tiny(kind, device=device, **{**fields, **changes})


# Parity


@pytest.mark.parametrize("name", slow_but(MODELS, "llama-odd-heads", "mistral", "qwen2-hybrid"))
@pytest.mark.thinned(1, most=1)
def test_greedy_equals_transformers(name: str, device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """Alone and in a batch, against a model that the backend has not touched."""
    model = make(name, device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    assert len({token for output in expected for token in output}) > 10  # the answers are not just a token or two
    backend = GraphBackend(make(name, device))
    assert [outputs(backend, [prompt], settings)[0] for prompt in PROMPTS] == expected
    together = run(backend, PROMPTS, settings)
    assert [sequence.output for sequence in together] == expected
    assert sum(sequence.stats.steps for sequence in together) < 24 * len(PROMPTS)  # blocks were accepted


@pytest.mark.parametrize("name", slow_but(MODELS, "qwen2-hybrid"))
@pytest.mark.slow
def test_sampling_equals_autoregressive(name: str, device: str, settings: LookaheadConfig) -> None:
    """One seed gives the same tokens one by one and by trees, on this backend and on the eager one."""
    eager = EagerBackend(make(name, device))
    expected = [outputs(eager, [prompt], AUTOREGRESSIVE, sampling=SAMPLING)[0] for prompt in PROMPTS]
    backend = GraphBackend(make(name, device))
    assert [outputs(backend, [p], AUTOREGRESSIVE, sampling=SAMPLING)[0] for p in PROMPTS] == expected
    assert outputs(backend, PROMPTS, settings, sampling=SAMPLING) == expected
    assert outputs(backend, PROMPTS, settings) != expected  # so something was drawn


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2", {"stirred": False}),
        ("qwen3", {"stirred": False}),
        ("mistral", {"sliding_window": 200}),
        ("qwen2-hybrid", {"sliding_window": 200}),
        ("qwen2-hybrid", {"max_window_layers": 0}),
    ],
)
@pytest.mark.thinned(1, most=1)
def test_what_the_families_add_matters(name: str, changes: dict[str, Any], plain: Plain) -> None:
    """Without its biases, norms of q and k, or windows a model gives other tokens: the tests above would notice."""
    with_it, without = make(name), make(name, **changes)
    assert any(plain(with_it, p, 24) != plain(without, p, 24) for p in PROMPTS)


@pytest.mark.parametrize("kind", slow_but(ROPES, "yarn", "longrope"))
@pytest.mark.thinned(1, most=1)
def test_scaled_rotary_positions(kind: str, device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """Dynamic and longrope factors depend on the furthest position that is asked for. The backend makes tables for all
    of the buffer's positions, most of them beyond the context, and must still get the factors of a short text.
    """
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    model = make("llama", device, rope_parameters=rope)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    assert outputs(GraphBackend(model), PROMPTS, settings) == expected


def test_trees_reach_past_a_full_context(device: str, plain: Plain) -> None:
    """The last steps have pages behind the context for trees larger than an invariant step's. The rotary factors there
    must be those of the context's end: the factors of a text longer than the context would change all keys.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = make("llama", device, rope_parameters=rope, max_position_embeddings=64)
    expected = plain(model, PROMPTS[2], 34)
    backend = GraphBackend(model)
    config = LookaheadConfig(window=30, ngram=8, budget=300, step_cost=None)
    (sequence,) = run(backend, [PROMPTS[2]], config, 100)
    assert sequence.output == expected
    assert max(kind.rows for kind in backend.runner.steps.pairs) > INVARIANT_NODES


def test_a_dynamic_rotary_module_that_has_seen_a_long_text(device: str, settings: LookaheadConfig) -> None:
    """It keeps the factors of a long text until it sees a short one. The backend needs those of a short one."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    expected = outputs(EagerBackend(make("llama", device, rope_parameters=rope)), PROMPTS, settings)
    model = make("llama", device, rope_parameters=rope, max_position_embeddings=256)
    with torch.inference_mode():
        model(torch.zeros(1, 600, dtype=torch.long, device=device))
    assert outputs(GraphBackend(model), PROMPTS, settings) == expected


def test_a_guess_beyond_the_context_is_harmless(device: str) -> None:
    """A node there can never be accepted, and must not change the logits of the nodes before it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = make("llama", device, rope_parameters=rope, max_position_embeddings=64)
    found = []
    for size in (20, 90):
        backend = GraphBackend(model)
        tree = TokenTree([3] * size, [*range(-1, size - 1)], [*range(size)], [0, 10, 19])
        found.append(backend.step([greedy(backend.open(), PROMPTS[2], tree, logits=True)])[0].logits.clone())
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but(range(3), 0))
def test_sequences_join_and_leave(seed: int, device: str, settings: LookaheadConfig) -> None:
    """Up to seven at once, greedy and sampled, each with its own budget. One is removed; the others stay exact.

    Pages and lines of the tables are given back and taken again.
    """
    rng = random.Random(seed)
    eager = EagerBackend(make("llama", device))
    backend = GraphBackend(make("llama", device))
    engine = Engine(backend)
    waiting = []
    for number in range(9):
        prompt = rng.choices(range(VOCABULARY), k=rng.choice([1, 3, 12, 40])) * rng.choice([1, 2])
        config = rng.choice([settings, AUTOREGRESSIVE, LookaheadConfig(window=0, budget=20), LookaheadConfig()])
        sampling = rng.choice([SamplingParams(), SamplingParams(temperature=1.0, seed=number)])
        sequence = DecodingSequence(prompt, config, sampling, StopRules(rng.choice([6, 20, 30])))
        waiting.append((max(0, number - 5) * 2, sequence))
    everyone = [sequence for _, sequence in waiting]
    dropped, step, sizes, ids = rng.choice(everyone), 0, set(), {}
    while waiting or engine.running:
        while waiting and waiting[0][0] <= step:
            sequence = waiting.pop(0)[1]
            ids[sequence] = engine.submit(Request(sequence))
        if step == 4 and dropped in ids:
            engine.cancel(ids[dropped])
        sizes.add(len(engine.running))
        engine.step()
        step += 1
    assert max(sizes) > 4
    assert_nothing_is_held(backend)
    for sequence in everyone:
        prompt, count = sequence.tokens[: sequence.prompt_tokens], sequence.rules.max_tokens
        expected = outputs(eager, [prompt], AUTOREGRESSIVE, count, sequence.sampling)[0]
        assert sequence.output == expected[: len(sequence.output)]
        assert sequence is dropped or sequence.output == expected


def assert_nothing_is_held(backend: GraphBackend) -> None:
    """All slots were closed, and freed their pages and table indices."""
    assert not len(backend.slots)
    assert backend.pool.used == 0
    assert len(set(backend.slots.free_indices)) == len(backend.slots.free_indices) == backend.kv.tables.shape[1]


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.thinned(1, most=1)
def test_invariant_or_not(invariant: bool, device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """In fp32 both give the same tokens."""
    model = make("llama", device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    backend = GraphBackend(model, invariant=invariant)
    assert outputs(backend, PROMPTS, settings) == expected
    assert outputs(backend, PROMPTS[:1], LookaheadConfig(budget=200), 24) == expected[:1]
    assert max(kind.rows for kind in backend.runner.steps.pairs) >= 192


@pytest.mark.parametrize(
    "bug", slow_but(["every earlier token is seen", "accepted K/V does not move", "no rotation"], "no rotation")
)
def test_a_planted_bug_is_seen(bug: str, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bug in the backend, the tokens differ: so the comparisons above can fail."""
    backend = GraphBackend(make("llama"))
    if bug == "every earlier token is seen":
        write_rows = Packet.write_rows

        def write_chains(packet: Packet, slots: Any, lengths: Any, chunks: Any, trees: Any, queries: Any) -> list[int]:
            chains = [
                TokenTree(tree.tokens, range(-1, tree.size - 1), tree.depths, tree.needed, tree.branch)
                for tree in trees
            ]
            return write_rows(packet, slots, lengths, chunks, chains, queries)

        monkeypatch.setattr(Packet, "write_rows", write_chains)
    elif bug == "accepted K/V does not move":
        monkeypatch.setattr(backend.runner.state.ops, "move_accepted", lambda *args: None)
    else:
        cosine, sine = backend.kv.rotary(backend.layers.blocks[0].attention.spec.rope)
        cosine, sine = torch.ones_like(cosine), torch.zeros_like(sine)
        monkeypatch.setattr(backend.kv, "rotary", lambda rope: (cosine, sine))
    prompts = [random.Random(seed).choices(range(VOCABULARY), k=20) * 2 for seed in range(8)]
    assert any(
        outputs(backend, [prompt], LookaheadConfig(window=4), 40) != [plain(backend.model, prompt, 40)]
        for prompt in prompts
    )


# Sizes of steps


def test_buckets() -> None:
    assert [bucket(k) for k in (0, 1, 2, 3, 17, 65, 128, 129, 513, 1024)] == [1, 1, 2, 4, 32, 96, 128, 192, 640, 1024]
    assert [needed_bucket(*k) for k in ((1, 0), (32, 1), (64, 64), (128, 64), (128, 65), (1024, 65), (1024, 512))] == [
        1, 32, 64, 64, 128, 512, 512,
    ]  # fmt: skip
    assert sizes_to(1) == [1]
    assert sizes_to(100) == [1, 2, 4, 8, 16, 32, 64, 96, 128]
    assert sizes_to(5000)[-1] == 1024
    with pytest.raises(ValueError, match="a step of 1025 rows; at most 1024 are captured"):
        bucket(1025)
    with pytest.raises(ValueError, match="needs 513 rows of logits; at most 512 are computed"):
        needed_bucket(1024, 513)


@pytest.mark.parametrize(
    ("chunks", "trees", "rows", "needed", "small", "within"),
    [
        ([0], [1], 1, 1, True, True),
        ([0], [16], 16, 16, True, True),
        ([0], [17], 32, 32, False, True),  # two heads share keys: 17 nodes are 34 queries
        ([0], [128], 128, 128, False, True),
        ([0], [129], 192, 192, False, True),
        ([0], [257], 384, 384, False, False),
        ([0] * 5, [16] * 5, 96, 96, True, True),
        ([0] * 5, [16, 16, 17, 1, 1], 64, 64, True, True),  # most have few rows
        ([0] * 5, [40, 40, 40, 1, 1], 128, 128, False, True),  # most have many
        ([100], [1], 128, 64, True, True),  # a short prompt
        ([300], [0], 384, 64, False, True),
        ([300, 0, 4], [0, 40, 40], 384, 384, False, True),
        ([3, 0], [1, 1], 8, 8, True, True),
    ],
)
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.thinned(1, most=8)
def test_the_kind_of_a_step(
    chunks: list[int], trees: list[int], rows: int, needed: int, small: bool, within: bool, invariant: bool
) -> None:
    """Rows of all sequences together; small tiles if most of them have few; invariant unless a tree is too large."""
    backend = GraphBackend(make("llama").to(torch.bfloat16), invariant=invariant)
    items = [
        greedy(backend.open(), [3] * chunk, random_tree(tree, 0) if tree else NO_TREE)
        for chunk, tree in zip(chunks, trees, strict=True)
    ]
    backend.step(items)
    (kind,) = backend.runner.steps.pairs
    forward = kind.forward
    size = TileSize.SMALL if small else TileSize.LARGE
    assert forward == ForwardKind(rows, needed, (Tiling(size, forward.tilings[0].grid),), invariant and within)
    assert kind.targets == TargetsKind(needed)


@pytest.mark.parametrize("count", slow_but([2, 3, 7, 16], 7))
def test_a_shared_budget_fills_the_invariant_rows(count: int, device: str, plain: Plain) -> None:
    """However many sequences there are, the trees of a step have at most 128 rows together."""
    rng, model = random.Random(3), make("llama", device)
    prompts = [rng.choices(range(VOCABULARY), k=rng.randrange(1, 30)) * 2 for _ in range(count)]
    backend, trees, launch = GraphBackend(model), list[int](), GraphBackend.launch

    def noting(inputs: Sequence[StepInput]) -> Any:
        trees.append(sum(len(item.tree) for item in inputs))
        return launch(backend, inputs)

    backend.launch = noting  # type: ignore[method-assign]
    found = outputs(backend, prompts, without_cost(LookaheadConfig()), 24)
    assert found == [plain(model, prompt, 24) for prompt in prompts]
    assert INVARIANT_ROWS // 2 < max(trees) <= INVARIANT_ROWS


@pytest.mark.parametrize("budget", slow_but([1, 2, 9, 16, 17, 33, 100, 200], 1, 17, 200))
@pytest.mark.thinned(1, most=1)
def test_every_budget(budget: int, device: str, plain: Plain) -> None:
    """Steps of many captured sizes, full ones and padded ones."""
    prompt = random.Random(5).choices(range(VOCABULARY), k=40) * 2
    config = AUTOREGRESSIVE if budget == 1 else LookaheadConfig().adapted(budget=budget)
    model = make("llama", device)
    expected = plain(model, prompt, 40)
    backend = GraphBackend(model)
    assert outputs(backend, [prompt], config, 40) == [expected]
    assert outputs(backend, [prompt, PROMPTS[1]], config, 40) == [expected, plain(model, PROMPTS[1], 40)]
    assert max(kind.rows for kind in backend.runner.steps.pairs) >= bucket(budget)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("most", slow_but([1, 8, 32], 8))
@pytest.mark.thinned(1, most=1)
def test_prompts_longer_than_a_pass(name: str, most: int, device: str, plain: Plain) -> None:
    """They run in several passes, of which the last one has the tree, too."""
    model = make(name, device)
    backend = GraphBackend(model, most_rows=most)
    config = LookaheadConfig(window=0, budget=most, guesses=1) if most > 1 else AUTOREGRESSIVE
    for length in (1, most, most + 1, 30, 70):
        prompt = random.Random(length).choices(range(VOCABULARY), k=length)
        assert outputs(backend, [prompt], config, 6) == [plain(model, prompt, 6)]
    assert max(kind.rows for kind in backend.runner.steps.pairs) == backend.most_rows == most


def test_a_step_larger_than_a_pass(device: str) -> None:
    """Several long prompts in one step: what does not fit runs before. Trees have to fit."""
    model = make("llama", device)
    rng = random.Random(1)
    chunks = [rng.choices(range(VOCABULARY), k=count) for count in (40, 3, 25, 90)]
    trees = [random_tree(size, 5) for size in (9, 4, 1, 12)]
    results, kept = [], []
    for one in (GraphBackend(model, most_rows=32), EagerBackend(model)):
        slots = [one.open() for _ in chunks]
        items = [greedy(*parts, logits=True) for parts in zip(slots, chunks, trees, strict=True)]
        results.append([result.logits for result in one.step(run_prompt_chunks(one, items))])
        one.commit([(slot, ()) for slot in slots])
        kept.append([one.cached(slot) for slot in slots])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(*kept, strict=True):
        assert_close(ours, theirs)


def test_trees_that_fit_into_no_pass(device: str) -> None:
    """They are refused before anything runs, and the backend goes on."""
    backend = GraphBackend(make("llama", device, max_position_embeddings=1024), most_rows=32)
    slots = [backend.open(), backend.open()]
    items = [greedy(slot, [1, 2, 3], random_tree(17, 0), logits=True) for slot in slots]
    with pytest.raises(ValueError, match="trees of 34 tokens do not fit into a pass of 32 rows"):
        backend.step(items)
    large = GraphBackend(backend.model)
    with pytest.raises(
        ValueError, match=f"a tree of 600 tokens is too large; a captured step has at most {MOST_NEEDED}"
    ):
        large.step([greedy(large.open(), (), random_tree(600, 0, 3))])
    with pytest.raises(ValueError, match="a step of 33 rows does not fit into a pass of 32; run long prompts with"):
        backend.step([greedy(slots[0], [1] * 32, root(1))])
    assert [backend.length(slot) for slot in slots] == [0, 0]
    assert backend.runner.steps.pairs == large.runner.steps.pairs == {}
    alone = [backend.step([item])[0].logits for item in items]
    torch.testing.assert_close(*alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("pieces", [[70, 60, 1, 5], [64, 64, 8], [1, 1, 134]])
@pytest.mark.thinned(1)
def test_a_prompt_in_pieces(name: str, pieces: list[int], device: str) -> None:
    """Chunks without a tree are cached, and there is nothing to commit. A prompt in one piece gives the same."""
    model = make(name, device)
    backend = GraphBackend(model)
    prompt, tree = random.Random(3).choices(range(VOCABULARY), k=136), random_tree(10, 1)
    whole, slot = backend.open(), backend.open()
    expected = backend.step([greedy(whole, prompt, tree, logits=True)])[0]
    done = 0
    for count in pieces:
        (nothing,) = backend.step([greedy(slot, prompt[done : done + count], NO_TREE)])
        done += count
        assert nothing.targets == []
        assert backend.length(slot) == done
    found = backend.step([greedy(slot, (), tree, logits=True)])[0]
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-4, rtol=1e-4)
    assert found.targets == expected.targets
    assert_close(backend.cached(slot), backend.cached(whole))


@pytest.mark.parametrize("name", ["llama", "qwen2-hybrid"])
@pytest.mark.thinned(1, most=1)
def test_chunks_and_trees_in_one_pass(name: str, device: str) -> None:
    """Pieces of prompts, prompts with their trees, trees and single tokens of seven sequences, as one by one."""
    model = make(name, device)
    rng = random.Random(7)
    cached = [rng.choices(range(VOCABULARY), k=count) for count in (0, 0, 63, 64, 65, 100, 3)]
    chunks = [rng.choices(range(VOCABULARY), k=count) for count in (80, 30, 20, 0, 0, 70, 0)]
    trees = [NO_TREE, random_tree(9, 1), random_tree(1, 2), random_tree(40, 3), root(4), NO_TREE, random_tree(3, 5)]
    found: list[list[StepOutput]] = []
    kept: list[list[Any]] = []
    for together in (True, False):
        backend = GraphBackend(model)
        slots = [backend.open() for _ in cached]
        for slot, text in zip(slots, cached, strict=True):
            if text:
                backend.step([greedy(slot, text, NO_TREE)])
        items = [greedy(*parts, logits=True) for parts in zip(slots, chunks, trees, strict=True)]
        found.append(backend.step(items) if together else [backend.step([item])[0] for item in items])
        backend.commit([(slot, descent(tree)) for slot, tree in zip(slots, trees, strict=True) if len(tree)])
        kept.append([backend.cached(slot) for slot in slots])
    for tree, ours, theirs in zip(trees, *found, strict=True):
        assert ours.targets == theirs.targets
        assert (ours.logits is None) == (theirs.logits is None) == (not len(tree))
        if len(tree):
            torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(*kept, strict=True):
        assert_close(ours, theirs)


def guesses(rng: random.Random, token: int, answer: Sequence[int], size: int) -> TokenTree:
    """A tree of random tokens below this one. The answer's next tokens hang somewhere between them."""
    tokens, parents, depths, right, taken = [token], [-1], [0], 0, list(answer)
    while len(tokens) < size:
        parent, guess = rng.randrange(len(tokens)), rng.randrange(VOCABULARY)
        follows = bool(taken) and rng.random() < 0.4
        if follows:
            parent, guess = right, taken.pop(0)
        if guess not in (tokens[node] for node in range(len(tokens)) if parents[node] == parent):
            right = len(tokens) if follows else right
            tokens.append(guess)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        elif follows:
            right = next(n for n in range(len(tokens)) if parents[n] == parent and tokens[n] == guess)
    return TokenTree(tokens, parents, depths, list(range(size)))


@pytest.mark.parametrize("seed", slow_but(range(12), 1))
@pytest.mark.slow
def test_random_trees_of_many_sequences(seed: int, device: str, plain: Plain) -> None:
    """8 to 16 at once join and leave, with prompts in pieces, random trees, shared beginnings, and too few pages for
    all of them. Each says what it says alone.
    """
    rng, model = random.Random(seed), make(rng_name := ["llama", "mistral"][seed % 2], device)
    beginnings = [rng.choices(range(VOCABULARY), k=count) for count in (0, 66, 130)]
    prompts = [rng.choice(beginnings) + rng.choices(range(VOCABULARY), k=rng.choice([1, 5, 40])) for _ in range(20)]
    answers = [plain(model, prompt, rng.choice([4, 12, 24])) for prompt in prompts]
    backend = GraphBackend(make(rng_name, device), kv_tokens=18 * PAGE)
    waiting, running, done = list(range(len(prompts))), dict[int, int](), dict[int, list[int]]()
    sizes, refused, shared = list[int](), 0, 0
    while waiting or running:
        while waiting and len(running) < 16 and (len(running) < 8 or rng.random() < 0.8):
            number = waiting.pop(0)
            running[number] = backend.open(prompts[number])
            done[number] = list(prompts[number])
            shared += backend.length(running[number]) > 0
        members = rng.sample(sorted(running), k=rng.randint(1, len(running)))
        items: dict[int, StepInput] = {}
        for number in members:
            slot, text = running[number], done[number]
            chunk = text[backend.length(slot) : -1]
            left = answers[number][len(text) - len(prompts[number]) :]
            tree = guesses(rng, text[-1], left, rng.choice([1, 2, 7, 20]))
            if chunk and rng.random() < 0.5:
                chunk, tree = chunk[: rng.randint(1, len(chunk))], NO_TREE
            if backend.reserve(slot, backend.length(slot) + len(chunk) + len(tree)):
                items[number] = greedy(slot, chunk, tree)
            else:
                refused += 1
        if not items:  # nobody has room: the youngest begins anew
            number = max(running)
            backend.close(running.pop(number))
            waiting.insert(0, number)
            continue
        results = backend.step(list(items.values()))
        commits = []
        for (number, item), result in zip(items.items(), results, strict=True):
            if len(item.tree):
                path, tokens = accept(item.tree, result.targets)
                commits.append((item.slot, path))
                done[number] += tokens
        backend.commit(commits)
        sizes.append(len(running))
        for number in rng.sample(sorted(items), k=1):  # others may share what it has, commits that wait included
            backend.remember(running[number], done[number][: backend.length(running[number])])
        for number in [n for n in running if len(done[n]) >= len(prompts[n]) + len(answers[n])]:
            slot = running.pop(number)
            backend.remember(slot, done[number][: backend.length(slot)])
            backend.close(slot)
    assert max(sizes) >= 12
    assert shared
    assert refused
    assert_nothing_is_held(backend)
    for number, text in done.items():
        assert text[len(prompts[number]) :][: len(answers[number])] == answers[number]


# The K/V pages


def skipping_tree(size: int, seed: int) -> tuple[TokenTree, list[int]]:
    """A tree of two chains below the root, odd nodes and even ones, and the path along the even ones.

    All K/V of that path has to move.
    """
    rng = random.Random(seed)
    tokens = [rng.randrange(VOCABULARY) for _ in range(size)]
    tree = TokenTree(tokens, [-1, 0, *range(size - 2)], [0, *((n + 1) // 2 for n in range(1, size))], [*range(size)])
    return tree, list(range(2, size, 2))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("length", slow_but([0, 50, 62, 63, 64, 65, 126, 127, 128, 129], 62, 63, 64, 128))
@pytest.mark.thinned(1, most=1)
def test_commits_across_pages(name: str, length: int, device: str) -> None:
    """A prompt that ends at a page's border, then accepted nodes that move from one page to another."""
    model = make(name, device)
    backend, eager = GraphBackend(model), EagerBackend(model)
    prompt = random.Random(length).choices(range(VOCABULARY), k=length)
    slots = {one: one.open() for one in (backend, eager)}
    others = [backend.open() for _ in range(9)]  # they take pages between those of the sequence
    crossed, total = 0, length
    for begin in range(0, length, 40):  # in pieces, so that its pages do not stand in a row
        chunk = prompt[begin : begin + 40]
        if begin + 40 < length:
            backend.step([greedy(slots[backend], chunk, NO_TREE)])
            eager.step([greedy(slots[eager], chunk[:-1], root(chunk[-1]))])
            eager.commit([(slots[eager], ())])
            backend.step([greedy(others[-1], [2] * 40, NO_TREE)])
    chunk = prompt[backend.length(slots[backend]) :]
    for step in range(8):
        tree, path = skipping_tree(13, step)
        results = [one.step([greedy(slot, chunk, tree, logits=True)])[0].logits.clone() for one, slot in slots.items()]
        torch.testing.assert_close(*results, atol=2e-4, rtol=1e-4)
        for one, slot in slots.items():
            one.commit([(slot, path)])
        crossed += any((total + node) // PAGE > (total + i) // PAGE for i, node in enumerate(path, start=1))
        total, chunk = total + 1 + len(path), []
        backend.step([greedy(others.pop(), [1], NO_TREE)])
        assert [one.length(slot) for one, slot in slots.items()] == [total, total]
    state = backend.slots[slots[backend]]
    assert crossed or length in (0, 63, 64, 65, 127, 128, 129)
    assert 0 <= len(state.tables[0].pages) - -(-(total + 6) // PAGE) <= 1  # it may have taken its next page already
    assert state.tables[0].pages != list(range(len(state.tables[0].pages))) or len(state.tables[0].pages) == 1
    assert_close(*(one.cached(slot) for one, slot in slots.items()))


def test_a_growing_sequence_copies_and_captures_nothing(device: str, plain: Plain) -> None:
    """It takes a page when it needs one. Every step is one that was captured for the first of them."""
    backend = GraphBackend(make("llama", device))
    prompt, slot = PROMPTS[0], backend.open()
    answer, steps, cache, pages = plain(backend.model, prompt, 200), None, backend.kv.caches[0], list[int]()
    text, rng, held = list(prompt), random.Random(0), backend.slots[slot].tables[0].pages
    backend.step([greedy(slot, prompt[:-1], NO_TREE)])
    while len(text) < len(prompt) + 190:
        tree = guesses(rng, text[-1], answer[len(text) - len(prompt) :], 16)
        path, tokens = accept(tree, backend.step([greedy(slot, (), tree)])[0].targets)
        backend.commit([(slot, path)])
        text += tokens
        steps = steps or dict(backend.runner.steps.pairs)
        assert backend.runner.steps.pairs == steps
        assert held[: len(pages)] == pages  # what it has stays where it is
        pages = list(held)
    assert len(pages) == 4
    assert backend.kv.caches[0] is cache
    assert text[len(prompt) :][:190] == answer[:190]


@pytest.mark.slow
def test_a_long_answer_takes_page_after_page(device: str, plain: Plain) -> None:
    model = make("llama", device, max_position_embeddings=2048)
    backend = GraphBackend(model)
    assert outputs(backend, [PROMPTS[0]], LookaheadConfig(window=0, budget=16), 700) == [plain(model, PROMPTS[0], 700)]


def test_a_new_sequence_while_commits_wait(device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """A newcomer's first step carries the commits of the others."""
    model = make("llama", device)
    expected = [plain(model, prompt, 40) for prompt in PROMPTS]
    backend = GraphBackend(model)
    engine, waited = Engine(backend), 0
    sequences = [DecodingSequence(prompt, settings, rules=StopRules(40)) for prompt in PROMPTS]

    def waiting() -> bool:
        return bool(backend.slots.pending_commits)

    for sequence in reversed(sequences):
        waited += waiting()
        engine.submit(Request(sequence))
        engine.step()
        while engine.running and not waiting():
            engine.step()
    while engine.running:
        engine.step()
    assert waited >= 2
    assert [sequence.output for sequence in sequences] == expected


@pytest.mark.parametrize("count", [1, 3])
def test_more_commits_than_the_packet_has_room_for(count: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one row has room for one commit, and here for four moves. What is more moves without a step."""
    monkeypatch.setattr(packet, "SPARE_MOVES", 3)
    model = make("llama", device)
    for size in (9, 11):
        tree, path = skipping_tree(size, 4)
        backend, eager = GraphBackend(model), EagerBackend(model)
        flushed: list[int] = []
        move = backend.runner.move

        def note(commits: Any, moves: Any, move: Any = move, to: list[int] = flushed) -> None:
            to.append(len(commits) // 2)
            move(commits, moves)

        monkeypatch.setattr(backend.runner, "move", note)
        results, kept = [], []
        for one in (backend, eager):
            slots = [one.open() for _ in range(count)]
            one.step([greedy(slot, [1 + i, 2, 3], tree) for i, slot in enumerate(slots)])
            one.commit([(slot, path) for slot in slots])
            results.append(one.step([greedy(slots[0], (), root(9), logits=True)])[0].logits)
            kept.append([one.cached(slot) for slot in slots])
        assert len(path) == {9: 4, 11: 5}[size]
        assert flushed == ([] if (count, size) == (1, 9) else [count])
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(*kept, strict=True):
            assert_close(ours, theirs)


def test_what_does_not_fit_changes_nothing(device: str) -> None:
    """Pages run out for the second input of a step, while commits wait. When room was made, all goes on."""
    model = make("llama", device)
    tree, path = skipping_tree(13, 2)
    backend, eager = GraphBackend(model, kv_tokens=4 * PAGE), EagerBackend(model)
    slots = {one: [one.open() for _ in range(3)] for one in (backend, eager)}
    for one, (first, second, third) in slots.items():
        one.step([greedy(first, [1, 2, 3], tree)])
        one.step([greedy(second, [7] * 50, tree)])
        one.commit([(first, path), (second, path)])
        one.step([greedy(third, [5] * 100, root(1))])
    assert backend.pool.used == 4
    lengths = [backend.length(slot) for slot in slots[backend]]
    for item in (greedy(slots[backend][1], [8] * 30, root(3)), greedy(slots[backend][1], [8] * 300, NO_TREE)):
        with pytest.raises(MemoryError, match=r"no pages for a sequence of .*: 4 of 4 pages are in use"):
            backend.step([greedy(slots[backend][0], [4] * 5, root(2)), item])
        assert [backend.length(slot) for slot in slots[backend]] == lengths
    assert not backend.reserve(slots[backend][1], 100)
    with pytest.raises(MemoryError):
        backend.adopt(slots[backend][1], 100, [])
    for one, own in slots.items():
        one.close(own.pop())
    assert backend.reserve(slots[backend][1], 100)
    found = [
        one.step([greedy(own[0], [4] * 5, root(2), logits=True), greedy(own[1], [8] * 30, root(3), logits=True)])
        for one, own in slots.items()
    ]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    for one, own in slots.items():
        one.commit([(slot, ()) for slot in own])
    for own in zip(*slots.values(), strict=True):
        assert_close(backend.cached(own[0]), eager.cached(own[1]))


def test_a_step_that_cannot_be_planned_takes_nothing_from_other_sequences() -> None:
    """Their accepted K/V and new pages go with the next step."""
    backend = GraphBackend(tiny("Llama"))
    tree = TokenTree([5, 6, 7, 8], [-1, 0, 0, 2], [0, 1, 1, 2], [0, 1, 2, 3])
    found = []
    for fails in (False, True):
        slot, other = backend.open(), backend.open()
        backend.step([greedy(slot, range(2, 60), tree)])
        backend.commit([(slot, [2, 3])])
        assert backend.reserve(slot, 3 * PAGE)
        if fails:
            item = greedy(other, (), root(3))
            item.adjustment = Adjustment([3], 1, mask=np.ones((2, 9), np.uint32))
            with pytest.raises(ValueError, match="zip"):
                backend.step([item])
        (output,) = backend.step([greedy(slot, range(7, 57), root(4), logits=True)])
        found.append(output.logits)
        for each in (slot, other):
            backend.close(each)
    assert torch.equal(*found)


def test_a_commit_that_waits_while_pages_run_out(device: str) -> None:
    """The refused step must not have taken the commit with it."""
    model = make("llama", device)
    tree, path = skipping_tree(13, 2)
    backend, eager = GraphBackend(model, kv_tokens=3 * PAGE), EagerBackend(model)
    slots = {one: one.open() for one in (backend, eager)}
    for one, slot in slots.items():
        one.step([greedy(slot, [1, 2, 3], tree)])
        one.commit([(slot, path)])
    with pytest.raises(MemoryError):
        backend.step([greedy(slots[backend], [4] * 300, root(1))])
    assert len(backend.slots.pending_moves[0]) == 2 * len(path)
    found = [one.step([greedy(slot, (), root(2), logits=True)])[0].logits for one, slot in slots.items()]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_what_the_pages_hold(device: str) -> None:
    """A sequence may have all pages, but no more than its line of the tables names: the context and a tree."""
    model = make("llama", device)
    backend = GraphBackend(model, kv_tokens=5 * PAGE - 10)
    assert backend.holds() == 5 * PAGE
    first, second = backend.open(), backend.open()
    assert backend.reserve(first, 4 * PAGE)
    assert backend.reserve(second, PAGE)
    assert not backend.reserve(second, PAGE + 1)
    assert backend.reserve(first, 10)  # it has more
    backend.close(first)
    assert backend.reserve(second, 5 * PAGE)
    backend.close(second)
    assert_nothing_is_held(backend)
    wide = GraphBackend(model)
    assert wide.holds() == 256 + wide.most_rows < max(wide.kv.pages) * PAGE
    slot = wide.open()
    assert wide.reserve(slot, wide.holds())
    assert not wide.reserve(slot, wide.holds() + 1)
    with pytest.raises(MemoryError, match="a sequence may have 20 of them"):
        wide.step(run_prompt_chunks(wide, [greedy(slot, [1] * wide.holds(), root(1))]))
    with pytest.raises(UnsupportedModelError, match=r"pages for 100 tokens .*at least 192"):
        GraphBackend(model, kv_tokens=100)


def test_too_many_sequences() -> None:
    backend = GraphBackend(make("llama"))
    slots = [backend.open() for _ in range(packet.MOST_SEQUENCES)]
    with pytest.raises(RuntimeError, match="256 sequences are open"):
        backend.open()
    found = backend.step([greedy(slot, (), root(slot % VOCABULARY)) for slot in slots])
    assert [result.targets for result in found[:61]] == [result.targets for result in found[61:122]]
    backend.close(slots.pop())
    backend.open()


def test_room_is_made_while_nobody_is_there(device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """Larger pages replace these, and the captured steps, which hold their address, go with them."""
    model = make("llama", device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    backend = GraphBackend(model, kv_tokens=6 * PAGE)
    assert outputs(backend, PROMPTS[:1], settings) == expected[:1]
    cache, steps = backend.kv.caches[0], dict(backend.runner.steps.pairs)
    backend.check_room(1, 6 * PAGE - INVARIANT_NODES)
    assert backend.kv.caches[0] is cache
    assert backend.runner.steps.pairs == steps
    slot = backend.open()
    with pytest.raises(UnsupportedModelError, match="pages hold 384 tokens and are in use"):
        backend.check_room(4, 100)
    backend.close(slot)
    backend.check_room(4, 100)
    assert sum(backend.kv.pages) == backend.pool.pages == 4 * 6
    assert backend.runner.steps.pairs == {}
    assert outputs(backend, PROMPTS, settings) == expected
    steps, cache = dict(backend.runner.steps.pairs), backend.kv.caches[0]
    backend.check_room(3, 100)
    backend.check_room(1, 800)  # more than the context: some models can go on
    assert backend.kv.caches[0] is cache
    backend.check_room(1, 2000)
    assert backend.holds() >= 2000 + INVARIANT_NODES
    again = backend.kv.caches[0]
    backend.check_room(1, 2000)
    assert backend.kv.caches[0] is again
    assert outputs(backend, PROMPTS, settings) == expected


def test_room_that_cannot_be_made(
    device: str, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, and goes on with the pages it had."""
    model = make("llama", device)
    backend = GraphBackend(model, kv_tokens=8 * PAGE)
    slot = backend.open()
    backend.step([greedy(slot, [3] * 200, NO_TREE)])
    backend.remember(slot, [3] * 200)
    backend.close(slot)
    monkeypatch.setattr(kv, "free_bytes", lambda _: 100 * 2 * 2 * 2 * PAGE * 8 * 4)
    with pytest.raises(UnsupportedModelError, match=r"pages for 65\d\d\d tokens need .* GiB are free"):
        backend.check_room(10, 6300)
    assert sum(backend.kv.pages) == backend.pool.pages == 8
    assert backend.length(backend.open([3] * 200)) == 0  # the new pages are empty
    assert outputs(backend, PROMPTS[:2], settings) == [plain(model, prompt, 24) for prompt in PROMPTS[:2]]


def test_made_in_inference_mode(settings: LookaheadConfig, plain: Plain) -> None:
    """Its tensors are then inference tensors, and must still be written outside of that mode."""
    model = make("llama")
    expected = [plain(model, prompt, 6) for prompt in PROMPTS]
    with torch.inference_mode():
        backend = GraphBackend(model)
    assert outputs(backend, PROMPTS, settings, 6) == expected


# Shared beginnings


def contents(backend: GraphBackend, pages: Sequence[int]) -> torch.Tensor:
    """A copy of what is in these pages."""
    return backend.kv.caches[0][:, :, [page + 1 for page in pages]].clone()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_shared_beginning(name: str, device: str) -> None:
    """A later sequence gets the full pages of an earlier one, open or closed, and never writes to them."""
    model = make(name, device)
    backend, eager = GraphBackend(model), EagerBackend(model)
    rng = random.Random(0)
    text = rng.choices(range(VOCABULARY), k=150)
    tree, path = skipping_tree(13, 1)
    first = backend.open(text)
    assert backend.length(first) == 0
    backend.step([greedy(first, text, tree)])
    backend.commit([(first, path)])  # it waits, and the page it is in is not full
    whole = [*text, tree.tokens[0], *(tree.tokens[node] for node in path)]
    backend.remember(first, whole)
    full = backend.slots[first].tables[0].pages[:2]
    before = contents(backend, full)

    def check(slot: int, prompt: Sequence[int]) -> None:
        """The rest of the prompt and a tree, as on the eager backend, and a commit, without a change to the pages."""
        other = eager.open()
        found = backend.step([greedy(slot, prompt[backend.length(slot) :], tree, logits=True)])[0].logits
        expected = eager.step([greedy(other, prompt, tree, logits=True)])[0].logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        for one, own in ((backend, slot), (eager, other)):
            one.commit([(own, path)])
        assert_close(backend.cached(slot), eager.cached(other))
        assert torch.equal(contents(backend, full), before)
        eager.close(other)

    same, different = backend.open(text), backend.open([*text[:130], *([1] * 40)])
    assert [backend.length(slot) for slot in (same, different)] == [128, 128]
    assert backend.slots[same].tables[0].pages[-1] == backend.slots[first].tables[0].pages[1]
    check(same, text)
    check(different, [*text[:130], *([1] * 40)])
    # The last token of a prompt has to run, and a page is shared whole or not at all.
    for size, length in ((65, 64), (64, 0), (128, 64), (129, 128)):
        slot = backend.open(text[:size])
        assert backend.length(slot) == length
        backend.close(slot)
    other = [*text[:70], (text[70] + 1) % VOCABULARY, *text[71:]]
    slot = backend.open(other)
    assert backend.length(slot) == 64
    backend.close(slot)
    for slot in (first, same, different):
        backend.close(slot)
    assert_nothing_is_held(backend)
    late = backend.open(text)
    assert backend.length(late) == 128
    check(late, text)


def test_another_salt_shares_nothing(device: str) -> None:
    backend = GraphBackend(make("llama", device))
    text = random.Random(0).choices(range(VOCABULARY), k=150)
    slot = backend.open(text, "mine")
    backend.step([greedy(slot, text, NO_TREE)])
    backend.remember(slot, text)
    assert [backend.length(backend.open(text, salt)) for salt in ("mine", "yours", "")] == [128, 0, 0]


def test_pages_are_remembered_as_a_text_grows(device: str) -> None:
    """In pieces, and with a commit that waits: its K/V moves before the page is shared."""
    model = make("llama", device)
    backend, eager = GraphBackend(model), EagerBackend(model)
    text = random.Random(0).choices(range(VOCABULARY), k=60)
    tree, path = skipping_tree(21, 3)
    slot = backend.open()
    backend.step([greedy(slot, text, tree)])
    backend.commit([(slot, path)])
    text += [tree.tokens[0], *(tree.tokens[node] for node in path)]
    assert backend.slots.pending_commits
    backend.remember(slot, text)
    shared = backend.open([*text, 1, 2])
    assert backend.length(shared) == 64
    with torch.inference_mode():
        ids = torch.tensor([text[:64]], device=device)
        layers = eager.model(ids, use_cache=True).past_key_values.layers
    assert_close(backend.cached(shared), [(layer.keys[0], layer.values[0]) for layer in layers])
    backend.step([greedy(slot, [5] * 70, NO_TREE)])
    backend.remember(slot, [*text, *[5] * 70])
    assert backend.length(backend.open([*text, *[5] * 70])) == 128


def test_shared_pages_leave_when_room_is_needed(device: str) -> None:
    """Nobody uses them, so a new sequence may have them. What it writes there is then no longer shared."""
    backend = GraphBackend(make("llama", device), kv_tokens=3 * PAGE)
    text = random.Random(0).choices(range(VOCABULARY), k=180)
    slot = backend.open(text)
    backend.step([greedy(slot, text, NO_TREE)])
    backend.remember(slot, text)
    backend.close(slot)
    slot = backend.open()
    backend.step([greedy(slot, [5] * 128, NO_TREE)])
    assert backend.pool.evictable == 1
    backend.close(slot)
    assert backend.length(backend.open(text)) == 64


def test_adopting_does_not_write_to_shared_pages(device: str) -> None:
    """A slot that has some gets others when it adopts K/V from elsewhere."""
    model = make("llama", device)
    backend, eager = GraphBackend(model), EagerBackend(model)
    text = random.Random(0).choices(range(VOCABULARY), k=150)
    first = backend.open(text)
    backend.step([greedy(first, text, NO_TREE)])
    backend.remember(first, text)
    full, second, other = backend.slots[first].tables[0].pages[:3], backend.open(text), eager.open()
    before = contents(backend, full)
    backend.step([greedy(second, text[128:], NO_TREE)])
    layers = [tuple(torch.randn(2, 140, 8, device=device) for _ in range(2)) for _ in range(2)]
    found = []
    for one, slot in ((backend, second), (eager, other)):
        one.adopt(slot, 140, layers)
        found.append(one.step([greedy(slot, (), root(3), logits=True)])[0].logits)
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)
    assert torch.equal(contents(backend, full), before)


def test_adopting_a_window_into_used_pages(device: str) -> None:
    """A sliding window's layers come without the tokens out of sight. What the pages held before must not spread."""
    model = make("mistral", device)
    backend, eager = GraphBackend(model), EagerBackend(model)
    with torch.inference_mode():
        backend.kv.caches[0].fill_(float("nan"))
    layers = [tuple(torch.randn(2, 7, 8, device=device) for _ in range(2)) for _ in range(2)]
    found = []
    for one in (backend, eager):
        slot = one.open()
        one.adopt(slot, 100, layers)
        found.append(one.step([greedy(slot, (), random_tree(9, 0), logits=True)])[0].logits)
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)


def test_a_closed_slot_leaves_nothing(device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """A slot is closed while its commit waits. All K/V is then set to NaN, which would spread if anything read it."""
    model = make("mistral", device)
    backend = GraphBackend(model)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    slot = backend.open()
    tree, path = skipping_tree(20, 2)
    backend.step([greedy(slot, PROMPTS[2], tree)])
    backend.commit([(slot, path)])
    state = backend.slots[slot]
    assert backend.slots.pending_commits
    assert len(state.tables[0].pages) > 0
    pages, index = list(state.tables[0].pages), state.table_index
    backend.close(slot)
    assert_nothing_is_held(backend)
    with torch.inference_mode():
        backend.kv.caches[0].fill_(float("nan"))

    second = backend.open()
    assert (backend.slots[second].table_index, backend.length(second)) == (index, 0)
    fresh = GraphBackend(make("mistral", device))
    found, wanted = (
        one.step([greedy(s, [8, 9], root(3), logits=True)])[0] for one, s in ((backend, second), (fresh, fresh.open()))
    )
    assert torch.equal(found.logits, wanted.logits)
    assert set(backend.slots[second].tables[0].pages) <= set(pages)
    backend.close(second)
    assert outputs(backend, [*PROMPTS[:3]], settings) == expected[:3]
    assert [outputs(backend, [prompt], settings)[0] for prompt in PROMPTS] == expected


def test_slots_in_any_order(device: str) -> None:
    """A step's inputs may come in any order of their lines in the tables, with gaps between them."""
    model = make("llama", device)
    backend = GraphBackend(model)
    slots = [backend.open() for _ in range(5)]
    alone = []
    for slot, prompt in zip(slots, [*PROMPTS, [1, 2]], strict=True):
        alone += backend.step([greedy(slot, prompt, random_tree(9, slot), logits=True)])
        alone[-1].logits = alone[-1].logits.clone()
    backend.close(slots[1])
    order = [4, 0, 3]
    together = backend.step([greedy(slots[i], (), random_tree(9, slots[i]), logits=True) for i in order])
    for found, i in zip(together, order, strict=True):
        assert found.targets == alone[i].targets
        assert torch.allclose(found.logits, alone[i].logits, atol=1e-4)


def assert_close(
    found: Sequence[tuple[torch.Tensor, torch.Tensor]], expected: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Equal K/V of all layers. Where one has only the tokens of a window, at least a page of them are compared."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            count = min(a.shape[1], b.shape[1])
            assert count >= min(PAGE // 2, max(a.shape[1], b.shape[1]))
            torch.testing.assert_close(a[:, -count:], b[:, -count:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.thinned(1, most=1)
def test_cached_and_adopt(name: str, device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """The cached K/V, with a waiting commit, is the eager backend's, and both backends can continue from it."""
    model = make(name, device)
    backend, eager = GraphBackend(model), EagerBackend(make(name, device))
    tree = random_tree(20, 1)
    path = [node for node in range(1, 20) if tree.parents[node] == 0][-1:]
    path += [node for node in range(1, 20) if tree.parents[node] == path[0]][-1:]
    assert path[0] > 1  # so the commit moves something
    slots = []
    for one in (backend, eager):
        one.open()  # another sequence before it
        slots.append(one.open())
        one.step([greedy(slots[-1], PROMPTS[2], tree)])
        one.commit([(slots[-1], path)])
    slot = slots[0]
    assert backend.slots.pending_commits
    ours, theirs = backend.cached(slot), eager.cached(slots[1])
    assert ours[0][0].shape == (model.config.num_key_value_heads, 31 + len(path), backend.layers.shapes[0].dim)
    assert_close(ours, theirs)
    assert_close(backend.cached(slot), ours)  # reading it moved nothing a second time
    text = [*PROMPTS[2], tree.tokens[0], *(tree.tokens[node] for node in path)]
    next_root = 17
    expected = plain(model, [*text, next_root], 20)
    layers = [tuple(part[:, -7:] for part in layer) if name == "mistral" else layer for layer in theirs]

    for one, given in ((backend, layers), (eager, ours)):
        adopted = one.open()
        one.adopt(adopted, len(text), given)
        assert one.length(adopted) == len(text)
        sequence = DecodingSequence([*text, next_root], settings, rules=StopRules(20))
        engine = Engine(one)
        engine.submit(Request(sequence, slot=adopted))
        while engine.running:
            engine.step()
        assert sequence.output == expected
    # `cached` gave copies: what has run since did not change them.
    assert_close(ours, theirs)
    sequence = DecodingSequence([*text, next_root], settings, rules=StopRules(20))
    engine = Engine(backend)
    engine.submit(Request(sequence, slot=slot))
    while engine.running:
        engine.step()
    assert sequence.output == expected


def test_the_cache_is_whole_when_a_sequence_leaves(device: str, settings: LookaheadConfig) -> None:
    """`finished` reads a sequence's K/V while its last commit, and those of the others, have not moved yet."""
    model = make("llama", device)
    kept: dict[DecodingSequence, Any] = {}
    backend = GraphBackend(model)
    engine = Engine(backend)

    def keep(request: Request) -> None:
        kept[request.sequence] = backend.cached(request.slot)

    sequences = [DecodingSequence(prompt, settings, rules=StopRules(9 + 4 * i)) for i, prompt in enumerate(PROMPTS)]
    for sequence in sequences:
        engine.submit(Request(sequence, finished=keep))
    while engine.running:
        engine.step()
    for sequence in sequences:
        ids = torch.tensor([sequence.tokens[:-1]], device=device)
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values
        assert_close(kept[sequence], [(layer.keys[0], layer.values[0]) for layer in cache.layers])


# Weights


def storages(*tensors: torch.Tensor) -> dict[int, int]:
    """Address -> bytes of every piece of memory behind these tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    start, size = whole.data_ptr(), whole.numel() * whole.element_size()
    return start <= part.data_ptr() and part.data_ptr() + part.numel() * part.element_size() <= start + size


def held(backend: GraphBackend) -> list[torch.Tensor]:
    """The model's parameters and all that the backend calls its weights."""
    return [*backend.model.parameters(), *backend.layers._tensors()]


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "qwen2", "qwen3"])
@pytest.mark.thinned(1, most=2)
def test_weights_are_held_once(name: str, device: str, plain: Plain) -> None:
    """The model's matrices are views of the fused ones, with the same numbers, and it gives the same output."""
    model = make(name, device)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = sum(storages(*model.parameters()).values())
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    backend = GraphBackend(model)
    for block, lowered in zip(model.model.layers, backend.layers.blocks, strict=True):
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv, out = lowered.attention.qkv, lowered.attention.out
        assert all(inside(p.weight, qkv.weight) for p in projections)
        assert qkv.bias is None or all(inside(p.bias, qkv.bias) for p in projections)
        assert all(inside(p.weight, lowered.feed_forward.gate_up.weight) for p in (mlp.gate_proj, mlp.up_proj))
        assert torch.equal(torch.cat([p.weight for p in projections]), qkv.weight)
        assert out.weight.data_ptr() == attention.o_proj.weight.data_ptr()
    assert sum(storages(*model.parameters()).values()) == before
    assert sum(storages(*held(backend)).values()) == before
    assert [plain(model, prompt, 24) for prompt in PROMPTS] == expected
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert name != "llama-tied-mha" or model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_second_backend_shares_the_weights_of_the_first(device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """One backend with and one without `invariant` hold the model once."""
    model = make("llama", device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    backends = [GraphBackend(model, invariant=invariant) for invariant in (True, False)]
    for backend in backends:
        assert outputs(backend, PROMPTS, settings) == expected
    assert backends[0].layers.addresses() == backends[1].layers.addresses()


def test_a_model_can_be_saved_afterwards(tmp_path: Path, plain: Plain) -> None:
    """Its matrices share memory now, and code that writes checkpoints treats shared memory specially."""
    model = make("qwen2")
    expected = plain(model, PROMPTS[0], 24)
    for block in read(model, "graph").blocks:
        fuse_weights(block.attention.qkv)
        fuse_weights(block.feed_forward.gate_up)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert plain(again, PROMPTS[0], 24) == expected


# Refusals


def broken(reason: str) -> Any:
    """A model that the backend must not run."""
    torch.manual_seed(0)
    if reason == "family":
        return transformers.BertLMHeadModel(
            transformers.BertConfig(
                vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
            )
        )
    model = make("llama")
    attention = model.model.layers[1].self_attn
    if reason == "subclass":
        attention.v_proj = Adapted(32, 16, bias=False)
    elif reason == "packed":
        attention.v_proj = WQLinear_GEMM(attention.v_proj)
    elif reason == "offloaded":
        attention._hf_hook = object()
    elif reason == "watched":
        attention.register_forward_hook(lambda module, inputs, output: None)
    elif reason == "quantised":
        quantization = pytest.importorskip("torchao", minversion="0.18").quantization
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    elif reason == "split":
        model._tp_size = 2
    elif reason == "dtypes":
        model.model.norm.to(torch.bfloat16)
    return model


class Adapted(nn.Linear):
    """A subclass of a plain matrix, as adapters use it."""


class WQLinear_GEMM(nn.Module):
    """AWQ's name for a layer with packed weights, which it keeps in buffers."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("qweight", of.weight.detach().clone())
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qweight)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("family", r"there is no reader for BertLMHeadModel"),
        ("subclass", r"Adapted is no plain matrix"),
        ("packed", r"WQLinear_GEMM is no plain matrix"),
        ("offloaded", r"it is spread over devices"),
        ("watched", r"hook"),
        ("quantised", r"its weights are quantised"),
        ("split", r"split between processes"),
        ("dtypes", r"its weights have several dtypes"),
    ],
)
def test_refuses(reason: str, message: str) -> None:
    """It says why, and leaves the model's weights as they are."""
    model = broken(reason)
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=rf"^the graph backend does not run this model: .*({message})"):
        GraphBackend(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights


@pytest.mark.parametrize("name", MODELS)
def test_does_not_refuse(name: str) -> None:
    check_lowered(read(make(name), "graph"))


@pytest.mark.slow
@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"mlp_bias": True}])
@pytest.mark.thinned(1, most=1)
def test_biases_and_other_activations(
    changes: dict[str, Any], head_bias: bool, device: str, settings: LookaheadConfig, plain: Plain
) -> None:
    model = make("llama", device, **changes)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    if head_bias:
        model.lm_head = nn.Linear(32, VOCABULARY, bias=True, device=device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    assert outputs(GraphBackend(model), PROMPTS, settings) == expected


def test_hooks_of_transformers_own_are_no_reason(settings: LookaheadConfig, plain: Plain) -> None:
    """Asking a model for hidden states leaves hooks in it, which only record what passes."""
    model = make("llama")
    expected = plain(model, PROMPTS[0], 24)
    with torch.inference_mode():
        model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert outputs(GraphBackend(model), [PROMPTS[0]], settings) == [expected]


def test_what_no_backend_runs_is_refused_first() -> None:
    """An attention that takes no 4-D mask is refused by every backend, so the reason given is the general one."""
    model = make("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"cannot be decoded exactly: attention 'flash_attention_2'"):
        GraphBackend(model)


# Results


def tops(result: StepOutput) -> list[tuple[int, ...]]:
    """The top tokens and their levels as tuples; nothing where nobody asked."""
    return [] if result.top is None else [tuple(line) for line in result.top.tolist()]


def assert_same_results(found: StepOutput, expected: StepOutput, top: int) -> None:
    """Logits, targets and top tokens agree; top tokens up to ties in the expected logits, levels within one."""
    logits = expected.logits
    assert len(found.targets) == len(expected.targets) == len(logits)
    torch.testing.assert_close(found.logits, logits, atol=2e-4, rtol=1e-4)
    assert found.targets == expected.targets
    assert len(tops(found)) == len(tops(expected)) == (len(logits) if top else 0)
    for row, ours, theirs in zip(logits if top else (), tops(found), tops(expected), strict=True):
        assert len(ours) == len(theirs) == 2 * top
        values = row[list(theirs[:top])]
        assert torch.allclose(row[list(ours[:top])], values, atol=1e-4)
        gaps = (values[:-1] - values[1:]).tolist()
        assert ours[:top] == theirs[:top] or min(gaps) < 1e-4
        assert len(set(ours[:top])) == top
        assert max(abs(a - b) for a, b in zip(ours[top:], theirs[top:], strict=True)) <= 1


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("size", [1, 2, 16, 33, 130, 512])
@pytest.mark.thinned(1, most=1)
def test_results_equal_the_eager_backends(name: str, size: int, device: str) -> None:
    """One tree behind a prompt: logits, targets, the likeliest tokens and their levels."""
    model = make(name, device, max_position_embeddings=1024)
    tree = random_tree(size, 3)
    found, expected = (
        one.step([greedy(one.open(), PROMPTS[2], tree, 8, logits=True)])[0]
        for one in (GraphBackend(model), EagerBackend(model))
    )
    assert_same_results(found, expected, 8)


def test_results_of_a_ragged_batch(device: str) -> None:
    """Trees of four sizes, not all nodes needed; one sequence is sampled, one asks for no top tokens."""
    model = make("qwen2", device)
    trees = [random_tree(size, size, rows) for size, rows in ((1, 1), (40, 7), (12, 12), (5, 2))]
    uniforms = [0.3, NO_DRAW, *[0.05 * i for i in range(10)]]
    results = []
    for one in (GraphBackend(model), EagerBackend(model)):
        items = [
            greedy(one.open(), prompt, tree, top, logits=True)
            for prompt, tree, top in zip(PROMPTS, trees, (8, 8, 0, 8), strict=True)
        ]
        items[2] = StepInput(items[2].slot, PROMPTS[2], trees[2], SAMPLING, uniforms, 0, logits=True)
        results.append(one.step(items))
    for found, expected, top in zip(*results, (8, 8, 0, 8), strict=True):
        assert_same_results(found, expected, top)


@pytest.mark.parametrize("kind", [EagerBackend, GraphBackend])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.thinned(1, most=2)
def test_chunks_behind_cached_tokens(kind: Any, name: str, device: str) -> None:
    """Sequences of a batch have no chunk, a short one and a long one. Afterwards all K/V stands where it belongs:

    a further step without chunks gives the logits of the whole text.
    """
    model = make(name, device)
    backend = kind(model)
    rng = random.Random(0)
    chunks = [[rng.randrange(VOCABULARY) for _ in range(count)] for count in (0, 3, 32, 70)]
    trees = [random_tree(size, size) for size in (12, 5, 20, 7)]
    paths = [descent(tree) for tree in trees]
    slots = [backend.open() for _ in PROMPTS]
    texts = [[*prompt, 9] for prompt in PROMPTS]
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        backend.step([greedy(slot, prompt, root(9))])
        backend.commit([(slot, ())])
    backend.step([greedy(*parts) for parts in zip(slots, chunks, trees, strict=True)])
    backend.commit(list(zip(slots, paths, strict=True)))
    for text, chunk, tree, path in zip(texts, chunks, trees, paths, strict=True):
        text += [*chunk, tree.tokens[0], *(tree.tokens[node] for node in path)]
    assert [backend.length(slot) for slot in slots] == list(map(len, texts))
    if kind is GraphBackend:  # all in one pass
        assert max(step.rows for step in backend.runner.steps.pairs) == bucket(sum(map(len, (*chunks, *trees))))
    found = backend.step([greedy(slot, (), root(2), logits=True) for slot in slots])
    for text, result in zip(texts, found, strict=True):
        ids = torch.tensor([[*text, 2]], device=device)
        with torch.inference_mode():
            expected = model(input_ids=ids).logits[0, -1]
        torch.testing.assert_close(result.logits[0], expected, rtol=1e-3, atol=1e-3)


def descent(tree: TokenTree) -> list[int]:
    """From the root, the last child and its last child and so on."""
    path: list[int] = []
    node = 0
    while node in tree.parents[node + 1 :]:
        node = max(child for child, parent in enumerate(tree.parents) if parent == node)
        path.append(node)
    return path


def test_as_many_of_the_likeliest_as_asked_for(device: str) -> None:
    model = make("llama", device)
    found, expected = (
        one.step([greedy(one.open(), PROMPTS[0], random_tree(6, 0), 3, logits=True)])[0]
        for one in (GraphBackend(model), EagerBackend(model))
    )
    assert_same_results(found, expected, 3)


def test_a_vocabulary_smaller_than_the_top(device: str, plain: Plain) -> None:
    model = make("llama", device, vocab_size=6)
    prompt = [1, 5, 2, 1, 5, 2, 1]
    expected = plain(model, prompt, 24)
    assert outputs(GraphBackend(model), [prompt], LookaheadConfig()) == [expected]


def test_logits_stay_their_readers(device: str) -> None:
    """Logits that were handed out stay as they are when another sequence's step reuses the captured step's memory."""
    backend = GraphBackend(make("llama", device))
    slots = [backend.open(), backend.open()]
    first = backend.step([greedy(slots[0], PROMPTS[0], root(3), logits=True)])[0].logits
    copied = first.clone()
    second = backend.step([greedy(slots[1], PROMPTS[2], root(4), logits=True)])[0].logits
    assert not torch.allclose(copied, second)
    assert torch.equal(first, copied)


def test_a_verifier_sees_every_newcomers_logits(device: str, settings: LookaheadConfig) -> None:
    """New sequences take their first steps one by one; a logits processor (here it halves) sees them together."""
    expected = [outputs(EagerBackend(make("llama", device)), [prompt], settings)[0] for prompt in PROMPTS]
    backend = GraphBackend(make("llama", device))
    sequences = [DecodingSequence(prompt, settings, rules=StopRules(24)) for prompt in PROMPTS]
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in PROMPTS], device=device)
    engine = Engine(backend)
    verifier = PathVerifier(sequences, ids, Rule(processors=lambda ids, scores: scores / 2, pad=0))
    for sequence in sequences:
        engine.submit(Request(sequence, verifier))
    while engine.running:
        engine.step()
    assert [sequence.output for sequence in sequences] == expected


def test_launch_and_collect_apart(device: str) -> None:
    """Between the two, the host may change what it passed in. `step` is both in one."""
    model = make("llama", device)
    backend = GraphBackend(model)
    tree = random_tree(20, 5)
    slots = [backend.open(), backend.open()]
    launched = backend.launch([greedy(slots[0], PROMPTS[0], tree, 8)])
    for node in range(20):
        tree.tokens[node] = 0  # no harm: the packet is written
    found = backend.collect(launched)[0]
    again = backend.step([greedy(slots[1], PROMPTS[0], random_tree(20, 5), 8)])[0]
    assert (found.targets, tops(found)) == (again.targets, tops(again))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_trees_are_made_ready_while_the_device_runs(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What verification needs of a tree is computed after the launch and before the wait for the device."""
    backend = GraphBackend(make("llama", "cpu"))
    launch, collect, told = backend.launch, backend.collect, list[tuple[str, bool]]()

    def note(when: str, inputs: Any) -> None:
        told.extend((when, (item.tree._packed or item.tree._draft_children) is not None) for item in inputs)

    def noted_launch(inputs: Any) -> Any:
        note("launch", inputs)
        launched = launch(inputs)
        note("launched", inputs)
        backend.collect = lambda launched: (note("collect", inputs), collect(launched))[1]  # type: ignore[method-assign]
        return launched

    monkeypatch.setattr(backend, "launch", noted_launch)
    sequences = [
        DecodingSequence(prompt, None, SamplingParams(temperature=temperature, seed=1), StopRules(max_tokens=12))
        for prompt in PROMPTS[:2]
    ]
    engine = Engine(backend)
    for sequence in sequences:
        engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    assert set(told) == {("launch", False), ("launched", False), ("collect", True)}


def test_outputs_are_freed_at_once() -> None:
    """Not when the garbage collector comes: the logits of a request with a verifier are on the device."""
    backend = GraphBackend(make("llama", "cpu"))
    tree = TokenTree([3, 4], [-1, 0], [0, 1], [0, 1])
    outputs = backend.step([StepInput(backend.open(), [5, 6], tree, SamplingParams(), (), 8, logits=True)])
    assert (len(outputs[0].targets), np.asarray(outputs[0].top).shape) == (2, (2, 16))
    logits = weakref.ref(outputs[0].logits)
    gc.collect()
    gc.disable()
    try:
        del outputs
        assert logits() is None
    finally:
        gc.enable()


def note_tables(backend: GraphBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of how many changes of page tables each launch apart from the steps has brought, from now on."""
    launches, write_tables = list[int](), backend.kv.write_tables

    def note(changes: Sequence[int]) -> None:
        launches.append(len(changes) // 2)
        write_tables(changes)

    monkeypatch.setattr(backend.kv, "write_tables", note)
    return launches


def test_pages_come_with_the_packet(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a step ahead, which has no packet, needs a launch of its own for a new page."""
    backend, changed, run = GraphBackend(make("llama", device), kv_tokens=2048), list[int](), CapturedStep.run
    launches = note_tables(backend, monkeypatch)

    def note_run(step: CapturedStep) -> None:
        changed.append(int(step.packet.forward.fields["changed"][0]))
        run(step)

    monkeypatch.setattr(CapturedStep, "run", note_run)
    outputs(backend, PROMPTS[:2], LookaheadConfig(budget=16, window=0), 150)
    assert launches == []
    assert sum(changed) >= 2 * (150 // PAGE)
    assert sum(count > 0 for count in changed) <= 10 < len(changed)
    changed.clear()
    outputs(backend, PROMPTS[:2], LookaheadConfig.autoregressive(), 150)
    assert len(changed) <= 4, "all other steps ran ahead"
    assert 2 <= len(launches) <= 4


@pytest.mark.parametrize(("spare", "launched"), [(64, []), (0, [3])])
@pytest.mark.thinned(1, most=1)
def test_more_pages_than_a_packet_has_room_for(
    spare: int, launched: list[int], device: str, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt chunk brings the pages of the whole prompt. They are written by a launch before the step."""
    monkeypatch.setattr(packets, "SPARE_CHANGES", spare)
    prompt = random.Random(3).choices(range(VOCABULARY), k=150)
    model, backend = make("llama", device), GraphBackend(make("llama", device), most_rows=2)
    launches = note_tables(backend, monkeypatch)
    assert outputs(backend, [prompt], LookaheadConfig(budget=2, window=0), 12) == [plain(model, prompt, 12)]
    assert launches == launched


def test_prepared_for_every_length(device: str, plain: Plain) -> None:
    """After `prepare` nothing more is captured. The tokens are the usual ones."""
    backend = GraphBackend(make("llama", device))
    backend.prepare(230, 64)
    captures, cache = backend.captures, backend.kv.caches[0]
    assert {kind.rows for kind in backend.runner.steps.forwards} == {1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384}
    assert_nothing_is_held(backend)
    for length in (1, 2, 3, 20, 60, 100, 200):
        prompt = random.Random(length).choices(range(VOCABULARY), k=length)
        assert outputs(backend, [prompt], LookaheadConfig(budget=60), 8) == [plain(backend.model, prompt, 8)]
    assert outputs(backend, [PROMPTS[0]], AUTOREGRESSIVE, 20) == [plain(backend.model, PROMPTS[0], 20)]
    assert backend.captures == captures
    assert backend.kv.caches[0] is cache


@pytest.mark.parametrize(
    ("name", "tokens", "budget", "most"),
    [
        ("llama", 40, 12, 1024),
        pytest.param("llama-mqa", 100, 100, 1024, marks=pytest.mark.slow),
        pytest.param("llama-tied-mha", 300, 150, 256, marks=pytest.mark.slow),
        ("llama", 5, 90, 64),
    ],
)
def test_prepare_knows_every_kind(
    name: str, tokens: int, budget: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all steps that one sequence may have, whatever its chunk, its tree, and how many nodes are needed."""
    backend = GraphBackend(make(name).to(torch.bfloat16), most_rows=most)

    def kind(chunk: int, nodes: int, needed: int) -> ForwardKind:
        tree = chain([0] * nodes, needed)
        return backend.planner.choose_kind([StepInput(slot, range(chunk), tree, SamplingParams(), ())], [0]).forward

    kinds = set[ForwardKind]()
    monkeypatch.setattr(backend.runner.steps, "forward_for", kinds.add)  # captures nothing
    monkeypatch.setattr(backend.runner.steps, "targets_for", lambda kind: None)
    backend.prepare(tokens, budget)
    budget, slot = min(budget, most), backend.open()
    shapes = [(chunk, nodes) for nodes in range(budget + 1) for chunk in range(min(tokens, most - nodes) + 1)][1:]
    wanted = {kind(*shape, needed) for shape in shapes for needed in {min(1, shape[1]), min(64, shape[1]), shape[1]}}
    assert kinds >= wanted
    assert len(kinds) <= 2 * len(wanted)


def test_a_larger_step_is_the_fallback_until_a_kind_was_needed_often(device: str) -> None:
    """The results are those of the exact kind (on a CPU up to rounding)."""
    model = make("llama", device).to(torch.bfloat16)
    backend, exact = GraphBackend(model, capture_after=3), GraphBackend(model)

    def sizes() -> list[int]:
        return sorted(kind.rows for kind in backend.runner.steps.forwards)

    def same(chunk: int, nodes: int) -> None:
        found = []
        for one in (backend, exact):
            slot = one.open()
            tree, chunk_tokens = random_tree(nodes, 0), [place % VOCABULARY for place in range(chunk)]
            found += one.step([StepInput(slot, chunk_tokens, tree, SamplingParams(), (), logits=True)])
            one.commit([(slot, ())])
            one.close(slot)
        torch.testing.assert_close(found[0].logits, found[1].logits, rtol=0.02, atol=0.02)

    for _ in range(3):
        same(0, 5)
    assert sizes() == [32]
    same(0, 5)
    assert sizes() == [8, 32]
    same(0, 9)
    same(0, 1)
    assert sizes() == [8, 32]
    same(0, 40)
    assert sizes() == [8, 32, 128]
    same(40, 1)
    assert sizes() == [8, 32, 128, 256]
    same(400, 1)
    assert sizes() == [8, 32, 128, 256, 512]
    item = StepInput(backend.open(), (), chain([1]), SamplingParams(), (), continues_alone=True)
    backend.step([item])  # another such step follows, so it is captured at once
    assert sizes() == [1, 8, 32, 128, 256, 512]
    backend.commit([(item.slot, ())])
    backend.close(item.slot)
    backend.prepare(20, 16)
    assert {1, 2, 4, 8, 16, 32} <= set(sizes())


@pytest.mark.parametrize("noise", [False, True])
def test_prepared_fallbacks_are_all_that_usual_steps_need(noise: bool, device: str) -> None:
    backend = GraphBackend(make("llama", device).to(torch.bfloat16), capture_after=LAZY_CAPTURE)
    backend.capture = True  # so that it prepares on a CPU, too
    backend.prepare_fallbacks(noise)
    kinds, slot = set(backend.runner.steps.pairs), backend.open()
    assert {kind.rows for kind in kinds} == {32, 128, 256, 512}
    assert all((kind.targets.sampler is Sampler.MULTINOMIAL) == noise for kind in kinds)
    for chunk, nodes in ((0, 1), (0, 30), (0, 33), (0, 128), (30, 1), (100, 128), (300, 60)):
        lines = [-1] * nodes if noise else ()
        backend.step([StepInput(slot, [1] * chunk, random_tree(nodes, 0), SamplingParams(), (), noise=lines)])
        backend.slots[slot].length = 0
    assert set(backend.runner.steps.pairs) == kinds


def test_no_fallback_where_steps_are_not_invariant() -> None:
    backend = GraphBackend(make("llama"), capture_after=LAZY_CAPTURE)
    backend.step([StepInput(backend.open(), (), chain([1, 2]), SamplingParams(), ())])
    assert [kind.rows for kind in backend.runner.steps.pairs] == [2]
    small = GraphBackend(make("llama").to(torch.bfloat16), capture_after=LAZY_CAPTURE, most_rows=16)
    small.step([StepInput(small.open(), (), chain([1, 2]), SamplingParams(), ())])
    assert [kind.rows for kind in small.runner.steps.pairs] == [16]


def test_prepare_in_few_pages(plain: Plain) -> None:
    """It runs no step that the pages do not hold."""
    backend = GraphBackend(make("llama"), kv_tokens=192)
    backend.prepare(1000, 128)
    assert max(kind.rows for kind in backend.runner.steps.forwards) == 192
    assert outputs(backend, PROMPTS[:1], LookaheadConfig()) == [plain(backend.model, PROMPTS[0], 24)]


@pytest.mark.parametrize(("has_it", "current", "entered"), [(1, 0, [1]), (1, 1, []), (0, 0, [])])
def test_work_is_launched_on_the_device_that_has_the_model(
    has_it: int, current: int, entered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        seen.append(which.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    backend = SimpleNamespace(device=torch.device("cuda", has_it))
    assert graph.on_model_device(lambda self, size: size + 1)(backend, 4) == 5  # type: ignore[arg-type]
    assert seen == entered
