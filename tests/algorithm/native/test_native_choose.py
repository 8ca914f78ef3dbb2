"""The trees of a step of several sequences: the same from C as from Python; who fails does no harm to others."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import marks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from lookahead.algorithm.draft import Draft, Drafter, Offer, PythonDrafter
from lookahead.algorithm.native.build import library
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.successors import SuccessorTables
from lookahead.algorithm.tree import TokenTree, window_layout

if library() is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

OURS, TWIN = NativeDrafter(library(), workers=0), PythonDrafter()
HELPED = NativeDrafter(library(), workers=3)


def offer(chains: list[list[float]], window: int = 0, most: int = 30, max_depth: int = 9, **more: Any) -> Offer:
    """Chains of tokens whose rates these are, below a branch with this window."""
    layout, rates = window_layout(window, 3), array("d", [rate for chain in chains for rate in chain] or [0.0])
    draft, first = Draft.after([7], rates), 0
    for chain in chains:
        origins = range(first, first + len(chain))
        draft.add_chain([100 + origin for origin in origins], list(origins))
        first += len(chain)
    branch = array("i", range(1, layout.size + 1))
    return Offer(layout, branch, draft, most, max_depth, **more)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Scores of which many are equal; windows; limits; costs that end early, or none."""
    rate = st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.9, 1.0)) if draw(st.booleans()) else st.floats(0, 1)
    offers = []
    for _ in range(draw(st.integers(1, 6))):
        window = draw(st.sampled_from((0, 0, 1, 3)))
        offers.append(
            {
                "chains": draw(st.lists(st.lists(rate, min_size=1, max_size=4), max_size=5)),
                "window": window,
                "most": draw(st.integers(-1, 12)),
                "max_depth": draw(st.integers(0, 5)),
                "cost": draw(st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=15)),
                "trust": draw(st.sampled_from((0.5, 1.0, 1.3))),
                "bonus": draw(st.sampled_from((0.0, 0.008))),
                "kept": draw(st.booleans()),
            }
        )
    cost = draw(st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=40))
    if cost is not None and draw(st.booleans()):
        cost = np.array(cost)
    few = st.none() | st.integers(-2, 40)
    return {"offers": offers, "cost": cost, "most": draw(few), "room": draw(few)}


def chosen(drafter: Drafter, step: dict[str, Any]) -> str:
    return repr(drafter.choose([offer(**one) for one in step["offers"]], *[step[k] for k in ("cost", "most", "room")]))


@settings(max_examples=examples(300), deadline=None)
@given(steps())
def test_trees_are_the_same_bit_for_bit(step: dict[str, Any]) -> None:
    HELPED.get_ready()
    assert chosen(OURS, step) == chosen(HELPED, step) == chosen(TWIN, step)


def test_many_guesses_are_sorted_as_numpy_does() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 3, 7, 64, 256):
        rates = [np.sort(rng.random(rng.integers(0, 30)).round(2))[::-1].tolist() for _ in range(count)]
        offers = [{"chains": [[rate] for rate in one], "trust": 1.1, "bonus": 0.008, "kept": False} for one in rates]
        step = {"offers": offers, "cost": 1 + 0.001 * np.arange(4 * count), "most": None, "room": None}
        HELPED.get_ready()
        assert chosen(OURS, step) == chosen(HELPED, step) == chosen(TWIN, step)


def test_without_a_draft_there_is_the_branch_alone() -> None:
    layout = window_layout(2, 3)
    bare = Offer(layout, array("i", [5, 6, 7, 8]), None, 9, 9)
    for drafter in (OURS, TWIN):
        trees, refused = drafter.choose([bare, offer([[0.5, 0.5]])])
        assert (list(trees[0].tokens), list(trees[1].tokens), refused) == ([5, 6, 7, 8], [1, 100, 101], None)


@pytest.mark.parametrize("drafter", [OURS, TWIN])
def test_a_branch_of_another_layout_is_refused(drafter: Drafter) -> None:
    with pytest.raises(ValueError, match="a branch of 1 tokens for a layout of 4"):
        drafter.choose([Offer(window_layout(2, 3), array("i", [5]), None, 9, 9)])


def test_only_what_was_taken_in_is_forgotten() -> None:
    """A sequence that points nowhere fails the step. It fails again on its own, and the other has learned only once."""
    tree, top = TokenTree([7], [-1], [0], [0]), np.array([(5, 0)], dtype=np.int32)
    drafts = [Draft.after([7], array("d", [0.5] * 100)) for _ in range(2)]
    offers = [Offer(window_layout(0, 3), array("i", [7]), draft, 9, 9) for draft in drafts]
    for draft in drafts:
        draft.tables = SuccessorTables(OURS.new_table(), OURS.new_table(), None, 0)
        draft.text = OURS.new_text(2, 2, 1, 1, 1, 0, -1, -1, 0, 0)
        draft.text.take_later([6, 6])
        draft.tables.last.keep(tree, (-1, -1), top, only=True)
    good, bad = drafts
    bad.add_chain([1], [10**6])
    with pytest.raises(IndexError, match="does not exist"):
        OURS.choose(offers)
    assert good.text.waiting is None
    assert bad.text.waiting is not None
    with pytest.raises(IndexError, match="does not exist"):
        OURS.choose(offers[1:])
    assert list(OURS.choose(offers[:1])[0][0].tokens) == [7, 6, 5]


def in_new_process(code: str) -> str:
    """What a process prints that runs this after a drafter for three threads has searched once, as `search` does."""
    begin = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(marks.__file__).parent)!r})
from test_native_choose import HELPED, offer
def search(count=8):
    return repr(HELPED.choose([offer([[0.5, 0.25], [0.125]]) for _ in range(count)]))
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
HELPED.get_ready()
few = threads() - before
search()
HELPED.get_ready()
many = threads() - before
print(few, many, search() == first)
HELPED.get_ready()
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
    drafter, many = NativeDrafter(counting, workers=1), [offer([[0.5]]) for _ in range(8)]
    bare = [Offer(window_layout(0, 3), array("i", [7]), None, 9, 9)] * 8
    for offers, woken in ((many[:3], 0), (bare, 0), (many, 1)):
        drafter.choose(offers)
        drafter.get_ready()
        drafter.get_ready()  # nothing was chosen in between
        assert counting.woken == woken


@on_linux
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of its parent are not there, and the parent's lock may be taken for ever."""
    code = """
HELPED.get_ready()
if os.fork():
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status))
else:
    right = search() == first and threads() == 1
    HELPED.get_ready()
    os._exit(0 if right and threads() == 4 and search() == first else 1)
"""
    assert in_new_process(code).split() == ["0"]
