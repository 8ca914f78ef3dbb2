"""The full head: hidden states -> all logits and the top tokens, as an ONNX model of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import helper

from lookahead.backends.cpu.onnx_model import FLOAT, INT64, Array, OnnxModel
from lookahead.backends.cpu.products import linear
from lookahead.backends.cpu.session import start
from lookahead.models.matrix import Matrix

OUTPUTS = ("best_values", "best_ids", "total")


@dataclass(frozen=True)
class Computed:
    """What a head computed for N rows.

    `values` and `ids` [N, top] are the logits and the tokens of the top ones, best first, the lowest id first among
    equals. `total` [N, 1] is the sum of exp(logit - best logit). `logits` [N, V] are overwritten by the next run; the
    screened head has none.
    """

    values: Array
    ids: np.ndarray[Any, Any]
    total: Array
    logits: torch.Tensor | None = None


class Head:
    """Computes all logits."""

    def __init__(self, matrix: Matrix, threads: int, cap: float | None = None) -> None:
        """`matrix` [V, H] is the head itself, maybe with a bias; `cap` is the soft cap of the logits."""
        self._session = start(*lower_head(matrix, cap), threads)
        self._binding = self._session.io_binding()
        self._logits = torch.empty(0, matrix.shape[0])

    def run(self, hidden: Array, top: int) -> Computed:
        """Hidden states [N, H] -> logits, and the top tokens of each row."""
        if len(self._logits) < len(hidden):
            self._logits = self._logits.new_empty(len(hidden), self._logits.shape[1])
        logits = self._logits[: len(hidden)]
        binding = self._binding
        binding.bind_cpu_input("hidden", hidden)
        binding.bind_cpu_input("top", np.array([top], dtype=np.int64))
        for name in OUTPUTS:
            binding.bind_output(name, "cpu")
        binding.bind_output("logits", "cpu", 0, np.float32, tuple(logits.shape), logits.data_ptr())
        self._session.run_with_iobinding(binding)
        outputs = binding.get_outputs_as_ortvaluevector()
        values, ids, total = (outputs[i].numpy() for i in range(len(OUTPUTS)))
        return Computed(values, ids, total, logits)


def lower_head(matrix: Matrix, cap: float | None = None) -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """The ONNX file of the full head, and the arrays of the weights that it names."""
    made = OnnxModel()
    capped(made, linear(made, "head", "hidden", matrix), cap)
    made.rename_last("logits")  # an Identity node would copy them
    made.add_named("TopK", ["logits", "top"], ["best_values", "best_ids"], axis=-1)
    add_total(made, "logits")
    value = helper.make_tensor_value_info
    inputs = [value("hidden", FLOAT, ["N", matrix.shape[1]]), value("top", INT64, [1])]
    kinds = {"best_ids": INT64}
    outputs = [value(name, kinds.get(name, FLOAT), None) for name in (*OUTPUTS, "logits")]
    return made.file(inputs, outputs), made.arrays


def capped(made: OnnxModel, product: str, cap: float | None) -> str:
    """The logits of the head's product. With a soft cap, the states are divided by it (see `lower.state_scale`)."""
    if cap is None:
        return product
    logits: str = made.add("Mul", made.add("Tanh", product), made.constant(cap, np.float32))
    return logits


def add_total(made: OnnxModel, logits: str) -> None:
    """Add the output `total`, for the rows whose best logits are in `best_values`."""
    powers = made.add("Exp", made.add("Sub", logits, made.add("Gather", "best_values", made.constant([0]), axis=1)))
    made.add_named("ReduceSum", [powers, made.constant([1])], ["total"], keepdims=1)
