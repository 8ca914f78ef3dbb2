"""`NativeVerification`: what all sequences of a step accept, in one call to C (`accept.c`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.native.build import check_result
from lookahead.algorithm.native.candidates import CandidatesInC, address_of
from lookahead.algorithm.native.layout import STEP_TREE
from lookahead.algorithm.output import StepOutput, results_of
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import NO_VERDICT, PythonVerification, Verdict


class NativeVerification:
    """Verifies all trees of a step in C if their results are in one array, else in Python.

    Candidates that C has not searched yet, or without a text or a table of the last step in C, do not learn here.
    """

    def __init__(self, library: Any, trees: Sequence[TokenTree], learners: Sequence[Candidates | None]) -> None:
        self._c, self._trees, self._rows = library, trees, sum([tree.size for tree in trees])
        self._learners = [_learner(candidates) for candidates in learners]
        self._nodes = b"".join([tree.packed() for tree in trees])
        self._structs = b"".join(
            [
                STEP_TREE.pack(
                    0 if learner is None else learner.address, tree.size, tree.branch, tree.width, len(tree.needed)
                )
                for tree, learner in zip(trees, self._learners, strict=True)
            ]
        )
        self._needed = sum([len(tree.needed) for tree in trees])
        self._numbers = array("i", bytes(4 * (len(trees) + 2 * self._rows)))
        self._verdicts = [Verdict([], [], None, learner is not None) for learner in self._learners]

    def accept(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        results, numbers, count, rows = results_of(outputs), self._numbers, len(self._trees), self._rows
        if results is None:
            return PythonVerification(self._trees).accept(outputs)
        if len(results) != self._needed:
            raise ValueError(f"results of {len(results)} rows for {self._needed} needed nodes")
        address = address_of(numbers)
        self._c.draft_accept(
            self._structs, count, self._nodes, results.__array_interface__["data"][0], results.shape[1],
            address, address + 4 * count, address + 4 * (count + rows),
        )  # fmt: skip
        verdicts, flat, start = list[Verdict | Exception](), numbers.tolist(), count
        for accepted, verdict in zip(flat[:count], self._verdicts, strict=True):
            if accepted > 0:
                verdict.tokens = flat[start : start + accepted]
                if accepted > 1:
                    path = start + rows
                    verdict.path = flat[path : path + accepted - 1]
                start += accepted
                verdicts.append(verdict)
            else:
                verdicts.append(NO_VERDICT if not accepted else _error(accepted))
        return verdicts


def _learner(candidates: Candidates | None) -> CandidatesInC | None:
    """The candidates in C, if they can learn from a step."""
    learner: CandidatesInC | None = None if candidates is None else candidates.in_c
    return None if learner is None or learner.text is None or learner.tables is None else learner


def _error(result: int) -> Exception:
    try:
        check_result(result)
    except (MemoryError, IndexError) as error:
        return error
    raise ValueError(f"{result} is not an error code")
