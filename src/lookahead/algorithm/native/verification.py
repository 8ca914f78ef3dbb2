"""`NativeVerification`: what all sequences of a step accept, in one call to C (`accept.c`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from lookahead.algorithm.draft import Draft
from lookahead.algorithm.native.drafts import DraftInC, address_of
from lookahead.algorithm.native.layout import RAN
from lookahead.algorithm.native.memory import check
from lookahead.algorithm.output import StepOutput, results_of
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import NO_VERDICT, PythonVerification, Verdict


class NativeVerification:
    """All trees of a step, as C reads them. C verifies results in one array; others are verified in Python.

    A draft that C has not searched yet, or that has no text or no table of its last step in C, learns nothing here.
    """

    def __init__(self, library: Any, trees: Sequence[TokenTree], drafts: Sequence[Draft | None]) -> None:
        self._c, self._given, self._rows = library, trees, sum([tree.size for tree in trees])
        self._drafts = [_that_learns(draft) for draft in drafts]
        self._trees = b"".join([tree.packed() for tree in trees])
        self._ran = b"".join(
            [
                RAN.pack(0 if kept is None else kept.address, tree.size, tree.branch, tree.width, len(tree.needed))
                for tree, kept in zip(trees, self._drafts, strict=True)
            ]
        )
        self._needed = sum([len(tree.needed) for tree in trees])
        self._numbers = array("i", bytes(4 * (len(trees) + 2 * self._rows)))
        self._verdicts = [Verdict([], [], None, kept is not None) for kept in self._drafts]

    def accept(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        results, numbers, count, rows = results_of(outputs), self._numbers, len(self._given), self._rows
        if results is None:
            return PythonVerification(self._given).accept(outputs)
        if len(results) != self._needed:
            raise ValueError(f"results of {len(results)} rows, and {self._needed} are needed")
        address = address_of(numbers)
        self._c.draft_accept(
            self._ran, count, self._trees, results.__array_interface__["data"][0], results.shape[1],
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


def _that_learns(draft: Draft | None) -> DraftInC | None:
    """What C has of the draft, if it can learn from a step."""
    kept: DraftInC | None = None if draft is None else draft.in_c
    return None if kept is None or kept.text is None or kept.tables is None else kept


def _error(result: int) -> Exception:
    try:
        check(result)
    except (MemoryError, IndexError) as error:
        return error
    raise ValueError(f"{result} is no error")
