"""The trees that were chosen when all this was in six modules: 24 steps of 1, 4 and 16 sequences, on three machines.

A change that means to choose other trees records them again, after it has been shown to be faster. The texts do not
depend on it.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from zlib import crc32

import pytest
from replay import Replay, words_of

from lookahead.algorithm.budget import fit_config
from lookahead.algorithm.choice import choose_trees
from lookahead.algorithm.cost import CostCurve, PassCost, table_for_sizes
from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.config import LookaheadConfig, StopRules

RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text())
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CURVES = {
    "gpu": CostCurve((*SIZES, 256, 512), (4.1, 4.1, 4.1, 4.15, 4.2, 4.3, 4.5, 4.9, 6.0, 9.0)),
    "soft": CostCurve(SIZES, (10, 11, 12, 14, 18, 26, 42, 75)),
    "cpu": CostCurve(SIZES, (53, 105, 107, 121, 209, 267, 408, 713)),
}
CAPTURED = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
DRAFTERS = list({type(drafter): drafter for drafter in (PythonDrafter(), choose_drafter())}.values())


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: type(drafter).__name__)
@pytest.mark.parametrize("case", RECORDED)
@pytest.mark.thinned(1, most=9)
def test_the_same_trees_are_chosen(case: str, drafter: Drafter) -> None:
    name, number = case.split()
    count, curve = int(number), CURVES[name]
    config = fit_config(LookaheadConfig(), CostCurve(curve.sizes[:8], curve.seconds[:8]))
    table = curve.table(512) if name != "gpu" else table_for_sizes(curve.table(512), CAPTURED)
    model, cost, memory = (
        Replay(words_of(Path(__file__).parents[2] / "LICENSE")),
        PassCost(table),
        SharedMemory(drafter),
    )
    begins = [index * 1500 // count for index in range(count)]
    sequences = [
        DecodingSequence(model.stream[begin : begin + 40], config, rules=StopRules(2000), memory=memory)
        for begin in begins
    ]
    rows, digest = list[int](), 0
    for _ in range(24):
        trees = choose_trees(sequences, None, cost)
        rows.append(sum(tree.size for tree in trees))
        for sequence, tree, begin in zip(sequences, trees, begins, strict=True):
            digest = crc32(array("i", [*tree.tokens, *tree.parents]).tobytes(), digest)
            output = model.output(tree, begin + len(sequence.tokens) - 1, sequence.wants_top)
            sequence.count_step(tree, sequence.accept_step(tree, output))
            sequence.learn_while_running()
        cost.record_pass(rows[-1], table[rows[-1] - 1])
    assert rows == RECORDED[case]["rows"]
    assert digest == RECORDED[case]["crc32"]
