"""The drafter in C and its twin in Python: the same tables, the same draft tokens bit for bit, the same generations."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from toy import steps, targets_of, toy_model

from lookahead import LookaheadConfig
from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.choice import DraftBudget, SequenceBatch, choose_trees
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.draft import Candidates, Drafter, Limits
from lookahead.algorithm.native.build import SIGNATURES, library
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.native.memory import NativeTable
from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.recycle import RecycleSource
from lookahead.algorithm.successors import MAX_SUCCESSORS, ORIGIN_GROUPS, SuccessorDict, Successors, SuccessorTables
from lookahead.algorithm.tree import DraftTokens, TokenTree
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import StepInput
from lookahead.backends.graph.backend import GraphBackend
from lookahead.config import SOURCES, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

if library() is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

OURS, TWIN = NativeDrafter(library()), PythonDrafter()
TOKENS = (0, 1, 2, 3, 4, 5, 49151, 2**31 - 1)
"""Few, so that keys and chains meet; and the largest that there can be."""

token = st.sampled_from(TOKENS)
before = st.sampled_from((-1, *TOKENS))
keys = st.one_of(st.tuples(token), st.tuples(before, token), st.tuples(before, before, token))


@st.composite
def successors(draw: st.DrawFn, count: int | None = None) -> Successors:
    tokens = draw(st.lists(token, min_size=count or 0, max_size=count or MAX_SUCCESSORS, unique=True))
    levels = st.integers(0, LEVELS - 1)
    return (*tokens, *sorted(draw(st.lists(levels, min_size=len(tokens), max_size=len(tokens)))))


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> TokenTree:
    """Any tree, any needed nodes, in any order."""
    size = draw(st.integers(1, most))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, size))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = draw(st.lists(token, min_size=size, max_size=size))
    return TokenTree(tokens, parents, depths, draw(st.lists(st.integers(0, size - 1), unique=True)))


# Tables


@st.composite
def kept(draw: st.DrawFn) -> tuple[str, Any]:
    """A step's top tokens; all of one step are as many."""
    tree, count = draw(trees()), draw(st.integers(1, MAX_SUCCESSORS))
    top = np.array([draw(successors(count)) for _ in tree.needed], dtype=np.int32).reshape(-1, 2 * count)
    return "store_step", (tree, (draw(before), draw(before)), top)


operations = st.one_of(
    kept(),
    kept(),
    st.tuples(st.just("evict"), st.tuples(st.integers(0, 12))),
    st.tuples(st.just("put"), st.tuples(keys, successors())),
    st.tuples(st.just("clear"), st.just(())),
)


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(operations, max_size=30))
def test_tables_hold_the_same_in_the_same_order(done: list[tuple[str, Any]]) -> None:
    ours, twin = OURS.new_table(), TWIN.new_table()
    for operation, data in done:
        for table in (ours, twin):
            getattr(table, operation)(*data)
        assert list(ours.items()) == list(twin.items())
        assert len(ours) == len(twin)
        assert all(ours.get(key) == twin.get(key) for key in ((0,), (1, 2), (-1, -1, 3)))


def test_a_table_that_grows_and_forgets_for_long() -> None:
    """Through many doublings, and round and round at the limit."""
    rng, ours, twin = random.Random(1), OURS.new_table(), TWIN.new_table()
    for i in range(400):
        limit = 100_000 if i < 100 else 3000
        tokens = [rng.randrange(2000) for _ in range(60)]
        tree = TokenTree(tokens, range(-1, 59), range(60), range(60))
        for table in (ours, twin):
            table.store_step(tree, (-1, 7), np.array([(i, j, 0, 3) for j in range(60)], dtype=np.int32))
            table.evict(limit)
    assert len(twin) == 3000
    assert list(ours.items()) == list(twin.items())


@pytest.mark.parametrize("size", [1, 60, 500, 5000])
def test_a_cleared_table_is_as_good_as_new(size: int) -> None:
    """Small ones keep their room; nothing of what stood there is found again, or forgotten twice."""
    ours, twin = OURS.new_table(), TWIN.new_table()
    for turn in range(3):
        tree = TokenTree([turn + i for i in range(size)], range(-1, size - 1), range(size), range(size))
        for table in (ours, twin):
            table.store_step(tree, (-1, 7), np.array([(turn, j, 0, 3) for j in range(size)], dtype=np.int32))
            table.evict(2 * size)
        assert list(ours.items()) == list(twin.items())
        ours.clear()
        twin.clear()
        assert (len(ours), list(ours.items()), ours.get((turn,))) == (0, [], None)


def test_what_a_table_refuses() -> None:
    table = OURS.new_table()
    for bad in ((1,), (*range(9), *[0] * 9)):
        with pytest.raises(ValueError, match=f"{len(bad)} numbers are not up to 8 successors"):
            table.put((3,), bad)
    tree = TokenTree([3, 4], [-1, 0], [0, 1], [0, 1])
    with pytest.raises(ValueError, match="top tokens of 1 nodes, and 2 nodes are needed"):
        table.store_step(tree, (-1, -1), np.array([(1, 0)], dtype=np.int32))
    with pytest.raises(ValueError, match="a tree of 2 tokens with 1 parents"):
        table.store_step(TokenTree([3, 4], [-1], [0, 1], [0, 1]), (-1, -1), np.zeros((2, 2), dtype=np.int32))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(table)


@pytest.mark.slow
def test_memory_is_freed_with_its_table() -> None:
    freed: list[int] = []
    compiled = library()

    def free(handle: int) -> None:
        freed.append(handle)
        compiled.table_free(handle)

    counting = SimpleNamespace(**{name: getattr(compiled, name) for name in SIGNATURES} | {"table_free": free})
    table = NativeTable(counting)
    handle = table.handle
    gc.collect()
    assert freed == []
    del table
    gc.collect()
    assert freed == [handle]


def test_threads_share_a_table() -> None:
    """Each keeps its successors in the one that all read."""
    shared, failures = OURS.new_table(), list[BaseException]()

    def work(number: int) -> None:
        try:
            for i in range(200):
                own = OURS.new_table()
                tree, top = TokenTree([number, i], [-1, 0], [0, 1], [0, 1]), np.array([(i, 0), (number, 3)], np.int32)
                own.store_step(tree, (-1, -1), top)
                candidates = Candidates.after([number], Calibration().rates)
                candidates.tables = SuccessorTables(OURS.new_table(), own, shared, 0)
                OURS.search(candidates, Limits(20, 9))
                shared.store_step(tree, (-1, -1), top)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert None not in {shared.get((number, i)) for number in range(1000, 1004) for i in range(200)}


# Drafts


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """Successors, chains, rates, a text, and how much to take of it."""
    # Few different rates: ties are decided by the rest of a candidate's order.
    rate = st.sampled_from((0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.95, 1.0)) if draw(st.booleans()) else st.floats(0, 1)
    rates = draw(st.lists(rate, min_size=40, max_size=40))
    chains = []
    for tokens in draw(st.lists(st.lists(token, max_size=6), max_size=6)):
        chains.append((tokens, draw(st.lists(st.integers(0, 39), min_size=len(tokens), max_size=len(tokens)))))
    many = st.dictionaries(keys, successors(), max_size=60)
    return {
        "rates": rates,
        "levels": draw(st.randoms(use_true_random=False)),
        "chains": chains,
        "tables": draw(st.none() | st.tuples(many, many, st.none() | many, st.none() | many)),
        "text": draw(st.lists(token, min_size=1, max_size=4)),
        "limits": Limits(
            draw(st.integers(-1, 60)),
            draw(st.integers(-1, 9) | st.just(2**40)),
            draw(st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=70)),
            draw(st.integers(1, 20)),
            draw(st.sampled_from((0.0, 0.01, 0.1, 0.5))),
        ),
    }


def grown(drafter: Drafter, case: dict[str, Any], calibration: Calibration) -> DraftTokens:
    """What the drafter takes; without tables there is no source of successors at all."""
    candidates = Candidates.after(case["text"], calibration.rates)
    for chain in case["chains"]:
        candidates.add_chain(*chain)
    if case["tables"] is not None:
        others = [None if entries is None else drafter.new_table() for entries in case["tables"][2:]]
        source = RecycleSource(drafter.new_table, others[0], calibration, others[1])
        tables = source.tables
        for table, entries in zip((tables.last, tables.own, *others), case["tables"], strict=True):
            for key, value in (entries or {}).items():
                table.put(key, value)
        source.propose(case["text"], candidates)
    return drafter.search(candidates, case["limits"])


@settings(max_examples=examples(200), deadline=None)
@given(asked())
def test_drafts_are_the_same_bit_for_bit(case: dict[str, Any]) -> None:
    calibration = Calibration()
    first = RecycleSource(SuccessorDict, None, calibration).tables.first_origin
    # The chains' rates, and the successors' own: usually falling with the level, as they are, but not always.
    for place, rate in enumerate(case["rates"]):
        calibration.rates[place] = rate
    if case["levels"].random() < 0.5:
        for kind in range(ORIGIN_GROUPS):
            place = first + kind * LEVELS + case["levels"].randrange(LEVELS)
            calibration.rates[place] = case["levels"].choice(case["rates"])
    assert repr(grown(OURS, case, calibration)) == repr(grown(TWIN, case, calibration))


def test_a_chain_goes_before_a_successor_of_the_same_score() -> None:
    """The chain's 1/2 leaves the successor 1/2, which is sure of its token."""
    calibration = Calibration()
    first = RecycleSource(SuccessorDict, None, calibration).tables.first_origin
    calibration.rates[0], calibration.rates[first + 2 * LEVELS] = 0.5, 1.0
    case = {"tables": ({}, {(3,): (7, 0)}, None, None), "chains": [([8], [0])], "text": [3], "limits": Limits(2, 1)}
    ours, twins = grown(OURS, case, calibration), grown(TWIN, case, calibration)
    assert (list(ours.tokens), list(ours.scores)) == ([8, 7], [0.5, 0.5])
    assert ours == twins


def test_a_large_draft_takes_all_of_the_room() -> None:
    rng = random.Random(2)

    def some(count: int, below: int) -> list[int]:
        return [rng.randrange(below) for _ in range(count)]

    own = {(t,): (*rng.sample(range(500), 8), *sorted(some(8, LEVELS))) for t in range(500)}
    shared = {(a, b): (*rng.sample(range(500), 8), *[3] * 8) for a in range(60) for b in range(60)}
    case: dict[str, Any] = {
        "tables": ({}, own, shared, {(t,): (*rng.sample(range(500), 8), *[5] * 8) for t in range(500)}),
        "chains": [(some(30, 500), some(30, 100)) for _ in range(60)],
        **{"text": [1, 2, 3], "limits": Limits(2000, 40, None, 20)},
    }
    calibration = Calibration()
    RecycleSource(SuccessorDict, None, calibration)
    for origin in range(100):
        calibration.rates[origin] = rng.random()
    ours = grown(OURS, case, calibration)
    assert len(ours.tokens) == 2000
    assert repr(ours) == repr(grown(TWIN, case, calibration))


# Numbers that point nowhere


def test_what_points_nowhere_is_refused() -> None:
    """Memory that is not ours is never read."""
    table = OURS.new_table()
    for needed, parents in (([2], [-1, 0]), ([-1], [-1, 0]), ([1], [-1, 1]), ([1], [-1, 7])):
        with pytest.raises(IndexError, match="does not exist"):
            table.store_step(TokenTree([1, 2], parents, [0, 1], needed), (-1, -1), np.array([(5, 0)], dtype=np.int32))
    for origin in (-1, 3):
        candidates = Candidates.after([1], array("d", [0.5] * 3))
        candidates.add_chain([5], [origin])
        with pytest.raises(IndexError, match="does not exist"):
            OURS.search(candidates, Limits(3, 3))
    candidates = Candidates.after([1], array("d", [0.5] * 3))
    candidates.tables = SuccessorTables(table, table, None, 0)
    with pytest.raises(IndexError, match="does not exist"):
        OURS.search(candidates, Limits(3, 3))
    candidates.tables = SuccessorTables(SuccessorDict(), table, None, 0)
    with pytest.raises(TypeError, match="cannot read a SuccessorDict"):
        OURS.search(candidates, Limits(3, 3))


# Whole generations


EVERYTHING = LookaheadConfig(window=4, ngram=4, guesses=4, budget=48)
COST = tuple(1 + 0.03 * k for k in range(48))


def told(drafter: Drafter, vocabulary: int, config: LookaheadConfig, sampling: SamplingParams) -> list[Any]:
    """Every tree and block of three requests that share what they learn."""
    memory, model, told = SharedMemory(drafter), toy_model(vocabulary, seed=3, order=2), list[Any]()
    for prompt in ([1, 2, 3], [2], [1, 2, 3, 1, 2]):
        sequence = DecodingSequence(prompt, config, sampling, StopRules(max_tokens=60), memory=memory)
        told += list(steps(sequence, model))
        told.append(sequence.stats)
    return [*told, memory.calibration.rates, list(memory.successors.items())]


@pytest.mark.parametrize("vocabulary", [3, 5, 40])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=5)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize(
    "config",
    [
        EVERYTHING,
        replace(EVERYTHING, step_cost=COST),
        replace(EVERYTHING, recycle_scope="request"),
        replace(EVERYTHING, window=0, sources=("recycle",)),
        LookaheadConfig.paper(3, 4, 4, prompt=True),
        LookaheadConfig.jacobi(8),
        LookaheadConfig.autoregressive(),
    ],
    ids=["all", "cost", "request", "recycle", "paper", "fixed-point", "plain"],
)
@pytest.mark.thinned(1, most=4)
def test_every_step_of_a_generation_is_the_same(
    vocabulary: int, config: LookaheadConfig, sampling: SamplingParams
) -> None:
    assert told(OURS, vocabulary, config, sampling) == told(TWIN, vocabulary, config, sampling)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("ngram", [4, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.thinned(1, most=1)
def test_every_step_of_the_graph_backend_is_the_same(
    model: Any, temperature: float, ngram: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of a tiny Llama, with packets and top tokens as they go to and come from a device. The last of its
    sequences runs alone, with a window. Shared, the drafts in C are cached."""
    stood, show = list[bool](), DecodingSequence._update_sources
    learned = list[bool]()

    def shown(self: DecodingSequence, tree: Any, output: Any, verdict: Any, ngrams: Any) -> None:
        learned.append(verdict.learned)
        show(self, tree, output, verdict, ngrams)

    monkeypatch.setattr(DecodingSequence, "_update_sources", shown)

    def run(drafter: Drafter) -> list[Any]:
        cost = PassCost(COST)
        # Otherwise trees would depend on how busy the machine is.
        cost.record_pass = lambda rows, seconds, reads=0.0: None  # type: ignore[method-assign]
        engine = Engine(GraphBackend(copy.deepcopy(model)), DraftBudget(cost if shared else None))
        memory, seen = SharedMemory(drafter), list[Any]()
        config = LookaheadConfig(window=3, ngram=ngram, guesses=4, budget=40, sources=SOURCES)
        config = without_cost(config) if shared else config
        for seed, prompt in enumerate([[5, 6, 7, 5, 6], [9], [3, 4, 3, 4, 3, 4]]):
            sampling, rules = SamplingParams(temperature=temperature, seed=seed), StopRules(max_tokens=14 + 6 * seed)
            sequence = DecodingSequence(prompt, config, sampling, rules, memory=memory)
            stood.append(sequence.cached_draft is not None)
            engine.submit(Request(sequence))
        accept_and_commit = engine.accept_and_commit

        def seen_in(results: Any) -> Any:
            seen.extend((one.input.tree, one.output.targets, np.asarray(one.output.top).tolist()) for one in results)
            return accept_and_commit(results)

        engine.accept_and_commit = seen_in  # type: ignore[method-assign]
        while engine.running:
            seen += [event.tokens for event in engine.step()]
        return [*seen, list(memory.successors.items()), memory.calibration.rates]

    ours = run(OURS)
    assert (all(stood), all(learned), len(learned) > 10) == (shared, True, True)
    learned.clear()
    assert ours == run(TWIN)
    assert not any(learned)


@pytest.mark.parametrize("seed", range(6))
def test_a_prediction_goes_before_the_text(seed: int) -> None:
    """So do equals of it, in C as in Python."""
    rng = random.Random(seed)
    prompt, prediction = ([rng.randrange(4) for _ in range(12)] for _ in range(2))

    def run(drafter: Drafter) -> list[Any]:
        rules, memory = StopRules(max_tokens=30), SharedMemory(drafter)
        sequence = DecodingSequence(prompt, EVERYTHING, None, rules, memory=memory, prediction=prediction)
        return list(steps(sequence, toy_model(4, seed, order=2)))

    assert run(OURS) == run(TWIN)


@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_alone_without_a_window(seed: int) -> None:
    """Its draft is cached in C; a step with fewer tokens than its budget needs another."""
    rng = random.Random(seed)
    prompt = [rng.randrange(4) for _ in range(12)]
    config = LookaheadConfig(window=0, ngram=4, guesses=4, budget=40, sources=SOURCES)

    def run(drafter: Drafter) -> list[Any]:
        sequence = DecodingSequence(prompt, config, None, StopRules(max_tokens=30), memory=SharedMemory(drafter))
        assert (sequence._draft_alone is not None) is (drafter is OURS)
        seen, proposed = list[Any](), sequence.propose

        def propose() -> TokenTree:
            seen.append((proposed(6), proposed(1), proposed(40)))
            return proposed()

        sequence.propose = propose  # type: ignore[method-assign, assignment]
        seen += steps(sequence, toy_model(4, seed, order=2))
        return seen

    ours = run(OURS)
    assert ours == run(TWIN)
    assert any(small.size == 6 < large.size for small, _, large in (one for one in ours if len(one) == 3))


def test_who_does_not_learn_while_the_device_runs_learns_before_the_next_step(model: Any) -> None:
    """Also what C has learned early is put under the right tokens."""

    def run(late: bool) -> Any:
        backend, memory = GraphBackend(copy.deepcopy(model)), SharedMemory(OURS)
        sequence = DecodingSequence([5, 6, 7, 5, 6], EVERYTHING, None, StopRules(max_tokens=30), memory=memory)
        slot = backend.open()
        while sequence.finish_reason is None:
            tree = sequence.propose()
            if not late:
                sequence.learn_while_running()
            chunk = sequence.tokens[backend.length(slot) : -1]
            outputs = backend.step([StepInput(slot, chunk, tree, SamplingParams(), (), 8)])
            verdict = OURS.verification([tree], [sequence.learner]).accept(outputs)[0]
            assert isinstance(verdict, Verdict)
            backend.commit([(slot, sequence.accept_step(tree, outputs[0], sequence.apply_stop_rules(verdict)).path)])
        return sequence.tokens, set(memory.successors.items())

    (text, kept), (same_text, kept_late) = run(False), run(True)
    assert (text, kept) == (same_text, kept_late)


def test_a_text_without_an_end_fits_into_c() -> None:
    rules, memory, shared = StopRules(max_tokens=2**40), SharedMemory(OURS), without_cost(EVERYTHING)
    sequences = [DecodingSequence([1, 2, 1], shared, None, rules, memory=memory) for _ in range(9)]
    assert all(sequence.cached_draft for sequence in sequences)
    assert all(len(tree) > 1 for tree in choose_trees(sequences))


@pytest.mark.parametrize("window", [0, 3])
def test_a_batch_keeps_its_drafts_while_it_has_the_same_sequences(window: int) -> None:
    """Its trees are those of a list, whose drafts are made again for every step. A window changes the drafts."""
    config, model = without_cost(replace(EVERYTHING, window=window, budget=100)), toy_model(4, 3, order=2)

    def run(batch_of: Callable[[list[DecodingSequence]], Sequence[DecodingSequence]]) -> tuple[list[Any], list[Any]]:
        memory, rules = SharedMemory(OURS), StopRules(max_tokens=60)
        sequences = [DecodingSequence([1, 2, n % 3, 1, 2], config, None, rules, memory=memory) for n in range(3)]
        seen, drafts = list[Any](), list[Any]()
        for running in (sequences, sequences[1:]):
            batch = batch_of(running)
            for limit in (50, 9, None, 50):
                trees = choose_trees(batch, limit)
                seen.append((trees, [sequence.best_refused for sequence in running]))
                drafts.append(getattr(batch, "drafts", None))
                for sequence, tree in zip(running, trees, strict=True):
                    sequence.learn_while_running()
                    sequence.accept_step(tree, targets_of(sequence, tree, model))
        return seen, drafts

    (trees, drafts), (listed, _) = run(SequenceBatch), run(list)
    assert trees == listed
    assert any(len(tree) > 1 for tree in trees[-1][0])
    if window:
        assert drafts == [None] * 8
    else:
        first, *_, last = drafts
        assert [id(one) for one in drafts] == [id(first)] * 4 + [id(last)] * 4
        assert [len(one.drafts) for one in (first, last)] == [3, 2]


def test_memory_in_c_is_freed_with_its_sequence() -> None:
    """At once, not when the garbage collector comes."""
    memory, shared = SharedMemory(OURS), without_cost(EVERYTHING)
    sequences = [DecodingSequence([1, 2, 1], shared, memory=memory) for _ in range(9)]
    choose_trees(sequences)
    texts = [weakref.ref(sequence._candidates.text) for sequence in sequences]
    gc.collect()
    gc.disable()
    try:
        del sequences
        assert not any(text() for text in texts)
    finally:
        gc.enable()
