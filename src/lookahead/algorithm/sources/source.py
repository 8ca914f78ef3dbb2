"""What a source of draft tokens is, and how to add one:

1. Write a class with the two flags and four methods of `Source` in a file of this folder. `Calibration.set_prior` gives
   it origins, the numbers under which `calibration` records how often its draft tokens are right.
2. Add a row to `table.TABLE`: its name, how it is created, and whether it needs the top tokens of every step.
3. Add its name to `config.SOURCES`, which also adds it to the default config, or to `config.OTHER_SOURCES`. The config
   does not import sources, so the names are checked against the table when that is imported.

A source proposes draft tokens, which it writes into the sequence's candidates, and learns from finished steps. No
source can change the output, only how many tokens a step accepts.
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
    """A finished step, from which sources learn.

    `text` is prompt and output, including this step's `accepted` tokens. `path` are the nodes of the accepted draft
    tokens. `targets` and `top` align with `tree.needed`; `top` is None if no source needs it. `ngrams` come from the
    window. `learned`: the drafter has already learned what the next draft needs, and may have made that draft (see
    `Source.learns_early`).
    """

    text: list[int]
    accepted: list[int]
    tree: TokenTree
    path: list[int]
    targets: list[int]
    top: npt.NDArray[np.int32] | None
    ngrams: Sequence[tuple[int, ...]]
    learned: bool = False


class Source(Protocol):
    """`start` gets the prompt, `propose` adds candidates, `learn_from` learns from a finished step.

    `proposes_once`: `propose` adds a reference to the source's state, so it is called only once for a sequence.
    `learns_early`: the drafter can update the state in the call that verifies a step. `learn_from` may then be called
    later, after the next draft was made.
    """

    proposes_once: bool
    learns_early: bool

    def start(self, prompt: Sequence[int]) -> None: ...

    def propose(self, text: list[int], candidates: Candidates) -> None: ...

    def learn_from(self, outcome: Outcome) -> None: ...

    def learn_while_running(self) -> None:
        """Do the part of learning that can wait until the device runs the next step."""
        ...
