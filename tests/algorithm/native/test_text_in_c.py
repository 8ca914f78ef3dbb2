"""The sources that follow the text: as one in C, and in Python, they propose the same after every step of any text."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from lookahead.algorithm.draft import Candidates, Drafter, Limits, TextSettings
from lookahead.algorithm.native.build import SIGNATURES, library
from lookahead.algorithm.native.drafter import NativeDrafter, NativeText
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sources import SharedMemory, build_sources
from lookahead.algorithm.sources.calibration import BUCKETS, SOURCE_NAMES
from lookahead.algorithm.sources.source import Outcome
from lookahead.algorithm.tree import TokenTree
from lookahead.config import SOURCES, LookaheadConfig

if library() is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

OURS, TWIN = NativeDrafter(library()), PythonDrafter()
TOKENS = (0, 1, 2, 3, 4, 5, 49151, 2**31 - 1)
TREE = TokenTree([1], [-1], [0], [0])


@st.composite
def texts(draw: st.DrawFn) -> dict[str, Any]:
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


def proposed(drafter: Drafter, case: dict[str, Any]) -> list[str]:
    """What is drafted after the prompt and after every block."""
    memory, text, seen = SharedMemory(drafter), list(case["prompt"]), []
    sources = build_sources(case["config"], memory)
    for source in sources:
        source.start(text)
    for accepted, ngrams in [*case["steps"], ([1], [])]:
        candidates = Candidates.after(text, memory.calibration.rates)
        for source in sources:
            source.propose(text, candidates)
        seen.append(repr(drafter.search(candidates, Limits(40, 9))))
        text = text + accepted
        for source in sources:
            source.learn_from(Outcome(text, accepted, TREE, [], [1], None, ngrams))
    return seen


@settings(max_examples=examples(300), deadline=None)
@given(texts())
def test_a_text_proposes_the_same(case: dict[str, Any]) -> None:
    assert proposed(OURS, case) == proposed(TWIN, case)


def test_a_long_text_proposes_the_same() -> None:
    """Through many doublings; and with pairs that stand in more places than a lookup compares."""
    rng = random.Random(4)
    config = LookaheadConfig(window=0, ngram=4, guesses=6, sources=SOURCES[:3])
    blocks = [[rng.randrange(6 if i % 2 else 900) for _ in range(rng.randrange(1, 40))] for i in range(150)]
    steps = [(block, [tuple(rng.choices(block, k=4)) for _ in range(5)]) for block in blocks]
    case = {"config": config, "prompt": list(range(500)) * 2, "steps": steps}
    ours = proposed(OURS, case)
    assert ours == proposed(TWIN, case)
    assert sum("tokens=array('i')" not in drafted for drafted in ours) > 100


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6))
def test_long_chains_are_the_same(seed: int) -> None:
    """Copies of up to 100 tokens with small changes, with any rates: chains of any length up to 64."""
    rng = random.Random(seed)
    text = [rng.randrange(60) for _ in range(200)]
    for _ in range(8):
        start, length = rng.randrange(len(text)), rng.randrange(1, 100)
        text += [*text[start : start + length], rng.randrange(60)]
    config = LookaheadConfig(window=0, sources=("suffix", "prompt"))
    first, seen = SOURCE_NAMES.index("suffix") * BUCKETS, list[list[str]]()
    rates = [rng.uniform(0.3, 1.0) ** 0.2 for _ in range(BUCKETS)]
    for drafter in (OURS, TWIN):
        memory = SharedMemory(drafter)
        sources = build_sources(config, memory)
        memory.calibration.rates[first : first + BUCKETS] = array("d", rates)
        seen.append([])
        for source in sources:
            source.start(text[:300])
        for end in range(300, min(len(text), 400), 7):
            candidates = Candidates.after(text[:end], memory.calibration.rates)
            for source in sources:
                source.propose(text[:end], candidates)
            seen[-1].append(repr(drafter.search(candidates, Limits(250, 64))))
            for source in sources:
                source.learn_from(Outcome(text[: end + 7], text[end : end + 7], TREE, [], [1], None, []))
    assert seen[0] == seen[1]


def test_which_sources_c_takes_over() -> None:
    def kinds(drafter: Drafter = OURS, **options: Any) -> list[str]:
        return [
            type(source).__name__
            for source in build_sources(LookaheadConfig(window=0, **options), SharedMemory(drafter))
        ]

    assert kinds() == ["TextSource", "RecycleSource"]
    assert kinds(sources=("suffix",)) == ["TextSource"]
    assert kinds(sources=("recycle",)) == ["RecycleSource"]
    each = ["SuffixSource", "PromptSource", "JacobiSource", "RecycleSource"]
    assert kinds(TWIN) == each
    for options in ({"suffix_oldest": True}, {"guesses": 10**6}, {"suffix_length": 10**5, "budget": 10**6}):
        assert kinds(**options) == each


def test_what_a_text_refuses() -> None:
    text = OURS.new_text(TextSettings(4, 2, 1, 1, 1, -1, 0, 0, 3, 3))
    with pytest.raises(ValueError, match=r"n-grams of \[3, 4\] tokens; they need 4"):
        text.extend([1], [(1, 2, 3), (1, 2, 3, 4)])
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(text)
    candidates = Candidates.after([1], SharedMemory(TWIN).calibration.rates)
    candidates.text = text
    with pytest.raises(TypeError, match="cannot read a NativeText"):
        TWIN.search(candidates, Limits(4, 4))


def test_origins_that_do_not_exist_are_refused() -> None:
    text = OURS.new_text(TextSettings(2, 2, 1, 1, 1, 5, -1, -1, 3, 3))
    text.extend([1, 1, 1])
    candidates = Candidates.after([1, 1, 1], SharedMemory(TWIN).calibration.rates[:4])
    candidates.text = text
    with pytest.raises(IndexError, match="does not exist"):
        OURS.search(candidates, Limits(4, 4))


def test_memory_is_freed_with_its_text() -> None:
    freed: list[int] = []
    compiled = library()

    def free(handle: int) -> None:
        freed.append(handle)
        compiled.text_free(handle)

    counting = SimpleNamespace(**{name: getattr(compiled, name) for name in SIGNATURES} | {"text_free": free})
    text = NativeText(counting, TextSettings(2, 2, 1, 1, 1, -1, 0, 0, 3, 3))
    handle = text.handle
    text.extend([1, 2, 3])
    del text
    gc.collect()
    assert freed == [handle]
