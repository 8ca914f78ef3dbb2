"""The graph backend gives the tokens of `model.generate` for every family, batch, K, and state of its K/V buffer.

On a CPU its steps run on the kernels' slow twins. Where there is CUDA, every test runs there as well, captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from marks import slow_but
from tiny import PROMPTS, VOCABULARY, greedy, outputs, random_tree, root, run, tiny
from torch import nn

from lookahead import LookaheadConfig
from lookahead.algorithm.sampling import NO_DRAW
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import StepOutput, TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph import backend as graph
from lookahead.backends.graph import lanes
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.sizes import INVARIANT_ROWS, bucket
from lookahead.backends.graph.weights import check_graph, relay
from lookahead.backends.support import UnsupportedModelError
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.processors import PathVerifier, Rule
from lookahead.engine.request import Request

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


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("name", slow_but(MODELS, "llama", "llama-odd-heads", "qwen2-hybrid", "qwen3"))
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
def test_what_the_families_add_matters(name: str, changes: dict[str, Any], plain: Plain) -> None:
    """Without its biases, norms of q and k, or windows a model gives other tokens: the tests above would notice."""
    with_it, without = make(name), make(name, **changes)
    assert [plain(with_it, p, 24) for p in PROMPTS] != [plain(without, p, 24) for p in PROMPTS]


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_positions(kind: str, device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """Dynamic and longrope factors depend on the furthest position that is asked for. The backend makes tables for all
    of the buffer's positions, most of them beyond the context, and must still get the factors of a short text.
    """
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    model = make("llama", device, rope_parameters=rope)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    assert outputs(GraphBackend(model), PROMPTS, settings) == expected


def test_a_context_that_is_full_before_the_buffer_is(
    device: str, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step's padding reaches past the context, so the buffer grows. The rotary factors must stay the same,
    because the cached keys were rotated with them.
    """
    monkeypatch.setattr(lanes, "LEAST_CAPACITY", 64)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = make("llama", device, rope_parameters=rope, max_position_embeddings=64)
    expected = plain(model, PROMPTS[2], 34)
    backend = GraphBackend(model)
    assert outputs(backend, [PROMPTS[2]], settings, 100) == [expected]
    assert backend.kv.cache.shape[4] > 64


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


@pytest.mark.parametrize("seed", range(3))
def test_sequences_join_and_leave(seed: int, device: str, settings: LookaheadConfig) -> None:
    """Up to seven at once, greedy and sampled, each with its own budget. One is removed; the others stay exact.

    Lanes are given back and taken again, and batches of 3, 5, 6 and 7 are padded to a power of two.
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
    assert backend._lane == backend._length == backend._pending == {}
    for sequence in everyone:
        prompt, count = sequence.tokens[: sequence.prompt_tokens], sequence.rules.max_tokens
        expected = outputs(eager, [prompt], AUTOREGRESSIVE, count, sequence.sampling)[0]
        assert sequence.output == expected[: len(sequence.output)]
        assert sequence is dropped or sequence.output == expected


@pytest.mark.parametrize("invariant", [True, False])
def test_invariant_or_not(invariant: bool, device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """In fp32 both give the same tokens."""
    model = make("llama", device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    backend = GraphBackend(model, invariant=invariant)
    assert outputs(backend, PROMPTS, settings) == expected
    assert outputs(backend, PROMPTS[:1], LookaheadConfig(budget=200), 24) == expected[:1]
    assert {count for _, count, _ in backend._steps} >= {1, 64, 256}


@pytest.mark.parametrize("bug", ["every earlier token is seen", "accepted K/V does not move", "no rotation"])
def test_a_planted_bug_is_seen(bug: str, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bug in the backend, the tokens differ: so the comparisons above can fail."""
    backend = GraphBackend(make("llama"))
    if bug == "every earlier token is seen":
        put = Packet.put_tree

        def put_chain(packet: Packet, place: int, tree: TokenTree) -> None:
            put(packet, place, replace(tree, parents=list(range(-1, len(tree) - 1))))

        monkeypatch.setattr(Packet, "put_tree", put_chain)
    elif bug == "accepted K/V does not move":
        monkeypatch.setattr(backend.state.ops, "move_accepted", lambda *args: None)
    else:
        backend.close(backend.open())  # the tables are made with the first lane
        backend.kv.cosine, backend.kv.sine = torch.ones_like(backend.kv.cosine), torch.zeros_like(backend.kv.sine)
    found = []
    for seed in range(8):
        prompt = random.Random(seed).choices(range(VOCABULARY), k=20) * 2
        found.append(outputs(backend, [prompt], LookaheadConfig(window=4), 40) != [plain(backend.model, prompt, 40)])
    assert any(found)


# Sizes of steps


def test_buckets() -> None:
    assert [bucket(k) for k in (1, 2, 16, 17, 128, 129, 512, 513, 1025)] == [1, 16, 16, 32, 128, 256, 512, 1024, 1536]
    assert [bucket(k, 8) for k in (1, 2, 5, 9, 17, 128, 513)] == [1, 4, 8, 16, 32, 128, 1024]


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_a_shared_budget_fills_the_invariant_rows(count: int, device: str, plain: Plain) -> None:
    """However many sequences there are, a step has at most 128 rows, padding included."""
    rng, model = random.Random(3), make("llama", device)
    prompts = [rng.choices(range(VOCABULARY), k=rng.randrange(1, 30)) * 2 for _ in range(count)]
    backend = GraphBackend(model)
    found = outputs(backend, prompts, LookaheadConfig(shared=True), 24)
    assert found == [plain(model, prompt, 24) for prompt in prompts]
    batches = [(batch, size) for batch, size, head in backend._steps if head and batch > 1]
    assert max(batch * size for batch, size in batches) == INVARIANT_ROWS
    assert max(batch for batch, _ in batches) >= count


@pytest.mark.parametrize("budget", [1, 2, 9, 16, 17, 33, 100, 200])
def test_every_budget(budget: int, device: str, plain: Plain) -> None:
    """Steps of every captured size up to 256, full ones and padded ones."""
    prompt = random.Random(5).choices(range(VOCABULARY), k=40) * 2
    config = AUTOREGRESSIVE if budget == 1 else LookaheadConfig().adapted(budget=budget)
    model = make("llama", device)
    expected = plain(model, prompt, 40)
    backend = GraphBackend(model)
    assert outputs(backend, [prompt], config, 40) == [expected]
    assert outputs(backend, [prompt, PROMPTS[1]], config, 40) == [expected, plain(model, PROMPTS[1], 40)]
    assert max(count for _, count, head in backend._steps if head) == bucket(budget)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("chunk", slow_but([1, 8, 29, 30], 8))
def test_chunked_prefill(
    name: str, chunk: int, device: str, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks, of exactly one, of one and a token more, and of one token, which needs no prefill."""
    monkeypatch.setattr(graph, "PREFILL_TOKENS", chunk)
    model = make(name, device)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    backend = GraphBackend(model)
    assert outputs(backend, PROMPTS, settings) == expected
    assert max(count for _, count, head in backend._steps if not head) == bucket(min(chunk, 29))


def test_a_prompt_is_run_without_the_head(device: str) -> None:
    """Only a prompt's last token needs logits, and the head is a fifth of a small model's work."""
    backend = GraphBackend(make("llama", device))
    slot = backend.open()
    backend.step([greedy(slot, [3] * 20, root(5))])
    assert set(backend._steps) == {(1, 32, False), (1, 1, True)}
    assert backend._steps[1, 32, False].logits is None
    assert backend.length(slot) == 20  # the root counts once it is committed
    backend.commit([(slot, ())])
    assert backend.length(slot) == 21


# The K/V buffer


def growing(backend: GraphBackend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Note every growth of the buffer: its lanes, its capacity, and whether accepted K/V was waiting to move."""
    noted: list[tuple[int, int, bool]] = []
    reserve = backend._reserve

    def reserve_and_note(lanes: int, capacity: int) -> None:
        before, waiting = backend.kv.cache.shape, any(pending.path for pending in backend._pending.values())
        reserve(lanes, capacity)
        if backend.kv.cache.shape != before:
            noted.append((backend.kv.cache.shape[2], backend.kv.cache.shape[4], waiting))

    monkeypatch.setattr(backend, "_reserve", reserve_and_note)
    return noted


@pytest.mark.slow
@pytest.mark.parametrize("start", [32, pytest.param(48, marks=pytest.mark.slow), 80])
def test_an_answer_outgrows_the_buffer(
    start: int, device: str, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a generation; alone, and then with others in the lanes beside it."""
    monkeypatch.setattr(lanes, "LEAST_CAPACITY", start)
    model = make("llama", device)
    backend = GraphBackend(model)
    noted = growing(backend, monkeypatch)
    config = LookaheadConfig(window=3, ngram=4, budget=14)
    assert outputs(backend, PROMPTS[:1], config, 90) == [plain(model, PROMPTS[0], 90)]
    assert noted[0][1] == start
    assert noted[-1][1] >= 96
    assert outputs(backend, PROMPTS, settings, 90) == [plain(model, p, 90) for p in PROMPTS]
    assert noted[-1][0] >= len(PROMPTS)


def test_a_step_that_grows_the_buffer_while_a_commit_waits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit's K/V moves before the buffer is replaced."""
    monkeypatch.setattr(lanes, "LEAST_CAPACITY", 32)
    model = make("llama", device)
    backend, eager = GraphBackend(model), EagerBackend(model)
    noted = growing(backend, monkeypatch)
    tree, results = random_tree(12, 1), []
    path = [max(node for node in range(12) if tree.parents[node] == 0)]
    assert path[0] > 1
    for one in (backend, eager):
        slot = one.open()
        one.step([greedy(slot, [1, 2, 3], tree)])
        one.commit([(slot, path)])
        results.append(one.step([greedy(slot, (), random_tree(40, 2), logits=True)])[0].logits)
    assert noted[-1][1:] == (backend.kv.cache.shape[4], True)
    assert noted[-1][1] > 32
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_long_answer_outgrows_the_buffer_again_and_again(
    device: str, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LEAST_CAPACITY", 64)
    model = make("llama", device, max_position_embeddings=2048)
    backend = GraphBackend(model)
    noted = growing(backend, monkeypatch)
    assert outputs(backend, [PROMPTS[0]], LookaheadConfig(window=0, budget=16), 700) == [plain(model, PROMPTS[0], 700)]
    sizes = [capacity for _, capacity, _ in noted]
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 2


def test_a_new_lane_while_commits_wait(
    device: str, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more lane replaces the buffer. Accepted K/V that has not moved yet must move before that."""
    model = make("llama", device)
    expected = [plain(model, prompt, 40) for prompt in PROMPTS]
    backend = GraphBackend(model)
    noted = growing(backend, monkeypatch)
    engine = Engine(backend)
    sequences = [DecodingSequence(prompt, settings, rules=StopRules(40)) for prompt in PROMPTS]
    for sequence in reversed(sequences):
        engine.submit(Request(sequence))
        engine.step()
        while engine.running and not any(pending.path for pending in backend._pending.values()):
            engine.step()
    while engine.running:
        engine.step()
    assert sum(waiting for _, _, waiting in noted) >= 2
    assert [sequence.output for sequence in sequences] == expected


@pytest.mark.parametrize("longest", [1, 3])
def test_a_path_longer_than_the_packet_has_room_for(
    longest: int, device: str, settings: LookaheadConfig, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "LONGEST_PATH", longest)
    model = make("llama", device)
    prompts = [PROMPTS[3], PROMPTS[0]]
    expected = [plain(model, prompt, 40) for prompt in prompts]
    backend = GraphBackend(model)
    for batch, tokens in (([0], expected[:1]), ([0, 1], expected)):
        sequences = run(backend, [prompts[i] for i in batch], settings, 40)
        assert [sequence.output for sequence in sequences] == tokens
        assert len(sequences[0].stats.accepted_by_depth) > longest + 1


def test_a_path_of_just_the_packets_length(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest path that a packet has room for, and one node more, give the eager backend's logits and K/V."""
    monkeypatch.setattr(graph, "LONGEST_PATH", 4)
    model = make("llama", device)
    tokens = random_tree(12, 0).tokens
    depths = [0, *((node + 1) // 2 for node in range(1, 12))]
    tree = TokenTree(tokens, [-1, 0, *range(10)], depths, list(range(12)))  # two chains: odd nodes and even ones
    for path in ([2, 4, 6, 8], [2, 4, 6, 8, 10]):
        backend, eager = GraphBackend(model), EagerBackend(model)
        slots = {one: one.open() for one in (backend, eager)}
        for one, slot in slots.items():
            one.step([greedy(slot, [1, 2, 3], tree)])
            one.commit([(slot, path)])
        assert bool(backend._pending) == (len(path) == 4)
        results = [one.step([greedy(slot, (), root(9), logits=True)])[0].logits for one, slot in slots.items()]
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
        kept = [one.cached(slot) for one, slot in slots.items()]
        assert kept[0][0][0].shape[1] == 4 + len(path)
        assert_close(*kept)


def test_a_closed_slot_leaves_nothing(device: str, settings: LookaheadConfig, plain: Plain) -> None:
    """A slot is closed while its commit waits. All K/V is then set to NaN, which would spread if anything read it."""
    model = make("mistral", device)
    backend = GraphBackend(model)
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    slot = backend.open()
    backend.step([greedy(slot, PROMPTS[2], random_tree(20, 0))])
    backend.commit([(slot, [1])])
    assert backend._pending
    lane = backend._lane[slot]
    backend.close(slot)
    assert not backend._pending
    with torch.inference_mode():
        backend.kv.cache.fill_(float("nan"))

    second = backend.open()
    assert (backend._lane[second], backend.length(second)) == (lane, 0)
    fresh = GraphBackend(make("mistral", device))
    found, wanted = (
        one.step([greedy(s, [8, 9], root(3), logits=True)])[0] for one, s in ((backend, second), (fresh, fresh.open()))
    )
    assert torch.equal(found.logits, wanted.logits)
    backend.close(second)
    assert outputs(backend, [*PROMPTS[:3]], settings) == expected[:3]
    assert [outputs(backend, [prompt], settings)[0] for prompt in PROMPTS] == expected


def test_slots_in_any_order(device: str) -> None:
    """A step's inputs may come in any order of their lanes, with gaps between them."""
    model = make("llama", device)
    backend = GraphBackend(model)
    slots = [backend.open() for _ in range(5)]
    alone = []
    for slot, prompt in zip(slots, [*PROMPTS, [1, 2]], strict=True):
        alone += backend.step([greedy(slot, prompt, random_tree(9, slot), logits=True)])
        alone[-1].logits = alone[-1].logits.clone()
        backend.commit([(slot, [])])
        backend._length[slot] -= 1  # step back, to take the same step again
    backend._pending.clear()
    backend.close(slots[1])
    order = [4, 0, 3]
    together = backend.step([greedy(slots[i], (), random_tree(9, slots[i]), logits=True) for i in order])
    for found, i in zip(together, order, strict=True):
        assert found.targets == alone[i].targets
        assert torch.allclose(found.logits, alone[i].logits, atol=1e-4)


def assert_close(
    found: Sequence[tuple[torch.Tensor, torch.Tensor]], expected: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
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
        one.open()  # another sequence's lane before it
        slots.append(one.open())
        one.step([greedy(slots[-1], PROMPTS[2], tree)])
        one.commit([(slots[-1], path)])
    slot = slots[0]
    assert backend._pending
    ours, theirs = backend.cached(slot), eager.cached(slots[1])
    assert ours[0][0].shape == (model.config.num_key_value_heads, 31 + len(path), backend.weights.dim)
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
    weights = backend.weights
    fields = ("before", "qkv", "bias", "norms", "out", "after", "gate_up", "down")
    parts = [getattr(layer, name) for layer in weights.layers for name in fields]
    parts = [part for part in parts if part is not None]
    return [*backend.model.parameters(), weights.embedding, weights.norm, weights.head, *parts]


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "qwen2", "qwen3"])
def test_weights_are_held_once(name: str, device: str, plain: Plain) -> None:
    """The model's matrices are views of the fused ones, with the same numbers, and it gives the same output."""
    model = make(name, device)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = sum(storages(*model.parameters()).values())
    expected = [plain(model, prompt, 24) for prompt in PROMPTS]
    backend = GraphBackend(model)
    for block, layer in zip(model.model.layers, backend.weights.layers, strict=True):
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert all(inside(p.weight, layer.qkv) for p in projections)
        assert all(inside(p.weight, layer.gate_up) for p in (mlp.gate_proj, mlp.up_proj))
        assert torch.equal(torch.cat([p.weight for p in projections]), layer.qkv)
        assert layer.out.data_ptr() == attention.o_proj.weight.data_ptr()
    small = [part for layer in backend.weights.layers for part in (layer.bias, layer.norms) if part is not None]
    assert sum(storages(*model.parameters()).values()) == before
    assert sum(storages(*held(backend)).values()) == before + sum(storages(*small).values())
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
    assert backends[0].weights.layers[1].qkv.data_ptr() == backends[1].weights.layers[1].qkv.data_ptr()
    assert backends[0].weights.layers[1].gate_up.data_ptr() == backends[1].weights.layers[1].gate_up.data_ptr()


def test_a_model_can_be_saved_afterwards(tmp_path: Path, plain: Plain) -> None:
    """Its matrices share memory now, and code that writes checkpoints treats shared memory specially."""
    model = make("qwen2")
    expected = plain(model, PROMPTS[0], 24)
    relay(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert plain(again, PROMPTS[0], 24) == expected


# Refusals


def broken(reason: str) -> Any:
    """A model that the backend must not run."""
    torch.manual_seed(0)
    if reason == "family":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
        )
    fields = {"activation": {"hidden_act": "gelu"}, "attention": {"attention_bias": True}, "mlp": {"mlp_bias": True}}
    model = make("llama", **fields.get(reason, {}))
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
    elif reason == "head":
        model.lm_head = nn.Linear(32, VOCABULARY, bias=True)
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
        ("family", r"GPT2LMHeadModel is none of LlamaForCausalLM, .*Qwen3ForCausalLM"),
        ("activation", r"its activation is 'gelu'"),
        ("subclass", r"Adapted is no plain matrix"),
        ("packed", r"WQLinear_GEMM is no plain matrix"),
        ("offloaded", r"it is spread over devices"),
        ("watched", r"hook"),
        ("quantised", r"its weights are quantised"),
        ("split", r"split between processes"),
        ("dtypes", r"its weights have several dtypes"),
        ("attention", r"its output projections have biases"),
        ("mlp", r"its output projections have biases"),
        ("head", r"its head has a bias"),
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
    check_graph(make(name))


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
@pytest.mark.parametrize("size", [1, 2, 16, 33, 130, 600])
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
def test_trails_behind_cached_tokens(kind: Any, name: str, device: str) -> None:
    """Sequences of a batch have no trail, a short one and a long one. Afterwards all K/V stands where it belongs:

    a further step without trails gives the logits of the whole text.
    """
    model = make(name, device)
    backend = kind(model)
    rng = random.Random(0)
    trails = [
        [rng.randrange(VOCABULARY) for _ in range(count)]
        for count in (0, 3, graph.LONGEST_TRAIL, graph.LONGEST_TRAIL + 5)
    ]
    trees = [random_tree(size, size) for size in (12, 5, 20, 7)]
    paths = [descent(tree) for tree in trees]
    slots = [backend.open() for _ in PROMPTS]
    texts = [[*prompt, 9] for prompt in PROMPTS]
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        backend.step([greedy(slot, prompt, root(9))])
        backend.commit([(slot, ())])
    backend.step([greedy(*parts) for parts in zip(slots, trails, trees, strict=True)])
    backend.commit(list(zip(slots, paths, strict=True)))
    for text, trail, tree, path in zip(texts, trails, trees, paths, strict=True):
        text += [*trail, tree.tokens[0], *(tree.tokens[node] for node in path)]
    assert [backend.length(slot) for slot in slots] == list(map(len, texts))
    if kind is GraphBackend:  # the short trails needed no pass of their own
        assert max(count for batch, count, head in backend._steps if head and batch == 4) >= 32 + 20
        assert [count for _, count, head in backend._steps if not head and count > 32] == [64]
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
        told.extend((when, item.tree._below is not None) for item in inputs)

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


def test_prepared_for_every_length(device: str, plain: Plain) -> None:
    """After `prepare` nothing more is captured, and the K/V buffer does not grow. The tokens are the usual ones."""
    backend = GraphBackend(make("llama", device))
    backend.prepare(230, 64)
    steps, cache = dict(backend._steps), backend.kv.cache
    assert {(count, head) for _, count, head in steps} == {
        *((size, False) for size in (1, 16, 32, 64, 128, 256)),
        *((size, True) for size in (1, 16, 32, 64)),
    }
    assert backend._lane == backend._length == backend._pending == {}
    for length in (2, 3, 20, 60, 100, 200):
        prompt = random.Random(length).choices(range(VOCABULARY), k=length)
        assert outputs(backend, [prompt], LookaheadConfig(budget=60), 20) == [plain(backend.model, prompt, 20)]
    assert backend._steps == steps
    assert backend.kv.cache is cache


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
    assert graph.on_its_device(lambda self, size: size + 1)(backend, 4) == 5  # type: ignore[arg-type]
    assert seen == entered
