"""The three verbs of `Drafting`: whole batches are proposed, learned from and verified, and one failure stays alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from toy import decode, targets_of, toy_model

from lookahead.algorithm import choice
from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.drafting import Drafting
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import Verdict
from lookahead.config import LookaheadConfig, StopRules

CONFIG = LookaheadConfig(budget=24)
PROMPTS = ([1, 2, 3, 1, 2], [4, 4, 5, 4], [0])
MODEL = toy_model(6, seed=3, order=2)
DRAFTERS = list({type(drafter): drafter for drafter in (PythonDrafter(), choose_drafter())}.values())


def sequences_of(memory: SharedMemory | None = None) -> list[DecodingSequence]:
    return [DecodingSequence(prompt, CONFIG, rules=StopRules(20), memory=memory) for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: type(drafter).__name__)
def test_a_batch_runs_to_its_end_by_three_verbs(drafter: Drafter) -> None:
    alone = sequences_of()
    for sequence in alone:
        decode(sequence, MODEL)
    sequences, verbs, accepted = sequences_of(SharedMemory(drafter)), Drafting(), 0
    while running := [sequence for sequence in sequences if sequence.finish_reason is None]:
        trees = verbs.propose(running)
        assert not verbs.learn(running, trees, [False] * len(running))
        outputs = [targets_of(sequence, tree, MODEL) for sequence, tree in zip(running, trees, strict=True)]
        for sequence, tree, output, verdict in zip(running, trees, outputs, verbs.verify(outputs), strict=True):
            assert isinstance(verdict, Verdict)
            accepted += len(verdict.path)
            sequence.accept_step(tree, output, sequence.apply_stop_rules(verdict))
    assert [sequence.output for sequence in sequences] == [sequence.output for sequence in alone]
    assert accepted > 0


def test_a_pass_never_has_more_rows_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the choice says: the largest trees become bare roots."""

    def heedless(sequences: Sequence[DecodingSequence], *_: object, **__: object) -> list[TokenTree]:
        return [sequence.propose() for sequence in sequences]

    monkeypatch.setattr(choice, "choose_trees", heedless)
    sequences = sequences_of()
    sizes = [tree.size for tree in Drafting().propose(sequences)]
    assert min(sizes) > 1
    limited = [tree.size for tree in Drafting().propose(sequences, sum(sizes) - 1)]
    assert sum(limited) < sum(sizes)
    assert sorted(limited) == [1, *sorted(sizes)[:-1]]
    assert [tree.size for tree in Drafting().propose(sequences, 3)] == [1, 1, 1]


def test_a_sequence_that_cannot_learn_is_named_and_the_others_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, verbs = sequences_of(), Drafting()

    def fail() -> None:
        raise ValueError("no")

    monkeypatch.setattr(sequences[1], "learn_while_running", fail)
    trees = verbs.propose(sequences)
    failed = verbs.learn(sequences, trees, [False] * 3)
    assert {index: str(error) for index, error in failed.items()} == {1: "no"}
    outputs = [targets_of(sequence, tree, MODEL) for sequence, tree in zip(sequences, trees, strict=True)]
    assert len(verbs.verify(outputs)) == 3


def test_what_was_not_launched_cannot_be_verified() -> None:
    sequences, verbs = sequences_of()[:1], Drafting()
    trees = verbs.propose(sequences)
    verbs.learn(sequences, trees, [False])
    outputs = [targets_of(sequences[0], trees[0], MODEL)]
    verbs.verify(outputs)
    with pytest.raises(RuntimeError, match="follows learn"):
        verbs.verify(outputs)
