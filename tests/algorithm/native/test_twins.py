"""C and its Python twins: the same rows, the same drafts bit for bit, the same packets, the same generations."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy import steps, toy_model

from lookahead import LookaheadConfig
from lookahead.algorithm.draft import Draft, Guesses
from lookahead.algorithm.native import build as native
from lookahead.algorithm.native.drafter import TOP, NativeMemory, NativeText, Row
from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory, build
from lookahead.algorithm.sources.calibration import Calibration, Outcome
from lookahead.algorithm.sources.recycle import DictMemory, RecycleSource
from lookahead.algorithm.tree import TokenTree, window_layout
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.packet import Packet
from lookahead.config import SOURCES, SamplingParams, StopRules
from lookahead.engine.engine import Engine

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

TOKENS = (0, 1, 2, 3, 4, 5, 49151, 2**31 - 1)
"""Few, so that keys and chains meet; and the largest that there can be."""


@contextmanager
def python() -> Iterator[None]:
    """The twins in place of the C functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        yield


token = st.sampled_from(TOKENS)
before = st.sampled_from((-1, *TOKENS))
keys = st.one_of(token, st.tuples(before, token), st.tuples(before, before, token))


@st.composite
def rows(draw: st.DrawFn, count: int | None = None) -> Row:
    tokens = draw(st.lists(token, min_size=count or 0, max_size=count or TOP, unique=True))
    levels = st.integers(0, LEVELS - 1)
    return (*tokens, *sorted(draw(st.lists(levels, min_size=len(tokens), max_size=len(tokens)))))


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> TokenTree:
    """Any tree, any needed rows, in any order."""
    size = draw(st.integers(1, most))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, size))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = draw(st.lists(token, min_size=size, max_size=size))
    return TokenTree(tokens, parents, depths, draw(st.lists(st.integers(0, size - 1), unique=True)))


# Memory


@st.composite
def kept(draw: st.DrawFn) -> tuple[str, Any]:
    """A step's rows; all of one step are of one length, and come as tuples or as an array."""
    tree = draw(trees())
    count = draw(st.integers(1, TOP))
    top: Any = [draw(rows(count)) for _ in tree.needed]
    if draw(st.booleans()):
        top = np.array(top, dtype=np.int32).reshape(len(top), 2 * count)
    return "keep", (tree, (draw(before), draw(before)), top)


operations = st.one_of(
    kept(),
    kept(),
    st.tuples(st.just("forget"), st.integers(0, 12)),
    st.tuples(st.just("set"), st.tuples(keys, rows())),
    st.tuples(st.just("pop"), keys),
    st.tuples(st.just("clear"), st.none()),
)


def perform(memory: Any, operation: str, data: Any) -> Any:
    if operation == "keep":
        return memory.keep(*data)
    if operation == "forget":
        return memory.forget(data)
    if operation == "set":
        memory[data[0]] = data[1]
        return None
    if operation == "pop":
        return memory.pop(data, None)
    return memory.clear()


@settings(max_examples=300, deadline=None)
@given(st.lists(operations, max_size=30))
def test_memories_hold_the_same_in_the_same_order(done: list[tuple[str, Any]]) -> None:
    our, twin = NativeMemory(), DictMemory()
    for operation, data in done:
        assert perform(our, operation, data) == perform(twin, operation, data)
        assert list(our.items()) == list(twin.items())
        assert len(our) == len(twin)
        assert all(our.get(key) == twin.get(key) for key in (0, (1, 2), (-1, -1, 3)))


def test_a_memory_that_grows_and_forgets_for_long() -> None:
    """Through many doublings, and round and round at the limit."""
    rng, our, twin = random.Random(1), NativeMemory(), DictMemory()
    for i in range(400):
        limit = 100_000 if i < 100 else 3000
        tokens = [rng.randrange(2000) for _ in range(60)]
        tree = TokenTree(tokens, list(range(-1, 59)), list(range(60)), list(range(60)))
        for memory in (our, twin):
            memory.keep(tree, (-1, 7), [(i, j, 0, 3) for j in range(60)])
            memory.forget(limit)
    assert len(twin) == 3000
    assert list(our.items()) == list(twin.items())


@pytest.mark.parametrize("size", [1, 60, 500, 5000])
def test_a_cleared_memory_is_as_good_as_new(size: int) -> None:
    """Small ones keep their room; nothing of what stood there is found again, or forgotten twice."""
    our, twin = NativeMemory(), DictMemory()
    for turn in range(3):
        tree = TokenTree(
            [turn + i for i in range(size)], list(range(-1, size - 1)), list(range(size)), list(range(size))
        )
        for memory in (our, twin):
            memory.keep(tree, (-1, 7), [(turn, j, 0, 3) for j in range(size)])
            memory.forget(2 * size)
        assert list(our.items()) == list(twin.items())
        our.clear()
        twin.clear()
        assert (len(our), list(our), our.get(turn)) == (0, [], None)


def test_a_memory_is_a_mapping() -> None:
    memory = NativeMemory()
    assert not memory
    memory.update({3: (5, 0), (1, 3): (6, 7, 0, 15), (-1, 1, 3): ()})
    assert memory == {(1, 3): (6, 7, 0, 15), 3: (5, 0), (-1, 1, 3): ()}
    assert list(memory) == [3, (1, 3), (-1, 1, 3)]
    assert (memory[1, 3], (1, 3) in memory, (3, 1) in memory, memory.get(1)) == ((6, 7, 0, 15), True, False, None)
    with pytest.raises(KeyError, match="4"):
        memory[4]
    with pytest.raises(KeyError, match="4"):
        del memory[4]
    for other in (copy.copy(memory), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert list(other.items()) == list(memory.items())
        other[3] = (9, 1)
        assert memory[3] == (5, 0)
    for bad in ((1,), (*range(9), *[0] * 9)):
        with pytest.raises(ValueError, match=f"a row of {len(bad)} numbers"):
            memory[3] = bad
    with pytest.raises(ValueError, match="1 top rows for 2 needed rows"):
        memory.keep(TokenTree([3, 4], [-1, 0], [0, 1], [0, 1]), (-1, -1), [(1, 0)])


def test_memory_is_freed_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    library = native.library()

    def free(handle: int) -> None:
        freed.append(handle)
        library.memory_free(handle)

    counting = SimpleNamespace(**{name: getattr(library, name) for name in native.SIGNATURES} | {"memory_free": free})
    monkeypatch.setattr(native, "library", lambda: counting)
    memory = NativeMemory()
    handle = memory.handle
    gc.collect()
    assert freed == []
    del memory
    gc.collect()
    assert freed == [handle]


def test_threads_share_a_memory() -> None:
    """Each keeps its rows in the one that all read."""
    shared, failures = NativeMemory(), []

    def work(number: int) -> None:
        try:
            for i in range(200):
                own = NativeMemory()
                tree = TokenTree([number, i], [-1, 0], [0, 1], [0, 1])
                own.keep(tree, (-1, -1), [(i, 0), (number, 3)])
                draft = Draft([number], Calibration().rates)
                draft.memories = None, own, shared, 0
                draft.grow(20, 9)
                shared.keep(tree, (-1, -1), [(i, 0), (number, 3)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {(number, i) in shared for number in range(1000, 1004) for i in range(200)} == {True}


# Drafts


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """Rows, chains, rates, a text, and how much to take of it."""
    # Few different rates: ties are decided by the rest of a candidate's order.
    rate = st.sampled_from((0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.95, 1.0)) if draw(st.booleans()) else st.floats(0, 1)
    rates = draw(st.lists(rate, min_size=40, max_size=40))
    chains = []
    for tokens in draw(st.lists(st.lists(token, max_size=6), max_size=6)):
        chains.append((tokens, draw(st.lists(st.integers(0, 39), min_size=len(tokens), max_size=len(tokens)))))
    many = st.dictionaries(keys, rows(), max_size=60)
    return {
        "rates": rates,
        "levels": draw(st.randoms(use_true_random=False)),
        "chains": chains,
        "last": draw(many),
        "own": draw(st.none() | many),
        "shared": draw(st.none() | many),
        "text": draw(st.lists(token, min_size=1, max_size=4)),
        "room": draw(st.integers(-1, 60)),
        "depth": draw(st.integers(-1, 9) | st.just(2**40)),
        "cost": draw(st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=70)),
        "base": draw(st.integers(1, 20)),
        "window": (draw(st.integers(0, 5)), draw(st.integers(2, 5))),
    }


def drafted(case: dict[str, Any], kind: type[Any], rates: Calibration) -> Draft:
    """A draft with these rows; no rows of its own means no source of rows at all."""
    draft = Draft(case["text"], rates.rates)
    for chain in case["chains"]:
        draft.chain(*chain)
    if case["own"] is not None:
        shared = None if case["shared"] is None else kind()
        source = RecycleSource(shared, rates)
        source.memory = kind()
        source.memory.update(case["own"])
        source.last = kind()
        source.last.update(case.get("last", {}))
        if shared is not None:
            shared.update(case["shared"])
        source.propose(case["text"], draft)
        assert (draft.successors is None) == (kind is NativeMemory)
    return draft


def grown(case: dict[str, Any], kind: type[Any], rates: Calibration) -> Guesses:
    """What such a draft takes."""
    return drafted(case, kind, rates).grow(case["room"], case["depth"], case["cost"], case["base"])


def planted(case: dict[str, Any], kind: type[Any], rates: Calibration) -> TokenTree:
    """The tree of such a draft behind a window."""
    layout = window_layout(*case["window"])
    branch = [case["text"][-1], *range(50, 49 + layout.size)]
    return drafted(case, kind, rates).tree(layout, branch, case["room"], case["depth"], case["cost"])


@settings(max_examples=600, deadline=None)
@given(asked())
def test_drafts_are_the_same_bit_for_bit(case: dict[str, Any]) -> None:
    calibration = Calibration()
    source = RecycleSource(None, calibration)
    # The chains' rates, and the recycled rows' own: usually falling with the level, as they are, but not always.
    for place, rate in enumerate(case["rates"]):
        calibration.rates[place] = rate
    if case["levels"].random() < 0.5:
        for origins in source.origins:
            calibration.rates[origins[0] + case["levels"].randrange(LEVELS)] = case["levels"].choice(case["rates"])
    ours, our_tree = grown(case, NativeMemory, calibration), planted(case, NativeMemory, calibration)
    with python():
        twins, twin_tree = grown(case, DictMemory, calibration), planted(case, DictMemory, calibration)
    assert repr(ours) == repr(twins)
    used = 4 * len(twin_tree) + len(twin_tree.needed) - twin_tree.branch
    assert our_tree.packed()[:used] == twin_tree.packed()
    assert our_tree == twin_tree


def test_a_chain_goes_before_a_row_of_the_same_score() -> None:
    """The chain's 1/2 leaves the row 1/2, which is sure of its token."""
    calibration = Calibration()
    source = RecycleSource(None, calibration)
    calibration.rates[0], calibration.rates[source.origins[2][0]] = 0.5, 1.0
    case = {"own": {3: (7, 0)}, "shared": None, "chains": [([8], [0])]}
    case |= {"text": [3], "room": 2, "depth": 1, "cost": None, "base": 1}
    ours = grown(case, NativeMemory, calibration)
    with python():
        twins = grown(case, DictMemory, calibration)
    assert (list(ours.tokens), list(ours.scores)) == ([8, 7], [0.5, 0.5])
    assert ours == twins


def test_a_large_draft_takes_all_of_the_room() -> None:
    rng = random.Random(2)

    def some(count: int, below: int) -> list[int]:
        return [rng.randrange(below) for _ in range(count)]

    case: dict[str, Any] = {
        "own": {t: (*rng.sample(range(500), 8), *sorted(some(8, LEVELS))) for t in range(500)},
        "shared": {(a, b): (*rng.sample(range(500), 8), *[3] * 8) for a in range(60) for b in range(60)},
        "chains": [(some(30, 500), some(30, 100)) for _ in range(60)],
        **{"text": [1, 2, 3], "room": 2000, "depth": 40, "cost": None, "base": 20},
    }
    calibration = Calibration()
    RecycleSource(None, calibration)
    for origin in range(100):
        calibration.rates[origin] = rng.random()
    ours = grown(case, NativeMemory, calibration)
    with python():
        twins = grown(case, DictMemory, calibration)
    assert len(ours.tokens) == 2000
    assert repr(ours) == repr(twins)


# What a text suggests


@st.composite
def told_texts(draw: st.DrawFn) -> dict[str, Any]:
    """A prompt, blocks that were accepted after it, and n-grams of a window; any settings, any of the sources."""
    few = st.sampled_from(TOKENS[: draw(st.integers(1, len(TOKENS)))])
    ngram = draw(st.integers(2, 5))
    ngrams = st.lists(st.tuples(*[few] * ngram), max_size=4)
    config = LookaheadConfig(
        window=0, ngram=ngram, guesses=draw(st.integers(0, 4)), budget=64,
        sources=tuple(draw(st.sets(st.sampled_from(SOURCES[:3])))),
        suffix_key=draw(st.integers(1, 5)), suffix_branches=draw(st.integers(1, 40)),
        suffix_length=draw(st.integers(1, 6)), suffix_oldest=draw(st.sampled_from((False, False, False, True))),
    )  # fmt: skip
    return {
        "config": config,
        "prompt": draw(st.lists(few, min_size=1, max_size=60)),
        "steps": draw(st.lists(st.tuples(st.lists(few, min_size=1, max_size=5), ngrams), max_size=12)),
    }


def suggested(case: dict[str, Any]) -> list[str]:
    """What is drafted after the prompt and after every block."""
    memory, text, seen = SharedMemory(), list(case["prompt"]), []
    sources = build(case["config"], memory)
    for source in sources:
        source.start(text)
    for accepted, ngrams in [*case["steps"], ([], [])]:
        draft = Draft(text, memory.calibration.rates)
        for source in sources:
            source.propose(text, draft)
        seen.append(repr(draft.grow(40, 9)))
        text = text + accepted
        for source in sources:
            source.absorb(Outcome(text, accepted, TokenTree([1], [-1], [0], [0]), [], [1], [], ngrams))
    return seen


@settings(max_examples=400, deadline=None)
@given(told_texts())
def test_a_text_suggests_the_same(case: dict[str, Any]) -> None:
    ours = suggested(case)
    with python():
        assert suggested(case) == ours


def test_a_long_text_suggests_the_same() -> None:
    """Through many doublings; pairs that stood in more places than are looked at."""
    rng = random.Random(4)
    config = LookaheadConfig(window=0, ngram=4, guesses=6, sources=SOURCES[:3])
    blocks = [[rng.randrange(6 if i % 2 else 900) for _ in range(rng.randrange(1, 40))] for i in range(150)]
    steps = [(block, [tuple(rng.choices(block, k=4)) for _ in range(5)]) for block in blocks]
    case = {"config": config, "prompt": list(range(500)) * 2, "steps": steps}
    ours = suggested(case)
    with python():
        assert suggested(case) == ours
    assert sum("tokens=array('i')" not in drafted for drafted in ours) > 100


def test_which_sources_c_takes_over() -> None:
    def kinds(**options: Any) -> list[str]:
        return [type(source).__name__ for source in build(LookaheadConfig(window=0, **options), SharedMemory())]

    assert kinds() == ["TextSource", "RecycleSource"]
    assert kinds(sources=("suffix",)) == ["TextSource"]
    assert kinds(sources=("recycle",)) == ["RecycleSource"]
    each = ["SuffixSource", "PromptSource", "JacobiSource", "RecycleSource"]
    for options in ({"suffix_oldest": True}, {"guesses": 10**6}, {"suffix_length": 10**5}):
        assert kinds(**options) == each
    with python():
        assert kinds() == each


def test_ngrams_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n-grams of \[3, 4\] tokens; they need 4"):
        NativeText(4, 2, 1, 1, 1, -1, 0, 0, 3, 3).take([1], [(1, 2, 3), (1, 2, 3, 4)])


def test_a_text_cannot_be_copied() -> None:
    text = NativeText(4, 2, 1, 1, 1, -1, 0, 0, 3, 3)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(text)


# How good the guesses were


@st.composite
def judged(draw: st.DrawFn) -> tuple[TokenTree, list[int], list[int]]:
    """A tree with guesses below any branch, a path of them, and what the model wanted after each of its nodes."""
    tree = draw(trees(most=24))
    branch = draw(st.integers(1, len(tree)))
    origins = draw(st.lists(st.integers(0, 5), min_size=len(tree) - branch, max_size=len(tree) - branch))
    tree = replace(tree, branch=branch, origins=origins)
    path: list[int] = []
    while below := list(tree.guesses_below(path[-1] if path else 0)):
        if draw(st.booleans()):
            break
        path.append(draw(st.sampled_from(below)))
    wanted = draw(st.lists(token, min_size=1, max_size=1))
    return tree, path, [tree.tokens[node] for node in path] + wanted


@settings(max_examples=300, deadline=None)
@given(st.lists(judged(), max_size=30))
def test_rates_are_the_same_bit_for_bit(steps: list[tuple[TokenTree, list[int], list[int]]]) -> None:
    ours, twins = Calibration(), Calibration()
    for calibration in (ours, twins):
        calibration.prior("jacobi", (0.12, 0.35, 0.45, 0.5, 1e-9, 1.0))
    for _ in range(4):  # beyond the trials from which on the average forgets
        for step in steps:
            ours.learn_step(*step)
            with python():
                twins.learn_step(*step)
    assert (ours.rates, ours._trials) == (twins.rates, twins._trials)


# Trees


@settings(max_examples=200, deadline=None)
@given(judged())
def test_a_tree_is_the_same_from_its_numbers(case: tuple[TokenTree, list[int], list[int]]) -> None:
    """Whichever list is asked for first; `packed` gives back what it was made from."""
    whole = case[0]
    for first in ("tokens", "parents", "depths", "rows", "origins"):
        tree = TokenTree.of(whole.packed(), whole.sizes, whole.branch, whole.width)
        assert (len(tree), tree.sizes) == (len(whole.tokens), (len(whole.tokens), len(whole.needed)))
        assert getattr(tree, first) == getattr(whole, first)
        assert tree == whole
        assert repr(tree) == repr(whole)
        assert tree.packed() is whole.packed()
        assert replace(tree).packed() == whole.packed()
    fresh = TokenTree.of(whole.packed(), whole.sizes, whole.branch, whole.width)
    assert (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))) == (whole, whole)
    with pytest.raises(AttributeError, match="a token tree has no 'leaves'"):
        _ = fresh.leaves


# Packets


@settings(max_examples=200, deadline=None)
@given(trees(most=40), st.integers(0, 70), st.integers(0, 5000), st.integers(0, 2))
@example(TokenTree([5], [-1], [0], [0]), 0, 0, 0)
@example(TokenTree([5] * 33, [-1, *range(32)], list(range(33)), list(range(33))), 0, 9, 1)
def test_packets_are_the_same(tree: TokenTree, padding: int, length: int, place: int) -> None:
    """Whatever was in them before."""
    ours, twins = (Packet(3, len(tree) + padding, False) for _ in range(2))
    for packet in (ours, twins):
        for field in packet.fields.values():
            field[...] = -77
    ours.put_tree(place, tree, length)
    with python():
        twins.put_tree(place, tree, length)
    assert all((ours.fields[name] == twins.fields[name]).all() for name in ours.fields)
    assert (ours.fields["tokens"][place] != -77).all()


# Numbers that point nowhere


def test_what_points_nowhere_is_refused() -> None:
    """Memory that is not ours is never read: the twins would raise, too, or read what no tree has."""
    memory, tree = NativeMemory(), TokenTree([1, 2], [-1, 0], [0, 1], [0, 1])
    for rows, parents in (([2], [-1, 0]), ([-1], [-1, 0]), ([1], [-1, 1]), ([1], [-1, 7])):
        with pytest.raises(IndexError, match="does not exist"):
            memory.keep(replace(tree, parents=parents, needed=rows), (-1, -1), [(5, 0)])
    packet = Packet(1, 2, False)
    for short in (replace(tree, parents=[-1]), replace(tree, depths=[0])):
        with pytest.raises(ValueError, match="a tree of 2 nodes and 2 needed rows has lists of"):
            packet.put_tree(0, short, 0)
    for bad in (replace(tree, parents=[-1, 2]), TokenTree([1] * 3, [-1, 0, 0], [0, 1, 1], [])):
        with pytest.raises(IndexError, match="does not exist"):
            packet.put_tree(0, bad, 0)
    for origin in (-1, 3):
        draft = Draft([1], [0.5] * 3)
        draft.chain([5], [origin])
        with pytest.raises(IndexError, match="does not exist"):
            draft.grow(3, 3)
    calibration = Calibration()
    for bad in (tree, replace(tree, origins=[-1]), replace(tree, origins=[len(calibration.rates)])):
        with pytest.raises(IndexError, match="does not exist"):
            calibration.learn_step(bad, [1], [2, 3])
    with pytest.raises(ValueError, match="a path of 1 nodes with 1 tokens"):
        calibration.learn_step(replace(tree, origins=[0]), [1], [2])
    draft = Draft([1], [0.5] * 3)
    draft.memories = None, memory, None, 0
    with pytest.raises(IndexError, match="does not exist"):
        draft.grow(3, 3)
    with pytest.raises(ValueError, match="a branch of 2 tokens for a layout of 1"):
        Draft([1], Calibration().rates).tree(window_layout(0, 2), [1, 2], 3, 3, None)
    with pytest.raises(ValueError, match="a chain of 2 tokens with 1 origins"):
        draft.chain([5, 6], [0])


# Whole generations


EVERYTHING = LookaheadConfig(window=4, ngram=4, guesses=4, budget=48)
COST = tuple(1 + 0.03 * k for k in range(48))


def told(vocabulary: int, config: LookaheadConfig, sampling: SamplingParams) -> list[Any]:
    """Every tree and block of three requests that share what they learn."""
    memory, model, told = SharedMemory(), toy_model(vocabulary, seed=3, order=2), list[Any]()
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
def test_every_step_of_a_generation_is_the_same(
    vocabulary: int, config: LookaheadConfig, sampling: SamplingParams
) -> None:
    ours = told(vocabulary, config, sampling)
    with python():
        twins = told(vocabulary, config, sampling)
    assert ours == twins


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_step_of_the_graph_backend_is_the_same(model: Any, temperature: float) -> None:
    """A batch of a tiny Llama, with packets and top rows as they go to and come from a device."""

    def run() -> list[Any]:
        engine, memory, seen = Engine(GraphBackend(copy.deepcopy(model))), SharedMemory(), list[Any]()
        config = LookaheadConfig(window=3, ngram=4, guesses=4, budget=40, sources=SOURCES)
        for seed, prompt in enumerate([[5, 6, 7, 5, 6], [9], [3, 4, 3, 4, 3, 4]]):
            sampling = SamplingParams(temperature=temperature, seed=seed)
            engine.add(DecodingSequence(prompt, config, sampling, StopRules(max_tokens=40), memory=memory))
        forward = engine._forward
        engine._forward = lambda group: seen_in(forward(group))  # type: ignore[method-assign]

        def seen_in(ran: Any) -> Any:
            seen.extend((one.item.tree, one.result.targets, np.asarray(one.result.top).tolist()) for one in ran)
            return ran

        while engine.running:
            seen += [accepted.tokens for accepted in engine.step()]
        return [*seen, list(memory.successors.items())]

    ours = run()
    with python():
        assert run() == ours
    assert any(len(tokens) > 1 for tokens in ours if isinstance(tokens, list))
