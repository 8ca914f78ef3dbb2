"""On CUDA: the tokens of the model's own `generate`, and sampling equal to autoregressive sampling.

Then the graph backend on a model large enough for several tiles, heads and splits: half precision, captured graphs, and
what happens to them when the pages are replaced or a larger step is captured. `test_graph.py` runs on CUDA as well.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny import greedy, outputs, random_tree, root, run, tiny

import lookahead
from lookahead import LookaheadConfig, LookaheadModel
from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.base import NO_TREE
from lookahead.backends.choose import make_backend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import PAGE, bucket
from lookahead.backends.prompts import run_prompt_chunks
from lookahead.config import METHODS, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.plain_run import PlainRun
from lookahead.engine.request import Request
from lookahead.models.facts import UnsupportedModelError
from lookahead.transformers_hook.facts import known

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PROMPTS = ["the fox", "once more", "a dog and a fox jumps over the naïve café", "end"]
TOKENS = 32


@pytest.fixture(scope="module")
def lm(make_model: Callable[..., Any], tokenizer: Any, settings: LookaheadConfig) -> LookaheadModel:
    return lookahead.load((make_model().to("cuda"), tokenizer), config=settings)


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """Real fp32 products: tf32 has ten bits of mantissa, too few to compare tokens."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_greedy_equals_transformers(lm: LookaheadModel, plain: Callable[[Any, Sequence[int], int], list[int]]) -> None:
    assert lm.device.type == "cuda"
    expected = [plain(lm.model, lm.encode(p), TOKENS) for p in PROMPTS]
    alone = [lm.generate(p, max_tokens=TOKENS) for p in PROMPTS]
    assert [done.token_ids for done in alone] == expected
    assert all(done.stats.steps < TOKENS for done in alone)
    assert [done.token_ids for done in lm.generate(PROMPTS, max_tokens=TOKENS)] == expected


@pytest.mark.parametrize("method", METHODS)
def test_sampling_equals_autoregressive(lm: LookaheadModel, method: str) -> None:
    common: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    expected = [lm.generate(p, method="autoregressive", **common).token_ids for p in PROMPTS]
    assert [lm.generate(p, method=method, **common).token_ids for p in PROMPTS] == expected
    assert [done.token_ids for done in lm.generate(PROMPTS, method=method, **common)] == expected


# The graph backend on a model of some size

AUTOREGRESSIVE = LookaheadConfig.autoregressive()


def medium(dtype: torch.dtype, vocabulary: int = 1024) -> Any:
    """A random Llama of 4 layers and 512 channels; equal weights for equal arguments."""
    model = tiny(
        "Llama",
        seed=0,
        stirred=False,
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    return model.to("cuda", dtype)


def texts(count: int, sizes: Sequence[int], vocabulary: int = 1024) -> list[list[int]]:
    """Random prompts, of these lengths in turn."""
    return [random.Random(i).choices(range(vocabulary), k=sizes[i % len(sizes)]) for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_lookahead_equals_autoregressive(dtype: torch.dtype) -> None:
    """Steps of 1 token and of 128 give the same tokens. This is hard with random weights: in half precision the two
    best logits of one row in twenty are equal or neighbours."""
    backend = GraphBackend(medium(dtype, 64))
    for prompt in texts(40, (8, 40, 300), 64):
        plain = outputs(backend, [prompt], AUTOREGRESSIVE, 40)[0]
        assert outputs(backend, [prompt], LookaheadConfig(), 40)[0] == plain


def test_a_row_does_not_depend_on_the_step_it_is_in() -> None:
    """The root's logits alone, in a tree of 30, of 100, and in batches, bit for bit."""
    backend = GraphBackend(medium(torch.bfloat16))
    for prompt in texts(10, (8, 40, 300, 900)):
        found = []
        for sizes in ((1,), (30,), (100,), (1, 10, 5), (1,) * 12, (7,) * 20, (1, 128, 128)):
            slots, items = [backend.open() for _ in sizes], []
            for slot, size in zip(slots, sizes, strict=True):
                tree = random_tree(size, 0)
                tree.tokens[0] = prompt[-1]
                items.append(greedy(slot, prompt[:-1] if slot == slots[0] else prompt[:20], tree, logits=True))
            found.append(backend.step(run_prompt_chunks(backend, items))[0].logits[0].clone())
            for slot in slots:
                backend.close(slot)
        assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_prompt_does_not_depend_on_its_pieces(dtype: torch.dtype) -> None:
    """Whole, in pieces, beside others, token by token, or on pages of another sequence: the same K/V, bit for bit."""
    backend = GraphBackend(medium(dtype))
    (prompt,) = texts(1, (700,))
    other = texts(2, (100,))[1]

    def kept(*pieces: int, beside: bool = False) -> list[torch.Tensor]:
        slot, begin = backend.open(), 0
        for count in pieces:
            items = [greedy(slot, prompt[begin : begin + count], NO_TREE)]
            if beside:
                items.append(greedy(backend.open(), other, random_tree(20, begin)))
            backend.step(items)
            begin += count
        assert backend.length(slot) == begin == len(prompt)
        if pieces == (700,):
            backend.remember(slot, prompt)
        return [part for layer in backend.cached(slot) for part in layer]

    expected = kept(700)
    for found in (kept(300, 1, 399), kept(64, 64, 572), kept(350, 350, beside=True), kept(*[1] * 20, 680)):
        assert all(map(torch.equal, found, expected))
    shared = backend.open([*prompt, 1])
    assert backend.length(shared) == 640
    backend.step([greedy(shared, prompt[640:], NO_TREE)])
    found = [part for layer in backend.cached(shared) for part in layer]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capture_changes_nothing(dtype: torch.dtype) -> None:
    """The same kernels in the same order: the same bits, from the first run on, whatever size came between.

    The first run of a size is special: it runs twice, and must move the accepted K/V once.
    """
    model = medium(dtype)
    backends = [GraphBackend(model), GraphBackend(model, capture=False)]
    prompts = texts(3, (300, 8, 40))
    slots = [[backend.open() for _ in prompts] for backend in backends]
    rng = random.Random(0)
    for step in range(24):
        members = [0] if step % 3 == 0 else [2, 0] if step % 3 == 1 else [0, 1, 2]
        trees = {i: random_tree(rng.choice([1, 7, 30, 100]), step) for i in members}
        paths = {}
        for i, tree in trees.items():
            path = [max((n for n in range(len(tree)) if tree.parents[n] == 0), default=0)]
            paths[i] = path if path[0] else []
        results = []
        for backend, own in zip(backends, slots, strict=True):
            chunks = {i: prompts[i] if not backend.length(own[i]) else () for i in members}
            items = [greedy(own[i], chunks[i], trees[i], 8, logits=True) for i in members]
            results.append([(r.targets, r.logits.clone(), [list(t) for t in r.top]) for r in backend.step(items)])
            backend.commit([(own[i], paths[i]) for i in members])
        for captured, plain in zip(*results, strict=True):
            assert torch.equal(captured[1], plain[1])
            assert captured[0] == plain[0]
            assert captured[2] == plain[2]
    for captured, plain in zip(*slots, strict=True):
        layers = zip(backends[0].cached(captured), backends[1].cached(plain), strict=True)
        assert all(torch.equal(a, b) for ours, theirs in layers for a, b in zip(ours, theirs, strict=True))
    assert all(captured.forward.graph is not None for captured in backends[0].runner.steps.pairs.values())
    assert all(captured.forward.graph is None for captured in backends[1].runner.steps.pairs.values())


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("count", [1, 30, 128])
@pytest.mark.parametrize("context", [60, 3000])
def test_a_replayed_step_gives_the_same_bits_every_time(context: int, count: int, invariant: bool) -> None:
    """Replay it thousands of times: programs wait for each other, and a race would show here."""
    backend = GraphBackend(medium(torch.bfloat16), invariant=invariant, kv_tokens=1 << 13)
    slot, prompt = backend.open(), texts(1, (context,))[0]
    backend.step(run_prompt_chunks(backend, [greedy(slot, prompt, NO_TREE)]))
    backend.step([greedy(slot, (), random_tree(count, 0), logits=True)])
    (captured,) = [
        step for kind, step in backend.runner.steps.pairs.items() if kind.rows == kind.needed == bucket(count)
    ]
    assert captured.forward.graph is not None
    logits = backend.runner.state.buffers.logits
    first, cache = logits[:count].clone(), backend.kv.caches[0].clone()
    differed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(3000):
        captured.forward.graph.replay()
        differed += (logits[:count] != first).any()
    assert int(differed) == 0
    assert torch.equal(backend.kv.caches[0], cache)


@pytest.mark.parametrize("invariant", [True, False])
def test_graph_equals_eager(invariant: bool) -> None:
    """fp32, greedy and sampled, steps of up to 200 tokens: the eager backend's tokens, in as many steps or so."""
    model = medium(torch.float32)
    backend, eager = GraphBackend(model, invariant=invariant), EagerBackend(model)
    prompts = texts(6, (300, 8, 1, 700))
    for sampling in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, seed=3)):
        expected = [outputs(eager, [prompt], AUTOREGRESSIVE, 40, sampling)[0] for prompt in prompts]
        for config in (AUTOREGRESSIVE, LookaheadConfig(), LookaheadConfig(budget=200)):
            assert [outputs(backend, [p], config, 40, sampling)[0] for p in prompts] == expected


def test_batches_equal_their_sequences_alone() -> None:
    """Three and five at once; then eight that join one by one, with different budgets."""
    backend = GraphBackend(medium(torch.float32))
    prompts = texts(8, (300, 8, 40, 1))
    expected = [outputs(backend, [prompt], AUTOREGRESSIVE, 40)[0] for prompt in prompts]
    assert outputs(backend, prompts[:3], LookaheadConfig(), 40) == expected[:3]
    assert outputs(backend, prompts[:5], LookaheadConfig(), 40) == expected[:5]
    engine = Engine(backend)
    budgets = (1, 24, 128, 200)
    sequences = [
        DecodingSequence(prompt, LookaheadConfig().adapted(budget=budgets[i % 4]), rules=StopRules(40))
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.submit(Request(sequence))
        engine.step()
        engine.step()
    while engine.running:
        engine.step()
    assert [sequence.output for sequence in sequences] == expected


@pytest.mark.parametrize("count", [2, 5, 16])
def test_half_precision_batches_that_share_equal_their_sequences_alone(count: int) -> None:
    """With a budget that they share, and with one for each: a row's bits do not depend on the others."""
    backend = GraphBackend(medium(torch.bfloat16, 64))
    prompts = texts(count, (300, 8, 40, 1), 64)
    expected = [outputs(backend, [prompt], AUTOREGRESSIVE, 40)[0] for prompt in prompts]
    assert outputs(backend, prompts, AUTOREGRESSIVE, 40) == expected
    assert outputs(backend, prompts, without_cost(LookaheadConfig()), 40) == expected
    if count * LookaheadConfig().budget <= 1024:
        assert outputs(backend, prompts, LookaheadConfig(), 40) == expected


def test_half_precision_penalties_and_log_probabilities_do_not_depend_on_the_load() -> None:
    """Sixteen requests, each with settings of its own, together and alone: the same tokens, and log-probabilities that
    are equal bit for bit."""
    backend = GraphBackend(medium(torch.bfloat16, 1500))
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {7: 2.0}},
        {},
    ]

    def decode(places: Sequence[int], config: LookaheadConfig) -> dict[int, tuple[list[int], list[Any]]]:
        engine, requests = Engine(backend), dict[int, Request]()
        for place in places:
            sampling = SamplingParams(**settings[place % 4], seed=place, logprobs=(None, 0, 5, 20)[place // 4])
            rules = StopRules(40, frozenset([3, 5]), min_tokens=10 * (place % 3))
            requests[place] = Request(DecodingSequence(prompts[place], config, sampling, rules))
            engine.submit(requests[place])
        told: dict[int, list[Any]] = {request.id: [] for request in requests.values()}
        while engine.running:
            for event in engine.step():
                told[event.request.id] += event.logprobs or []
        return {place: (request.sequence.output, told[request.id]) for place, request in requests.items()}

    prompts = texts(16, (300, 8, 40, 1), 1500)
    together = decode(range(16), LookaheadConfig())
    for place in range(16):
        for config in (AUTOREGRESSIVE, LookaheadConfig()):
            assert decode([place], config) == {place: together[place]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_after_the_pages_were_replaced(dtype: torch.dtype) -> None:
    """Graphs hold the pages' address, so they must be dropped with them. The results stay the same, bit for bit."""
    model, prompts = medium(dtype), texts(3, (100, 8))
    wide = GraphBackend(model, kv_tokens=1 << 14)
    expected = [run(wide, [prompt], LookaheadConfig(), 300)[0] for prompt in prompts]
    backend = GraphBackend(model, kv_tokens=8 * PAGE)
    for room in (400, 600, 900):
        backend.check_room(1, room)
        assert min(backend.kv.pages) * PAGE >= room
        found = [run(backend, [prompt], LookaheadConfig(), 300)[0] for prompt in prompts]
        assert [sequence.output for sequence in found] == [sequence.output for sequence in expected]
        assert [sequence.stats.steps for sequence in found] == [sequence.stats.steps for sequence in expected]
        assert all(captured.forward.graph is not None for captured in backend.runner.steps.pairs.values())
    if dtype is torch.float32:
        backend.check_room(3, 400)
        assert outputs(backend, prompts, LookaheadConfig(), 300) == [sequence.output for sequence in expected]


def test_pages_are_made_while_memory_is_short() -> None:
    """More than there is, is refused; what was there before still works."""
    model, (prompt,) = medium(torch.bfloat16), texts(1, (40,))
    backend = GraphBackend(model, kv_tokens=1 << 12)
    expected = outputs(backend, [prompt], LookaheadConfig(), 24)
    with pytest.raises(UnsupportedModelError, match="GiB are free"):
        backend.check_room(1 << 16, 4096)
    assert outputs(backend, [prompt], LookaheadConfig(), 24) == expected
    with pytest.raises(UnsupportedModelError, match="GiB are free"):
        GraphBackend(model, kv_tokens=1 << 40)


def test_nothing_is_captured_after_prepare() -> None:
    """One sequence of any prompt, by trees and token by token, in steps that were captured in advance."""
    backend = GraphBackend(medium(torch.bfloat16))
    backend.prepare(500, 128)
    captures, memory = backend.captures, torch.cuda.memory_allocated()
    assert all(captured.graph is not None for captured in backend.runner.steps.forwards.values())
    for prompt in texts(8, (1, 2, 9, 40, 100, 300, 372)):
        for config in (LookaheadConfig(), AUTOREGRESSIVE, LookaheadConfig(window=0, budget=20)):
            outputs(backend, [prompt], config, 40)
    assert backend.captures == captures
    assert any(captured.graph_ahead is not None for captured in backend.runner.steps.forwards.values())
    assert torch.cuda.memory_allocated() <= memory + (1 << 20)


def test_a_captured_step_outlives_the_capture_of_a_larger_one() -> None:
    """A graph writes to the addresses it was captured with. If some of that memory were freed when a larger step needs
    more room, its next owner would find it changed, and the splits' counters would not start at zero.
    """
    model = medium(torch.bfloat16)
    backend = GraphBackend(model)
    generator = torch.Generator("cuda").manual_seed(0)
    layers = [
        tuple(torch.randn(4, 900, 64, generator=generator, device="cuda").bfloat16() for _ in range(2))
        for _ in range(4)
    ]
    slots = [backend.open(), backend.open()]
    for slot in slots:
        backend.adopt(slot, 900, layers)

    def alone() -> torch.Tensor:
        return backend.step([greedy(slots[0], (), root(5), logits=True)])[0].logits.clone()

    expected = alone()
    assert torch.equal(alone(), expected)
    for size in (30, 100, 128, 300):
        backend.step([greedy(slots[1], (), random_tree(size, 0))])
        # Take any memory that was freed: many pieces of every size, filled with sevens.
        taken = [
            torch.full((1 << bits,), 7, dtype=torch.int32, device="cuda") for bits in range(2, 24) for _ in range(8)
        ]
        assert torch.equal(alone(), expected)
        assert all(bool((piece == 7).all()) for piece in taken)
        del taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_ahead_give_the_bits_of_steps_that_were_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured or not, alone and in padded batches, steps ahead give the same tokens and the same K/V, in half
    precision as well. Pages are taken on the way.
    """
    model, prompts = medium(dtype, 64), texts(5, (300, 8, 1, 40), 64)
    batches = [prompts[:1], prompts[1:2], prompts[:3], prompts]

    def decoded(**options: Any) -> tuple[GraphBackend, list[list[int]], list[torch.Tensor]]:
        kept: list[torch.Tensor] = []
        backend = GraphBackend(model, **options)
        found = []

        def keep(request: Request) -> None:
            kept.extend(kv for layer in backend.cached(request.slot) for kv in layer)

        for batch in batches:
            engine = Engine(backend)
            sequences = [
                DecodingSequence(prompt, AUTOREGRESSIVE, rules=StopRules(60 + 9 * i)) for i, prompt in enumerate(batch)
            ]
            for sequence in sequences:
                engine.submit(Request(sequence, finished=keep))
            while engine.running:
                engine.step()
            found += [sequence.output for sequence in sequences]
        return backend, found, kept

    backend, found, kept = decoded()
    ahead = {
        kind.rows for kind, captured in backend.runner.steps.pairs.items() if captured.forward.graph_ahead is not None
    }
    assert {1, 4} <= ahead
    for hint, capture in ((True, False), (False, True)):
        if not hint:
            monkeypatch.setattr(PlainRun, "_continues", lambda *given: False)
        other, expected, wanted = decoded(capture=capture)
        assert found == expected
        assert len(kept) == len(wanted)
        assert all(map(torch.equal, kept, wanted))
        assert all(captured.forward.graph_ahead is None for captured in other.runner.steps.pairs.values())


def test_a_step_ahead_that_nobody_waits_for() -> None:
    """It still runs when other work comes: on another stream, of another backend, or none at all."""
    model, prompts = medium(torch.float32), texts(4, (300, 8))
    first, *others = (outputs(GraphBackend(model), [prompt], AUTOREGRESSIVE, 40)[0] for prompt in prompts)
    stop = [token for i, token in enumerate(first) if token not in first[:i]][-1]
    backend = GraphBackend(model)

    def stopped(backend: GraphBackend) -> list[int]:
        sequence = DecodingSequence(prompts[0], AUTOREGRESSIVE, rules=StopRules(40, frozenset([stop])))
        engine = Engine(backend)
        engine.submit(Request(sequence))
        while engine.running:
            engine.step()
        return sequence.output

    for config in (AUTOREGRESSIVE, LookaheadConfig()):
        for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
            for prompt, expected in zip(prompts[1:], others, strict=True):
                assert stopped(backend) == first[: first.index(stop) + 1]
                with torch.cuda.stream(stream):
                    assert outputs(backend, [prompt], config, 40) == [expected]
                torch.cuda.synchronize()
    for _ in range(3):
        left = GraphBackend(model)
        stopped(left)
        del left
        gc.collect()
        assert outputs(GraphBackend(model), prompts[1:2], AUTOREGRESSIVE, 40) == others[:1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_the_graph_backend(dtype: torch.dtype) -> None:
    """In half precision as well, where its kernels and transformers' are further apart."""
    said: list[str] = []
    assert isinstance(make_backend(medium(dtype), "auto", said.append), GraphBackend), said


def test_graphs_that_nobody_needs_end_between_captures() -> None:
    """A backend in a reference cycle is freed by the garbage collector, which may run at any allocation. If it ran
    during a capture, freeing the backend's graphs would end the process."""
    before = gc.get_threshold()
    model, (prompt,) = medium(torch.float32), texts(1, (20,))
    expected = outputs(GraphBackend(model), [prompt], LookaheadConfig(), 24)
    for _ in range(3):
        left = GraphBackend(model)
        outputs(left, [prompt], LookaheadConfig(), 8)
        left.itself = left  # type: ignore[attr-defined]
        del left
        gc.set_threshold(1)
        try:
            assert outputs(GraphBackend(model), [prompt], LookaheadConfig(), 24) == expected
        finally:
            gc.set_threshold(*before)


def test_generate_on_the_graph_backend() -> None:
    """`custom_generate` with backend 'auto': fp32, stock's tokens, captured steps kept from call to call."""
    model = medium(torch.float32)
    inputs = [torch.tensor([prompt], device="cuda") for prompt in texts(3, (40, 8, 300))]
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}):
        for ids in inputs:
            found = []
            for hook in ({}, {"custom_generate": lookahead.decoding(backend="auto", window=3, ngram=4)}):
                torch.manual_seed(1)
                found.append(model.generate(ids, max_new_tokens=40, **options, **hook).tolist())
            assert found[0] == found[1]
    kept = known[model].graph
    assert kept is not None
    assert all(captured.forward.graph is not None for captured in kept.runner.steps.pairs.values())
