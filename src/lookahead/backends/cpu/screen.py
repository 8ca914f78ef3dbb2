"""The screened head: the argmax of all logits, from a small copy of the head and the exact logits of a few tokens.

A step of one token is limited by memory, and the head is a large part of what it reads. A greedy step needs the argmax
alone. So this head reads an int8 copy of the weights, a quarter as large, and computes in four phases:

1. Split each hidden state x into integers and a rest: x = s1 q1 + s2 q2 + r. Here q1 are the integers of x, and q2 are
   those of what q1 leaves over. Two are needed because the states of real models have a few very large channels.
2. Multiply the integers with the copy. That gives every token's approximate logit, and with the bound below the most
   that its exact logit can be: its *upper logit*.
3. Compute the exact logits of the CANDIDATES tokens with the highest upper logits, from the fp32 weights.
4. The best of these is the argmax of all logits if it is above the upper logits of all other tokens. The output
   `certain` says so. A row that is not certain goes to the full head.

The bound. A token's weights are w = c + e: the copy and its error. The approximate logit is c (x - r), so

    w x - c (x - r) = e x + c r,   and its magnitude is at most |e| |x| + |c| |r|   (Euclidean norms).

Floats add rounding errors to this. Those of a logit of H terms are at most H u |w| |x|, whatever the order of adding
(u = 2^-24). The few operations on approximate logits and on norms add less than that. `errors_of` counts them
twice, so the bound holds in floats, too.

The exact logits of phase 3 have the bits that the full head computes. `invariance.same_bits` checks that at load; where
it fails, the screened head is not used. So both heads give the same argmax, ties included (the lowest id), and a row
may go to either: a text does not depend on the rows beside it. Which tokens follow the best one, and `total`, may
differ slightly from the full head's. They only choose guesses.

A soft cap of the logits is applied to the exact ones, with the full head's bits, and to the upper ones. A computed tanh
gives equal results for many large arguments, and is not monotonic in its last bits. So the best capped logit must be
above the other tokens' capped upper logits by a MARGIN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper

from lookahead.backends.cpu.head import OUTPUTS, Computed, add_total, capped
from lookahead.backends.cpu.int8 import INTEGERS, LEVELS, MIDDLE, integer_product
from lookahead.backends.cpu.onnx_model import FLOAT, INT64, MICROSOFT, Array, OnnxModel
from lookahead.backends.cpu.session import start
from lookahead.models.rounding import quantise

CANDIDATES = 64
"""Tokens whose exact logits are computed. On texts of the embedded model the bound left 2 tokens in the median and at
most 18. Not more than 64: ONNX Runtime cuts the sums of wider products earlier."""
MOST_SCREENED = 8
"""The most rows of a run. Compared with the full head (embedded model, two busy cores with VNNI), a run takes 0.43,
0.44, 0.6, 0.7 and 1.1 times as long for 1, 2, 4, 8 and 12 rows."""
LEAST_WEIGHTS = 1 << 23
"""The least weights of a head that is worth it: below, the small operations take longer than reading the weights."""
PIECE = 256
"""ONNX Runtime cuts the sums of a product with packed weights after this many terms. Phase 3 cuts them there, too."""
CHUNK = 4096
"""Tokens that are quantised at once."""
UNIT = 2.0**-24
"""The relative rounding error of a float32."""
MARGIN = 32 * UNIT
"""Above twice the error of a computed tanh, which is a few units."""


class ScreenedHead:
    """Computes the argmax, and likely top tokens, without all logits."""

    def __init__(self, matrix: Array, threads: int, cap: float | None = None) -> None:
        """`matrix` [V, H] are the head's weights. They are read in place. `cap` is the soft cap of the logits."""
        self._session = start(*lower_screen(matrix, cap), threads)
        self._matrix = matrix

    def run(self, hidden: Array, top: int) -> tuple[Computed, np.ndarray[Any, Any]]:
        """Hidden states [N, H] -> up to CANDIDATES top tokens of each row, and whether its argmax is certain [N]."""
        given = {"hidden": hidden, "top": np.array([top], dtype=np.int64)}
        values, ids, total, certain = self._session.run([*OUTPUTS, "certain"], given)
        return Computed(values, ids, total), certain[:, 0]


def lower_screen(matrix: Array, cap: float | None = None) -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """The ONNX file of the screened head, and the arrays of the weights that it names."""
    made = OnnxModel()
    copy, scales, errors = quantised_copy(matrix)
    # 1. Integers and the rest.
    first, first_step, rest = _integers(made, "hidden")
    second, second_step, rest = _integers(made, rest)
    # 2. Approximate and upper logits.
    rows = made.add("Add", made.add("Concat", first, second, axis=0), made.constant(MIDDLE, np.float32))
    rows = made.add("Cast", rows, to=TensorProto.UINT8)
    both = integer_product(made, "head", rows, copy, scales)
    coarse, fine = made.add("Split", both, outputs=2, axis=0, num_outputs=2)
    approximate = made.add("Add", made.add("Mul", coarse, first_step), made.add("Mul", fine, second_step))
    lengths = [made.add("ReduceL2", rows, made.constant([1]), keepdims=1) for rows in ("hidden", rest)]
    bound = made.add("MatMul", made.add("Concat", *lengths, axis=1), made.weight("errors", errors))
    upper = made.add("Add", approximate, bound)
    # 3. The candidates, in the order of their ids, so that the lowest id comes first among equals.
    highest, tokens = made.add("TopK", upper, made.constant([CANDIDATES + 1]), outputs=2, axis=-1)
    tokens, _ = made.add("Split", tokens, made.constant([CANDIDATES, 1]), outputs=2, axis=1)
    _, other = made.add("Split", highest, made.constant([CANDIDATES, 1]), outputs=2, axis=1)
    tokens, _ = made.add("TopK", tokens, made.constant([CANDIDATES]), outputs=2, axis=-1, largest=0)
    exact = _exact_logits(made, made.add("Gather", made.weight("head", matrix), tokens), matrix.shape[1])
    exact = capped(made, exact, cap)
    # 4. The best of them.
    made.add_named("TopK", [exact, "top"], ["best_values", "indices"], axis=-1)
    made.add_named("GatherElements", [tokens, "indices"], ["best_ids"], axis=1)
    if cap is not None:
        margin, factor = made.constant(MARGIN, np.float32), made.constant(cap, np.float32)
        other = made.add("Mul", made.add("Add", made.add("Tanh", other), margin), factor)
    made.add_named("Less", [other, made.add("ReduceMax", exact, made.constant([1]), keepdims=1)], ["certain"])
    add_total(made, capped(made, approximate, cap))
    value = helper.make_tensor_value_info
    inputs = [value("hidden", FLOAT, ["N", matrix.shape[1]]), value("top", INT64, [1])]
    kinds = {"best_ids": INT64, "certain": TensorProto.BOOL}
    outputs = [value(name, kinds.get(name, FLOAT), None) for name in (*OUTPUTS, "certain")]
    return made.file(inputs, outputs), made.arrays


def _integers(made: OnnxModel, x: str) -> tuple[str, str, str]:
    """Rows [N, H] as integers times a step [N, 1], and what is left over. Returns all three."""
    largest = made.add("ReduceMax", made.add("Abs", x), made.constant([1]), keepdims=1)
    largest = made.add("Max", largest, made.constant(1e-30, np.float32))
    levels = made.constant(LEVELS, np.float32)
    rounded = made.add("Round", made.add("Mul", x, made.add("Div", levels, largest)))
    step = made.add("Div", largest, levels)
    return rounded, step, made.add("Sub", x, made.add("Mul", rounded, step))


def _exact_logits(made: OnnxModel, weights: str, width: int) -> str:
    """Each hidden state [N, H] times its candidates' weights [N, C, H], with the bits of the full head: [N, C].

    Terms are added up in pieces, as the full head does it. Each state is repeated, because a product with one row
    has another kernel, which sums in another order.
    """
    twice = made.add("Unsqueeze", "hidden", made.constant([1]))
    twice = made.add("Concat", twice, twice, axis=1)
    sizes = [min(PIECE, width - begin) for begin in range(0, width, PIECE)]
    if len(sizes) == 1:
        pieces = [(twice, weights)]
    else:
        split = [made.add("Split", x, made.constant(sizes), outputs=len(sizes), axis=2) for x in (twice, weights)]
        pieces = list(zip(*split, strict=True))
    total = ""
    for rows, columns in pieces:
        part = made.add("FusedMatMul", rows, columns, domain=MICROSOFT, transB=1)
        total = made.add("Add", total, part) if total else part
    exact: str = made.add("Gather", total, made.constant(0), axis=1)
    return exact


def quantised_copy(matrix: Array) -> tuple[np.ndarray[Any, Any], Array, Array]:
    """Weights [V, H] -> their copy int8 [H, V], its scales [V], and what the bound multiplies |x| and |r| by [2, V]."""
    tokens, width = matrix.shape
    copy = np.empty((width, tokens), np.int8)
    scales, errors = np.empty(tokens, np.float32), np.empty((2, tokens), np.float32)
    for begin in range(0, tokens, CHUNK):
        part = slice(begin, begin + CHUNK)
        layer = quantise(torch.from_numpy(matrix[part]), INTEGERS)
        copy[:, part], scales[part] = layer.codes.view(torch.int8).numpy().T, layer.scales[:, 0].numpy()
        errors[:, part] = errors_of(matrix[part], copy[:, part].T * scales[part, None])
    return copy, scales, errors


def errors_of(matrix: Array, copy: Array) -> Array:
    """Weights [V, H] and their copy -> |e| with twice the rounding errors, and |c|, both a little enlarged: [2, V]."""
    own = np.linalg.norm(matrix, axis=1)
    rounding = 2 * (matrix.shape[1] + 32) * UNIT * own
    return np.stack([np.linalg.norm(matrix - copy, axis=1) + rounding, np.linalg.norm(copy, axis=1)]) * np.float32(1.01)
