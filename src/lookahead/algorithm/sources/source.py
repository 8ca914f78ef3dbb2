"""What a source of guesses is, and how to add one:

1. Write a class with the four methods of `Source` in a file of this folder. `Calibration.prior` gives it origins.
2. Add a row to `table.TABLE`: its name, how it is made, and whether it needs the top tokens of every step.
3. Add its name to `config.SOURCES`, which also puts it into the default config, or to `config.OTHER_SOURCES`. The
   settings know no sources, so the names are checked against the table when it is imported.

A source *proposes*: it writes guesses into the sequence's candidates. And it *absorbs*: it learns from what a finished
step showed. No source can change the output, only how many tokens a step accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.tree import TokenTree


@dataclass(slots=True)
class Outcome:
    """A finished step as the sources see it.

    `text` is prompt and output, this step's `accepted` tokens included. `path` are the nodes of the accepted guesses.
    `targets` and `top` align with `tree.needed`; `top` is None when no source asked for it. `ngrams` come from the
    window. `learned`: the drafter has learned what the next guesses need, and the next guesses may have been made
    (see `Source.learns_early`).
    """

    text: list[int]
    accepted: list[int]
    tree: TokenTree
    path: list[int]
    targets: list[int]
    top: npt.NDArray[np.int32] | None
    ngrams: list[tuple[int, ...]]
    learned: bool = False


class Source(Protocol):
    """`start` sees the prompt, `propose` adds candidates, `absorb` learns from a finished step.

    `proposes_once`: what it adds to a sequence's candidates stays there, and points at what the source learns later.
    `learns_early`: what its next guesses need is where the drafter can note it in the call that verifies a step. Such a
    source may absorb the step later, when the next guesses have been made.
    """

    proposes_once: bool
    learns_early: bool

    def start(self, prompt: Sequence[int]) -> None: ...

    def propose(self, text: list[int], candidates: Candidates) -> None: ...

    def absorb(self, outcome: Outcome) -> None: ...

    def learn_while_running(self) -> None:
        """Do the part of learning that may wait until the device runs the next step."""
        ...
