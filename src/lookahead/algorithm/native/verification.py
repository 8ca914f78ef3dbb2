"""`NativeVerification`: what all sequences of a step accept, in one call to C (`accept.c`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.native.build import check_result
from lookahead.algorithm.native.candidates import CandidatesInC, address_of
from lookahead.algorithm.native.layout import STEP_TREE
from lookahead.algorithm.output import StepOutput
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
        numbers, count, rows = self._numbers, len(self._trees), self._rows
        if outputs[0].results is None:  # this backend does not return them in one array
            return PythonVerification(self._trees).accept(outputs)
        address, (given, stride) = outputs[0].results.address, outputs[0].results.rows.shape
        if given != self._needed:
            raise ValueError(f"results of {given} rows for {self._needed} needed nodes")
        to = address_of(numbers)
        self._c.draft_accept(
            self._structs, count, self._nodes, address, stride, to, to + 4 * count, to + 4 * (count + rows)
        )
        counts = numbers[:count].tolist()
        last = count + sum([accepted for accepted in counts if accepted > 0])
        tokens, paths = numbers[count:last].tolist(), numbers[count + rows : last + rows].tolist()
        start = 0
        for accepted, verdict in zip(counts, self._verdicts, strict=True):
            if accepted > 0:
                end = start + accepted
                verdict.tokens = tokens[start:end]
                if accepted > 1:
                    verdict.path = paths[start : end - 1]
                start = end
        verdicts: list[Verdict | Exception] = [*self._verdicts]
        if min(counts) < 1:
            for index, accepted in enumerate(counts):
                if accepted < 1:
                    verdicts[index] = NO_VERDICT if not accepted else _error(accepted)
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
