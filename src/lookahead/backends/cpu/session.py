"""ONNX Runtime sessions, and the one of the step: it is bound to the memory of the K/V buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
import torch

from lookahead.backends.cpu.kv import KVBuffer
from lookahead.backends.cpu.lower import lower
from lookahead.backends.cpu.onnx_model import Array
from lookahead.machine import cores
from lookahead.models.spec import Decoder

REVISION = 2
"""Raised when a change of `lower` changes the time of steps. Earlier measurements are then ignored."""
KERNELS = f"onnxruntime {onnxruntime.__version__}, step {REVISION}"
"""Identifies the kernels of a step, on which its time depends."""


def start(file: bytes, arrays: Mapping[str, np.ndarray[Any, Any]], threads: int) -> onnxruntime.InferenceSession:
    """A session of an ONNX model. `arrays` are the weights that its file names."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # it plans memory for one shape of inputs, and ours change
    options.log_severity_level = 3
    # Waiting threads must not spin: on a busy machine they would take time from working threads.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # The arena gains nothing here, and keeps hundreds of megabytes: it doubles its size each time that it grows.
    options.enable_cpu_mem_arena = False
    weights = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    options.add_external_initializers(list(weights), list(weights.values()))
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


class Session:
    """Runs steps of one model, up to the hidden states."""

    def __init__(self, decoder: Decoder, threads: int) -> None:
        file, arrays = lower(decoder)
        self._session = start(file, arrays, threads)
        self._tables = [arrays.get("embedding"), arrays.get("position_embedding")]  # the session may read them in place
        self._binding = self._session.io_binding()
        self._bound: Any = None

    def run(
        self, inputs: Mapping[str, np.ndarray[Any, Any]], kv: KVBuffer, first: int, sequences: int, blocks: int
    ) -> Array:
        """Run a step on the sequences from index `first` on. Returns the needed rows' hidden states [N, H]. See
        `lower` for the inputs."""
        self._bind_kv(kv, first, sequences, blocks)
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        self._binding.bind_output("hidden", "cpu")
        self._session.run_with_iobinding(self._binding)
        hidden: Array = self._binding.get_outputs_as_ortvaluevector()[0].numpy()
        return hidden

    def _bind_kv(self, kv: KVBuffer, first: int, sequences: int, blocks: int) -> None:
        """Bind every layer's K/V as input and as output, so that new rows are written in place.

        Several sequences are bound with all their blocks, because their memory must be contiguous.
        """
        blocks = blocks if sequences == 1 else kv.blocks
        addresses = [tensor.data_ptr() for tensor in kv.tensors()]
        wanted = addresses, kv.sequences, kv.blocks, first, sequences, blocks
        if wanted == self._bound:
            return
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._binding.bind_output("hidden", "cpu")  # outputs come in the order of their binding
        for number in kv.layers:
            for name, tensor in zip((f"keys_{number}", f"values_{number}"), kv.layer(number), strict=True):
                shape = (sequences, blocks, *tensor.shape[2:])
                address = tensor[first].data_ptr()
                self._binding.bind_input(name, "cpu", 0, np.float32, shape, address)
                self._binding.bind_output(f"{name}_out", "cpu", 0, np.float32, shape, address)
        self._bound = wanted


def usable_threads() -> int:
    """Threads per step: torch's number, but no more than the cores available to this process."""
    return min(torch.get_num_threads(), cores())
