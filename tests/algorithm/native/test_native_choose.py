"""The trees of a step of several sequences, and what they accept: the same from C as from Python. Who fails does no
harm to others."""

from __future__ import annotations

import subprocess
import sys
from array import array
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import marks
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from lookahead.algorithm.draft import CachedInputs, Candidates, Draft, Drafter, StepLimits, TextSettings
from lookahead.algorithm.native.build import library
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.output import StepOutput, StepResults
from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.successors import ORIGIN_GROUPS, SuccessorTables
from lookahead.algorithm.tree import DraftTokens, TokenTree, window_layout
from lookahead.algorithm.verify import Verdict

if library() is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

OURS, TWIN = NativeDrafter(library(), workers=0), PythonDrafter()
HELPED = NativeDrafter(library(), workers=3)


def chains_draft(chains: list[list[float]], window: int = 0, most: int = 30, max_depth: int = 9, **more: Any) -> Draft:
    """Chains of tokens whose rates these are, below a branch with this window."""
    layout, rates = window_layout(window, 3), array("d", [rate for chain in chains for rate in chain] or [0.0])
    candidates, first = Candidates.after([7], rates), 0
    for chain in chains:
        origins = range(first, first + len(chain))
        candidates.add_chain([100 + origin for origin in origins], list(origins))
        first += len(chain)
    branch = array("i", range(1, layout.size + 1))
    return Draft(layout, branch, candidates, most, max_depth, **more)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Scores of which many are equal; windows; limits; costs that end early, or none."""
    rate = st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.9, 1.0)) if draw(st.booleans()) else st.floats(0, 1)
    drafts = []
    for _ in range(draw(st.integers(1, 6))):
        window = draw(st.sampled_from((0, 0, 1, 3)))
        drafts.append(
            {
                "chains": draw(st.lists(st.lists(rate, min_size=1, max_size=4), max_size=5)),
                "window": window,
                "most": draw(st.integers(-1, 12)),
                "max_depth": draw(st.integers(0, 5)),
                "cost": draw(st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=15)),
                "trust": draw(st.sampled_from((0.5, 1.0, 1.3))),
                "bonus": draw(st.sampled_from((0.0, 0.008))),
                "all_taken": draw(st.booleans()),
            }
        )
    cost = draw(st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=40))
    if cost is not None and draw(st.booleans()):
        cost = np.array(cost)
    few = st.none() | st.integers(-2, 40)
    floor = draw(st.sampled_from((0.0, 0.0, 0.2, 0.5)))
    return {"drafts": drafts, "cost": cost, "most": draw(few), "room": draw(few), "floor": floor}


def chosen(drafter: Drafter, step: dict[str, Any]) -> str:
    drafts = [chains_draft(**one) for one in step["drafts"]]
    return repr(drafter.draft_trees(drafts, StepLimits(*[step[name] for name in ("cost", "most", "room", "floor")])))


@settings(max_examples=examples(300), deadline=None)
@given(steps())
def test_trees_are_the_same_bit_for_bit(step: dict[str, Any]) -> None:
    HELPED.prepare_search()
    assert chosen(OURS, step) == chosen(HELPED, step) == chosen(TWIN, step)


def test_many_draft_tokens_are_sorted_as_numpy_does() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 3, 7, 64, 256):
        rates = [np.sort(rng.random(rng.integers(0, 30)).round(2))[::-1].tolist() for _ in range(count)]
        drafts = [
            {"chains": [[rate] for rate in one], "trust": 1.1, "bonus": 0.008, "all_taken": False} for one in rates
        ]
        step = {"drafts": drafts, "cost": 1 + 0.001 * np.arange(4 * count), "most": None, "room": None, "floor": 0.1}
        HELPED.prepare_search()
        assert chosen(OURS, step) == chosen(HELPED, step) == chosen(TWIN, step)


def test_without_a_draft_there_is_the_branch_alone() -> None:
    layout = window_layout(2, 3)
    bare = Draft(layout, array("i", [5, 6, 7, 8]), None, 9, 9)
    for drafter in (OURS, TWIN):
        trees, refused = drafter.draft_trees([bare, chains_draft([[0.5, 0.5]])])
        assert (list(trees[0].tokens), list(trees[1].tokens), refused) == ([5, 6, 7, 8], [1, 100, 101], None)


@pytest.mark.parametrize("drafter", [OURS, TWIN])
def test_a_branch_of_another_layout_is_refused(drafter: Drafter) -> None:
    with pytest.raises(ValueError, match="a branch of 1 tokens for a layout of 4"):
        drafter.draft_trees([Draft(window_layout(2, 3), array("i", [5]), None, 9, 9)])


def candidates_with_memory(text: list[int]) -> Candidates:
    """Candidates with a text and tables in C."""
    candidates = Candidates.after(text, array("d", [0.5] * ORIGIN_GROUPS * LEVELS))
    candidates.tables = SuccessorTables(OURS.new_table(), OURS.new_table(), None, 0)
    candidates.text = OURS.new_text(TextSettings(2, 2, 1, 1, 1, 0, -1, -1, 0, 0))
    candidates.text.extend(text)
    return candidates


def test_who_points_nowhere_does_no_harm_to_others() -> None:
    """A sequence that points nowhere fails the step. It fails again on its own, and the other goes on."""
    good, bad = (candidates_with_memory([7, 6, 6]) for _ in range(2))
    bad.add_chain([1], [10**6])
    drafts = [Draft(window_layout(0, 3), array("i", [6]), candidates, 9, 9) for candidates in (good, bad)]
    with pytest.raises(IndexError, match="does not exist"):
        OURS.draft_trees(drafts)
    with pytest.raises(IndexError, match="does not exist"):
        OURS.draft_trees(drafts[1:])
    assert list(OURS.draft_trees(drafts[:1])[0][0].tokens) == [6, 6]


def test_a_cached_draft_follows_its_text() -> None:
    """The root, the depth that is left and the trust are read at every step, and the first draft may come late."""
    learners, trust = [candidates_with_memory([5, 6, 7, 5]) for _ in range(2)], array("d", [1.0])
    for text in ([6], [7, 5], [6, 7], [5], [6]):
        for candidates in learners:
            candidates.text.extend(text)
    text, layout = [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6], window_layout(0, 3)
    cached = Draft(layout, (), learners[0], 9, 9, bonus=0.01, all_taken=False, cached=CachedInputs(trust, 14))
    for token, ratio in ((7, 1.0), (5, 0.7), (6, 0.4), (7, 1.0)):
        text.append(token)
        trust[0] = ratio
        for candidates in learners:
            candidates.text.extend([token])
        learners[1].restart(text)
        given = Draft(layout, [token], learners[1], 9, 13 - len(text), trust=ratio, bonus=0.01, all_taken=False)
        other = chains_draft([[0.9, 0.2]], all_taken=False)
        for floor in (0.0, 0.3):
            mine, theirs = (OURS.draft_trees([one, other], StepLimits(None, 3, None, floor)) for one in (cached, given))
            assert repr(mine) == repr(theirs)
    assert list(mine[0][0].tokens) == [7]  # the text is full


def test_what_stands_must_follow_a_text() -> None:
    for wrong in (Candidates.after([7], array("d", [0.5])), None):
        draft = Draft(window_layout(0, 3), (), wrong, 9, 9, cached=CachedInputs(array("d", [1.0]), 9))
        with pytest.raises(ValueError, match="needs candidates with a text in C"):
            OURS.draft_trees([draft])


@st.composite
def steps_that_ran(draw: st.DrawFn) -> tuple[list[TokenTree], list[list[int]]]:
    """Trees of few tokens with and without a window, some of them empty, and the targets of their needed nodes."""
    trees, targets = list[TokenTree](), list[list[int]]()
    for _ in range(draw(st.integers(1, 4))):
        layout, tokens = (
            window_layout(draw(st.sampled_from((0, 0, 3))), draw(st.sampled_from((2, 4)))),
            st.integers(0, 3),
        )
        count = draw(st.integers(0, 8))
        parents = [draw(st.integers(layout.size - 1, layout.size - 1 + i)) for i in range(count)]
        parents = [0 if parent < layout.size else parent for parent in parents]
        drafted = DraftTokens(
            array("i", [draw(tokens) for _ in range(count)]), array("i", parents), array("i", [0] * count),
            array("i", [0] * count), array("d", [0.0] * count),
        )  # fmt: skip
        tree = layout.tree([draw(tokens) for _ in range(layout.size)], drafted)
        if draw(st.integers(0, 5)) == 0:
            tree = TokenTree([], [], [], [])
        trees.append(tree)
        targets.append([draw(tokens) for _ in tree.needed])
    return trees, targets


def outputs_of(rows: npt.NDArray[np.int32], counts: list[int]) -> list[StepOutput]:
    """The outputs of a step whose results came in one array."""
    results, starts = StepResults(rows), list(accumulate(counts, initial=0))
    return [StepOutput.of_results(results, start, end, 0) for start, end in pairwise(starts)]


@settings(max_examples=examples(300), deadline=None)
@given(steps_that_ran())
def test_the_same_is_accepted(step: tuple[list[TokenTree], list[list[int]]]) -> None:
    trees, targets = step
    results = np.full((sum(map(len, targets)), 5), 9, dtype=np.int32)
    results[:, 0] = [target for each in targets for target in each]
    outputs, learners = outputs_of(results, list(map(len, targets))), [None] * len(trees)
    assert [output.targets for output in outputs] == targets
    accepted = [one.verification(trees, learners).accept(outputs) for one in (OURS, TWIN)]
    assert accepted[0] == accepted[1]
    others = [StepOutput(each) for each in targets]  # as another backend gives them
    assert OURS.verification(trees, learners).accept(others) == accepted[0]


def test_results_of_another_step_are_refused() -> None:
    tree = TokenTree([7, 8], [-1, 0], [0, 1], [0, 1])
    outputs = outputs_of(np.zeros((1, 3), dtype=np.int32), [1])
    with pytest.raises(ValueError, match="results of 1 rows for 2 needed nodes"):
        OURS.verification([tree], [None]).accept(outputs)


def test_a_step_that_cannot_be_learned_fails_its_sequence_alone() -> None:
    tree, bad = TokenTree([7, 8], [-1, 0], [0, 1], [0, 1]), TokenTree([7, 8], [-1, 0], [0, 1], [0, 5])
    learners = [candidates_with_memory([6, 7]) for _ in range(3)]
    OURS.draft_trees([Draft(window_layout(0, 3), array("i", [7]), candidates, 9, 9) for candidates in learners])
    results = np.array([[8, 1, 2], [3, 1, 2]] * 3, dtype=np.int32)
    outputs = outputs_of(results, [2, 2, 2])
    first, second, third = OURS.verification([tree, bad, tree], learners).accept(outputs)
    assert first == third == Verdict([1], [8, 3], None, learned=True)
    assert isinstance(second, IndexError)
    for candidates, kept in zip(learners, (True, False, True), strict=True):
        tables = candidates.tables
        assert tables is not None
        assert (tables.last.get((7, 8)) == (1, 2)) == kept


def in_new_process(code: str) -> str:
    """What a process prints that runs this after a drafter for three threads has searched once, as `search` does."""
    begin = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(marks.__file__).parent)!r})
from test_native_choose import HELPED, chains_draft
def search(count=8):
    return repr(HELPED.draft_trees([chains_draft([[0.5, 0.25], [0.125]]) for _ in range(count)]))
def threads():
    return len(os.listdir("/proc/self/task"))
first, before = search(), threads()
"""
    ran = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")


@on_linux
def test_threads_begin_after_the_first_choice_among_many_and_are_kept() -> None:
    code = """
search(3)
HELPED.prepare_search()
few = threads() - before
search()
HELPED.prepare_search()
many = threads() - before
print(few, many, search() == first)
HELPED.prepare_search()
print(threads() - before)
"""
    assert in_new_process(code).split() == ["0", "3", "True", "3"]


def test_threads_are_woken_only_after_a_choice_that_they_could_have_shared() -> None:
    class Library:
        def __init__(self) -> None:
            self.woken = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(library(), name)

        def workers_wake(self, workers: int) -> None:
            self.woken += 1

    counting = Library()
    drafter, many = NativeDrafter(counting, workers=1), [chains_draft([[0.5]]) for _ in range(8)]
    bare = [Draft(window_layout(0, 3), array("i", [7]), None, 9, 9)] * 8
    for drafts, woken in ((many[:3], 0), (bare, 0), (many, 1)):
        drafter.draft_trees(drafts)
        drafter.prepare_search()
        drafter.prepare_search()  # nothing was chosen in between
        assert counting.woken == woken


@on_linux
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of its parent are not there, and the parent's lock may be taken for ever."""
    code = """
HELPED.prepare_search()
if os.fork():
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status))
else:
    right = search() == first and threads() == 1
    HELPED.prepare_search()
    os._exit(0 if right and threads() == 4 and search() == first else 1)
"""
    assert in_new_process(code).split() == ["0"]
