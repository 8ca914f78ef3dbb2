"""The graph backend on models with recurrent states: trees, commits, slots, and texts of every family.

`models.reference` and `model.generate` say what is right. On a CPU the steps run on the kernels' slow twins. For half
precision on CUDA see `test_cuda_states.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from marks import slow_but
from model_table import ROUNDING, error
from model_table_recurrent import RECURRENT_ROWS
from tiny import PROMPTS, VOCABULARY, greedy, outputs, random_tree, root, run, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import NO_TREE, StepInput
from lookahead.backends.graph import states
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import MOST_STATE_NODES, PAGE
from lookahead.config import SamplingParams, StopRules
from lookahead.engine import scheduler
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.kv.slots import NoSlotError
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.read import read
from lookahead.models.reference import forward_tree
from lookahead.models.spec import Decoder

UNSUPPORTED = ("nemotron-h-latent",)
ROWS = {name: (kind, changes) for name, kind, changes in RECURRENT_ROWS if name not in UNSUPPORTED}
FIRST = list({kind: name for name, (kind, _) in reversed(ROWS.items())}.values())
"""A row of each family."""
KINDS = ("qwen3.5", "granite-mamba", "lfm2")
"""A row of each mixer: a gated delta net, Mamba-2, a short convolution."""
TREE = random_tree(21, 4)
AUTOREGRESSIVE = LookaheadConfig.autoregressive()
Plain = Callable[[Any, Sequence[int], int], list[int]]


def make(name: str, device: str = "cpu", **more: Any) -> Any:
    kind, changes = ROWS[name]
    return tiny(kind, device=device, **{**changes, **more})


def tokens(count: int, seed: int = 11) -> list[int]:
    return [(seed * i + i // 7) % VOCABULARY for i in range(count)]


def expected_logits(described: Decoder, prompt: int, text: Sequence[int], tree: TokenTree) -> torch.Tensor:
    """The logits of a tree after a text that begins with a prompt."""
    return forward_tree(described, text, tree.tokens, tree.parents, generated=len(text) - prompt)


@pytest.mark.parametrize("name", slow_but(ROWS, *FIRST, "granite-mamba-limit"))
@pytest.mark.parametrize("length", slow_but([1, 2, 70], 2))
@pytest.mark.thinned(1, most=6)
def test_trees_of_every_model(name: str, length: int, device: str) -> None:
    """A tree behind a prompt, trees behind what was committed of it, and a chunk in the middle of the text."""
    backend, described = GraphBackend(make(name, device)), read(make(name, device), "graph")
    rng, text, slot = random.Random(repr((name, length))), tokens(length), backend.open()

    def step(chunk: Sequence[int], tree: TokenTree) -> None:
        found = backend.step([replace(greedy(slot, chunk, tree, logits=True), prompt_tokens=length)])[0].logits
        expected = expected_logits(described, length, [*text, *chunk] if length != len(text) else text, tree)
        assert error(found, expected) < 10 * ROUNDING, (len(text), tree.size)

    chunk = text
    for size in (21, 1, 1, 5):
        tree = random_tree(size, len(text))
        step(chunk, tree)
        path, node = list[int](), 0
        while children := [child for child in range(size) if tree.parents[child] == node]:
            node = rng.choice(children)
            path.append(node)
        path = path[: rng.randrange(len(path) + 1)]
        backend.commit([(slot, path)])
        text += [tree.tokens[node] for node in (0, *path)]
        chunk = []
    chunk = tokens(9, 5)  # as after a failover: tokens that another rank has computed
    step(chunk, TREE)


@pytest.mark.parametrize("name", slow_but(ROWS, *KINDS, "mamba2"))
@pytest.mark.thinned(1, most=2)
def test_greedy_equals_transformers(name: str, device: str, plain: Plain, settings: LookaheadConfig) -> None:
    """Alone, in a batch, and token by token. Limits of a prompt's time steps are those of the prompt alone."""
    model = make(name, device)
    expected = [plain(make(name), prompt, 12) for prompt in PROMPTS]
    backend = GraphBackend(model)
    sequences = run(backend, PROMPTS, settings, 12)
    assert [sequence.output for sequence in sequences] == expected
    assert sum(sequence.stats.steps for sequence in sequences) < 4 * 12
    assert outputs(backend, PROMPTS[:1], AUTOREGRESSIVE, 12) == expected[:1]
    assert (backend.pool.used, len(backend.slots)) == (0, 0)


@pytest.mark.parametrize("name", slow_but(KINDS, "lfm2"))
@pytest.mark.parametrize("method", slow_but(["small", "default", "paper"], "small"))
def test_sampling_equals_autoregressive(name: str, method: str, device: str, settings: LookaheadConfig) -> None:
    configs = {"small": settings, "default": LookaheadConfig(), "paper": LookaheadConfig.paper(5, 4, 5)}
    sampling, backend = SamplingParams(temperature=0.9, top_p=0.95, seed=3), GraphBackend(make(name, device))
    expected = [outputs(backend, [prompt], AUTOREGRESSIVE, 12, sampling)[0] for prompt in PROMPTS]
    assert outputs(backend, PROMPTS, configs[method], 12, sampling) == expected
    assert outputs(backend, PROMPTS, settings, 12) != expected


@pytest.mark.parametrize("name", slow_but(KINDS, "granite-mamba"))
def test_prompts_in_chunks_beside_others(name: str, device: str, plain: Plain, settings: LookaheadConfig) -> None:
    """Chunks of any size, in passes that are small, while other sequences decode."""
    prompts = [tokens(90), tokens(7, 3), tokens(50, 7), tokens(1), tokens(130, 13)]
    expected = [plain(make(name), prompt, 12) for prompt in prompts]
    backend = GraphBackend(make(name, device), most_rows=16)
    assert outputs(backend, prompts, settings, 12) == expected


@pytest.mark.parametrize("name", slow_but(KINDS, "lfm2"))
def test_requests_join_and_slots_are_used_again(
    name: str, device: str, plain: Plain, settings: LookaheadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join and are cancelled at random; few states, so that each slot is used by several."""
    rng, model = random.Random(7), make(name, device)
    size = sum(group.slot_bytes(4) for group in states.state_groups_of(read(model, "graph")))
    monkeypatch.setattr(states, "CPU_BYTES", 3 * size)
    monkeypatch.setattr(states, "free_bytes", lambda device: None)
    backend = GraphBackend(model)
    assert backend.capabilities.most_sequences == 3
    engine, wanted = Engine(backend), dict[int, tuple[DecodingSequence, list[int]]]()
    for turn in range(60):
        if turn % 4 == 0:
            prompt, count = tokens(rng.randrange(1, 30), rng.randrange(1, 9)), rng.randrange(1, 14)
            sequence = DecodingSequence(prompt, settings, None, StopRules(count, frozenset(), backend.max_length))
            wanted[engine.submit(Request(sequence))] = sequence, plain(make(name), prompt, count)
        if turn % 11 == 10 and engine.running:
            id = rng.choice(engine.running)
            engine.cancel(id)
            del wanted[id]
        engine.step()
        assert len(backend.slots) <= 3
    while engine.running:
        engine.step()
    assert len(wanted) > 9
    for sequence, expected in wanted.values():
        assert sequence.output == expected


def test_a_request_waits_for_a_slot_that_another_engine_has(
    plain: Plain, settings: LookaheadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("lfm2")
    size = sum(group.slot_bytes(4) for group in states.state_groups_of(read(model, "graph")))
    monkeypatch.setattr(states, "CPU_BYTES", 2 * size)
    monkeypatch.setattr(states, "free_bytes", lambda device: None)
    backend = GraphBackend(model)

    def request(count: int) -> Request:
        return Request(DecodingSequence(tokens(5), settings, None, StopRules(count, frozenset(), backend.max_length)))

    server, other = Engine(backend), Engine(backend)
    requests = [request(20), request(20)]
    server.submit(requests[0])
    server.step()
    held = other.submit(request(20))
    other.step()
    server.submit(requests[1])
    server.step()
    assert len(backend.slots) == 2
    assert requests[1].sequence.generated == 0
    third = Engine(backend)
    third.submit(request(1))
    with pytest.raises(NoSlotError, match="2 sequences are open"):
        third.step()  # nothing of its own will end
    other.cancel(held)
    while server.running:
        server.step()
    assert all(one.sequence.output == plain(make("lfm2"), tokens(5), 20) for one in requests)


@pytest.mark.parametrize("name", slow_but(KINDS, "qwen3.5"))
@pytest.mark.slow
def test_preempted_requests_run_again(name: str, device: str, plain: Plain, settings: LookaheadConfig) -> None:
    """Their states are folded again from their tokens, those of the answer included."""
    prompts = [tokens(8 + 3 * i, 3 + i) for i in range(3)]
    expected = [plain(make(name), prompt, 60) for prompt in prompts]
    backend = GraphBackend(make(name, device), kv_tokens=4 * PAGE, most_rows=64)
    sequences = [DecodingSequence(p, settings, None, StopRules(60, frozenset(), backend.max_length)) for p in prompts]
    engine = Engine(backend)
    for sequence in sequences:
        engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    assert [sequence.output for sequence in sequences] == expected
    assert engine.preemptions


@pytest.mark.parametrize("name", slow_but(KINDS, "qwen3.5"))
def test_a_stop_inside_a_block(name: str, device: str, plain: Plain, settings: LookaheadConfig) -> None:
    """The end-of-sequence token is accepted among draft tokens; the slot is then used by another text."""
    prompt = [4, 4, 8, 1, 4, 4, 8, 1, 4, 4]
    text = plain(make(name), prompt, 30)
    end = text[9]
    expected = text[: text.index(end) + 1]
    backend = GraphBackend(make(name, device))
    for _ in range(2):
        sequence = DecodingSequence(prompt, settings, None, StopRules(30, frozenset({end}), backend.max_length))
        engine = Engine(backend)
        engine.submit(Request(sequence))
        while engine.running:
            engine.step()
        assert sequence.output == expected
    assert outputs(backend, [prompt], settings, 30) == [text]


@pytest.mark.parametrize("name", slow_but(KINDS, "granite-mamba"))
def test_a_step_that_is_not_committed_leaves_no_trace(name: str, device: str) -> None:
    """Its draft tokens, its root, and what was kept of them: the next step is as if it had not been."""
    backend, slots = GraphBackend(make(name, device)), list[int]()
    for _ in range(2):
        slots.append(backend.open())
        backend.step([greedy(slots[-1], tokens(5), root(3))])
        backend.commit([(slots[-1], ())])
    for seed in range(3):
        backend.step([greedy(slots[0], (), random_tree(9, seed))])
    found, expected = backend.step([greedy(slot, (), TREE, logits=True) for slot in slots])
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    # Nor does what a sequence left behind that ends before its tokens are replayed.
    backend.commit([(slots[0], [1]), (slots[1], [1])])
    backend.close(slots[0])
    new, fresh = backend.open(), GraphBackend(make(name, device))
    assert backend.slots[new].table_index == 0
    found = backend.step([greedy(new, tokens(3), TREE, logits=True)])[0].logits
    expected = fresh.step([greedy(fresh.open(), tokens(3), TREE, logits=True)])[0].logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", slow_but(KINDS, "qwen3.5"))
def test_many_replays_before_a_small_step(name: str, device: str) -> None:
    """More accepted tokens than the next packet has room for: a launch of their own."""
    backend, described = GraphBackend(make(name, device)), read(make(name, device), "graph")
    slots = [backend.open() for _ in range(9)]
    chain = TokenTree(tokens(14), range(-1, 13), range(14), range(14))
    backend.step([greedy(slot, tokens(3 + i), chain) for i, slot in enumerate(slots)])
    backend.commit([(slot, range(1, 14)) for slot in slots])
    for i, slot in enumerate(slots):
        found = backend.step([greedy(slot, (), root(5), logits=True)])[0].logits
        expected = expected_logits(described, 4 + i, [*tokens(3 + i), *chain.tokens], root(5))
        assert error(found, expected) < 10 * ROUNDING


def test_two_passes_before_a_commit(device: str) -> None:
    """As an engine launches them for exact and other requests. What a third one overwrites cannot be committed."""
    backend, described = GraphBackend(make("lfm2", device)), read(make("lfm2", device), "graph")
    slots = [backend.open() for _ in range(2)]
    tree = random_tree(200, 3)
    for slot in slots:
        backend.step([greedy(slot, tokens(4), tree)])
    backend.commit([(slot, ()) for slot in slots])
    for slot in slots:
        found = backend.step([greedy(slot, (), root(9), logits=True)])[0].logits
        expected = expected_logits(described, 5, [*tokens(4), tree.tokens[0]], root(9))
        assert error(found, expected) < 10 * ROUNDING
    backend.step([greedy(slots[0], (), tree)])
    for _ in range(2):
        backend.step([greedy(slots[1], (), tree)])
    with pytest.raises(RuntimeError, match="600 rows were kept since this step; there is room for 512"):
        backend.commit([(slots[0], ())])


def test_what_the_backend_states(device: str) -> None:
    backend = GraphBackend(make("qwen3.5", device))
    capabilities = backend.capabilities
    assert not capabilities.adopts
    assert capabilities.runs_ahead
    assert capabilities.most_sequences == backend.runner.state.states.slots == backend.slots.most_slots
    assert backend.most_nodes == MOST_STATE_NODES
    slot = backend.open()
    backend.step([greedy(slot, tokens(20), root(4))])
    backend.commit([(slot, ())])
    with pytest.raises(UnsupportedModelError, match="does not hand out the K/V of a sequence with recurrent states"):
        backend.cached(slot)
    with pytest.raises(UnsupportedModelError, match="does not take over the K/V of a sequence with recurrent states"):
        backend.adopt(slot, 3, [])
    with pytest.raises(ValueError, match="trees of 300 tokens are too large; a step of a model with recurrent"):
        backend.step([greedy(slot, (), random_tree(300, 0))])
    most = capabilities.most_sequences
    with pytest.raises(UnsupportedModelError, match=f"recurrent states of {most} sequences, and {most + 1} are needed"):
        backend.check_room(most + 1, 10)


def test_sequences_begin_from_snapshots(device: str) -> None:
    """Where a chunk ended with a page, and was remembered: K/V alone do not restore a state."""
    model, described = make("qwen3.5", device), read(make("qwen3.5", device), "graph")
    backend, text = GraphBackend(model), tokens(200)
    assert backend.capabilities.shares_at == PAGE
    slot = backend.open(text)
    for first, end in ((0, 64), (64, 100), (100, 128), (128, 190)):
        backend.step([StepInput(slot, text[first:end], NO_TREE, SamplingParams(), ())])
        other = backend.open(text)
        assert backend.length(other) == 0  # not yet remembered
        backend.close(other)
    backend.remember(slot, text[:190])
    backend.close(slot)
    for shared, beginning in ((128, text), (64, [*text[:100], 1]), (64, text[:128]), (0, [1, *text[1:]])):
        new = backend.open([*beginning, 3])
        expected_length = 128 if beginning == text[:128] else shared  # its last page is full, and one token follows
        assert backend.length(new) == expected_length
        chunk = [*beginning, 3][expected_length:]
        found = backend.step([greedy(new, chunk, TREE, logits=True)])[0].logits
        assert error(found, forward_tree(described, [*beginning, 3], TREE.tokens, TREE.parents)) < 10 * ROUNDING
        backend.close(new)


@pytest.mark.parametrize("name", slow_but(KINDS, "granite-mamba"))
def test_requests_share_the_beginning_of_prompts(
    name: str, device: str, plain: Plain, settings: LookaheadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin alike, one after the other and at once, with hardly any room for snapshots."""
    monkeypatch.setattr(scheduler, "LEAST_SHARED", 64)
    monkeypatch.setattr(states, "MOST_SNAPSHOTS", 2)
    common = tokens(150)
    prompts = [[*common, *tokens(5 + 20 * i, 3 + i)] for i in range(4)] + [tokens(140, 7), common[:70]]
    expected = [plain(make(name), prompt, 8) for prompt in prompts]
    backend = GraphBackend(make(name, device), most_rows=128)
    found = [outputs(backend, [prompt], settings, 8)[0] for prompt in prompts]
    assert found == expected
    assert backend.pool.hit_tokens >= 3 * 128
    assert outputs(backend, prompts, settings, 8) == expected
    assert backend.pool.used == 0


def test_limits_of_prompts_are_not_shared(device: str) -> None:
    """A state then depends on which of its tokens were a prompt's."""
    backend = GraphBackend(make("nemotron-h", device))
    assert backend.capabilities.shares_at is None
    assert backend.runner.state.states.snapshots == 0


def test_no_room_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "CPU_BYTES", 10)
    with pytest.raises(UnsupportedModelError, match=r"the recurrent states of a sequence need .* GiB, and a quarter"):
        GraphBackend(make("lfm2"))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_lowered(name: str) -> None:
    (row,) = [row for row in RECURRENT_ROWS if row[0] == name]
    with pytest.raises(UnsupportedModelError, match="does not run this model: its experts read a projection"):
        GraphBackend(tiny(row[1], **row[2]))


@pytest.mark.parametrize("name", slow_but(KINDS, "granite-mamba"))
def test_a_slot_of_chunks_alone(name: str, device: str) -> None:
    """Chunks without a tree, one and two tokens long: shorter than what convolutions read."""
    backend, described = GraphBackend(make(name, device)), read(make(name, device), "graph")
    text, slot, first = tokens(12), backend.open(), 0
    for size in (1, 1, 2, 1, 3, 1, 2):
        backend.step([StepInput(slot, text[first : first + size], NO_TREE, SamplingParams(), ())])
        first += size
    found = backend.step([replace(greedy(slot, text[11:], TREE, logits=True), prompt_tokens=12)])[0].logits
    assert error(found, expected_logits(described, 12, text, TREE)) < 10 * ROUNDING
