"""Lower a mixture of experts: its router, and for each expert a branch that only steps with rows for it take.

A branch (ONNX's If) gathers the rows that have chosen its expert, and adds what the expert makes of them to the sum of
the branches before it. So a step reads the weights of the experts that its rows have chosen, each once, and those of no
other: 1 row of 4 among 64 experts takes as long as a dense layer of 4 experts' size. A branch that is not taken costs
some 7 microseconds. A row's experts are added in the order of their numbers, whatever rows are beside it. Products in a
branch have packed weights as all others have, whose sums are cut at the same terms for any number of rows.

ONNX Runtime has an operation for all of it, com.microsoft.MoE. Its rows depend on each other (1.31: of 35 rows in
steps of at most 16, 9 had the bits of a step of 24), it takes 6 times as long (8 ms for 1 row of 4 experts of 768 x
512, where these branches take 2.7 for experts of twice that width), and it chooses by a softmax of the logits alone.
Weights gathered per row and multiplied as a batch would be copied for each row, whether rows share experts or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lookahead.backends.cpu.lower_parts import activated, feed_forward
from lookahead.backends.cpu.onnx_model import BOOL, INT32, OnnxModel, array
from lookahead.backends.cpu.products import linear, merged, plain_matrix
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import MoE, Router, Scoring
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.quantised import QuantisedLinear

LOWEST = np.float32(-np.inf)
"""The score of an expert that must not be chosen."""


def check_experts(matrix: ExpertMatrix) -> None:
    """Raise UnsupportedModelError for a format whose rows round activations and cannot be taken one by one."""
    format = matrix.format
    if format is not None and format.activations is not None and (format.rows > 1 or format.ordered):
        raise UnsupportedModelError(f"its experts are in {format}")


@dataclass(frozen=True)
class Layer:
    """A layer with its rows x [R, hidden], the experts [R, top_k] that they have chosen, and the weights of these."""

    spec: MoE
    number: int
    x: str
    chosen: str
    weights: str


def mixture(made: OnnxModel, spec: MoE, number: int, normed: str, scale: float) -> str:
    """[R, hidden] -> [R, hidden], times `scale`."""
    layer = Layer(spec, number, normed, *_route(made, spec.router, f"{number}.router", normed, scale))
    count = spec.gate_up.experts
    # 1. Which experts some row has chosen: a bool for each.
    found = made.add("Equal", made.add("Unsqueeze", layer.chosen, made.constant([2])), made.constant(np.arange(count)))
    found = made.add("ReduceMax", made.add("Cast", found, to=INT32), made.constant([0, 1]), keepdims=0)
    taken = made.add("Split", made.add("Cast", found, to=BOOL), outputs=count, axis=0, num_outputs=count)
    # 2. The sum, from the shared expert on.
    total = _shared(made, spec, number, normed, scale)
    for expert, condition in enumerate([taken] if count == 1 else taken):
        total = _add_expert(made, layer, expert, condition, total)
    return total


def _shared(made: OnnxModel, spec: MoE, number: int, normed: str, scale: float) -> str:
    """What the shared expert makes of each row [R, hidden]; zeros if there is none."""
    if spec.shared is None:
        result: str = made.add("Expand", made.constant(0.0, np.float32), made.add("Shape", normed))
        return result
    shared = feed_forward(made, spec.shared, f"{number}.shared", normed, scale)
    if spec.shared_gate is not None:
        gate = made.add("Sigmoid", linear(made, f"{number}.shared_gate", normed, spec.shared_gate))
        shared = made.add("Mul", shared, gate)
    return shared


def _add_expert(made: OnnxModel, layer: Layer, expert: int, condition: str, total: str) -> str:
    """total [R, hidden], and in the rows that have chosen this expert what it adds to them."""
    spec, name = layer.spec, f"{layer.number}.{expert}"

    def run() -> str:
        where = made.add("NonZero", made.add("Equal", layer.chosen, made.constant(expert)))  # [2, n]: rows and ranks
        rows, _ = made.add("Split", where, outputs=2, axis=0, num_outputs=2)
        x = made.add("Gather", layer.x, made.add("Reshape", rows, made.constant([-1])))
        inner = linear(made, f"{name}.gate_up", x, _of(spec.gate_up, expert))
        gate, up = _gate_and_up(made, inner, alternate=spec.alternate)
        inner = activated(made, spec.activation, spec.constants, gate, up)
        own = linear(made, f"{name}.down", inner, _of(spec.down, expert))
        factors = made.add("GatherND", layer.weights, made.add("Transpose", where, perm=[1, 0]))
        own = made.add("Mul", own, made.add("Unsqueeze", factors, made.constant([1])))
        result: str = made.add(
            "ScatterND", total, made.add("Reshape", rows, made.constant([-1, 1])), own, reduction="add"
        )
        return result

    then = made.branch(f"{name}.then", run)
    otherwise = made.branch(f"{name}.else", lambda: str(made.add("Identity", total)))
    result: str = made.add("If", condition, then_branch=then, else_branch=otherwise)
    return result


def _gate_and_up(made: OnnxModel, inner: str, *, alternate: bool) -> tuple[str, str]:
    if not alternate:
        gate, up = made.add("Split", inner, outputs=2, axis=1, num_outputs=2)
        return gate, up
    end, axis, step = made.constant([2**31]), made.constant([1]), made.constant([2])
    first, second = (made.add("Slice", inner, made.constant([start]), end, axis, step) for start in (0, 1))
    return first, second


def _of(matrix: ExpertMatrix, expert: int) -> Matrix:
    """The matrix of one expert. Plain weights are not copied, unless they are transposed."""
    bias = None if matrix.bias is None else matrix.bias[expert].detach()
    if not isinstance(matrix.weights, QuantisedLinear):
        own = matrix.weights[expert].detach()
        return plain_matrix(own.T if matrix.transposed else own, bias)
    if matrix.weights.format.rows > 1 or matrix.weights.format.ordered:
        return plain_matrix(matrix.weight(expert, torch.float32), bias)
    out = matrix.shape[0]
    (part,) = merged(Matrix((matrix.weights,)), slice(expert * out, (expert + 1) * out)).parts
    assert isinstance(part, QuantisedLinear)
    return Matrix((part.with_bias(bias),))


# The router


def _route(made: OnnxModel, spec: Router, name: str, normed: str, scale: float) -> tuple[str, str]:
    """The experts [R, top_k] of each row, and their weights [R, top_k] times `scale`. See `reference.route`."""
    logits = linear(made, name, normed, spec.logits)
    if spec.scoring is Scoring.SPARSE_MIXER:
        chosen, weights = _sparse_mixer(made, spec, logits)
    else:
        kind = {Scoring.SOFTMAX: "Softmax", Scoring.SIGMOID: "Sigmoid"}.get(spec.scoring)
        scores = logits if kind is None else made.add(kind, logits)
        choice = scores
        if spec.choice_bias is not None:
            choice = made.add("Add", scores, made.weight(f"{name}.bias", array(spec.choice_bias.float().flatten())))
        if spec.groups > 1:
            choice = _kept(made, spec, choice)
        _, chosen = made.add("TopK", choice, made.constant([spec.top_k]), outputs=2, axis=-1)
        weights = made.add("GatherElements", scores, chosen, axis=1)
        if spec.scoring is Scoring.CHOSEN:
            weights = made.add("Softmax", weights)
    if spec.normalised:
        total = made.add("ReduceSum", weights, made.constant([1]), keepdims=1)
        weights = made.add("Div", weights, made.add("Max", total, made.constant(1e-20, np.float32)))
    if spec.scale * scale != 1.0:
        weights = made.add("Mul", weights, made.constant(spec.scale * scale, np.float32))
    if spec.expert_scale is not None:
        scales = made.weight(f"{name}.scales", array(spec.expert_scale.float()))
        weights = made.add("Mul", weights, made.add("Gather", scales, chosen))
    return chosen, weights


def _kept(made: OnnxModel, spec: Router, choice: str) -> str:
    """Scores [R, experts], those of the groups that are not chosen from at LOWEST."""
    size = spec.logits.shape[0] // spec.groups
    grouped = made.add("Reshape", choice, made.constant([0, spec.groups, size]))
    highest, _ = made.add("TopK", grouped, made.constant([spec.group_best]), outputs=2, axis=-1)
    sums = made.add("ReduceSum", highest, made.constant([2]), keepdims=0)
    _, kept = made.add("TopK", sums, made.constant([spec.kept_groups]), outputs=2, axis=-1)
    found = made.add("Equal", made.add("Unsqueeze", kept, made.constant([1])), made.constant(_column(spec.groups)))
    found = made.add("ReduceMax", made.add("Cast", found, to=INT32), made.constant([2]), keepdims=1)
    allowed = made.add("Where", made.add("Cast", found, to=BOOL), grouped, made.constant(LOWEST, np.float32))
    result: str = made.add("Reshape", allowed, made.constant([0, spec.logits.shape[0]]))
    return result


def _column(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


def _sparse_mixer(made: OnnxModel, spec: Router, logits: str) -> tuple[str, str]:
    """See `Scoring`."""
    sizes, lowest = made.add("Abs", logits), made.constant(LOWEST, np.float32)
    reach, axis = made.constant(2 * spec.jitter, np.float32), made.constant([1])
    chosen, weights, left = [], [], logits
    for number in range(spec.top_k):
        top = made.add("ReduceMax", left, axis, keepdims=1)
        first = made.add("ArgMax", left, axis=1, keepdims=1)
        far = made.add("Div", made.add("Sub", top, logits), made.add("Max", sizes, top))
        near = made.add("Softmax", made.add("Where", made.add("Greater", far, reach), lowest, left))
        chosen.append(first)
        weights.append(made.add("GatherElements", near, first, axis=1))
        if number + 1 < spec.top_k:
            hidden = made.add("Expand", lowest, made.add("Shape", first))
            left = made.add("ScatterElements", left, first, hidden, axis=1)
    return made.add("Concat", *chosen, axis=1), made.add("Concat", *weights, axis=1)
