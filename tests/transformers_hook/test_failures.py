"""`generate` on a machine whose compilers or device fail: one line, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import decoding

import lookahead
from lookahead.backends.failures import CompilerError
from lookahead.models.facts import UnsupportedModelError
from lookahead.transformers_hook import backends

LINE = "the Triton kernel 'attend' does not compile: too many registers"


@pytest.fixture
def model(make_model: Any) -> Any:
    """One of the test's own: what is found out about it is kept with it."""
    return make_model(eos_token_id=None)


def test_kernels_that_do_not_compile_are_tried_once(
    model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        raise CompilerError(LINE)

    monkeypatch.setattr(backends, "graph_backend", fail)
    for _ in range(3):
        with pytest.raises(UnsupportedModelError, match=LINE):
            model.generate(**inputs, max_new_tokens=4, custom_generate=decoding(backend="graph"))
    assert tries == 1
    output = model.generate(**inputs, max_new_tokens=4, custom_generate=decoding(backend="eager"))
    assert output.shape[1] == inputs["input_ids"].shape[1] + 4


def test_a_lost_device_is_a_device_error(model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **options: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch for ...")

    model.generate(**inputs, max_new_tokens=4, custom_generate=decoding(backend="eager"))
    monkeypatch.setattr("lookahead.backends.eager.backend.EagerBackend.collect", lost)
    for _ in range(2):
        with pytest.raises(lookahead.DeviceError, match=r"\(CUDA error: unspecified launch failure\); no call of"):
            model.generate(**inputs, max_new_tokens=4, custom_generate=decoding(backend="eager"))
