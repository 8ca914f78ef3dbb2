"""What backends say of themselves, and that nobody finds it out in another way."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny
from toys import VOCABULARY, ThreadGroup, ToyBackend

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.base import Capabilities, StepInput
from lookahead.backends.cpu.backend import CpuBackend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.exact import default_within, exact_config
from lookahead.backends.graph.backend import GraphBackend
from lookahead.config import StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.parallel import ParallelBackend


def test_every_backend_states_its_capabilities() -> None:
    model = tiny("Llama")
    assert EagerBackend(model).capabilities == Capabilities("eager", pads=True, prompt_chunk=1024)
    assert GraphBackend(model, most_rows=32).capabilities == Capabilities(
        "graph", row_sizes=(1, 2, 4, 8, 16, 32), runs_ahead=True, draws_noise=True
    )
    half = GraphBackend(tiny("Llama").to(torch.bfloat16)).capabilities
    assert (half.exact_nodes, half.exact_depth, half.row_sizes[-1]) == (256, 64, 1024)
    cpu = CpuBackend(model, probed=False).capabilities
    assert cpu == Capabilities("cpu", cpu.kernels)
    assert cpu.kernels


def test_ranks_wait_for_each_other() -> None:
    """A rank of several begins no step early, draws by no noise of its own, and has the limits of its own backend."""
    inner = ToyBackend()
    inner.capabilities = Capabilities("toy", exact_nodes=8, overlaps=True, draws_noise=True)
    group: Any = ThreadGroup(0, 3, [], None)  # type: ignore[arg-type]
    assert ParallelBackend(inner, group).capabilities == Capabilities("toy", exact_nodes=8, ranks=3)


def test_a_tensor_parallel_model_counts_its_ranks() -> None:
    model: Any = tiny("Llama")
    model._tp_size = 2
    assert EagerBackend(model, probed=False).capabilities.ranks == 2


class Chains(ToyBackend):
    """A backend whose trees cannot branch."""

    capabilities = Capabilities("chains", branches=False)
    most_rows, dtype = 64, torch.float32  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        for item in inputs:
            assert list(item.tree.parents) == list(range(-1, len(item.tree) - 1))
            self.sizes.append(len(item.tree))
        return super().launch(inputs)


def output_of(backend: ToyBackend, config: LookaheadConfig) -> list[int]:
    prompt = random.Random(1).choices(range(VOCABULARY), k=12) * 3
    sequence = DecodingSequence(prompt, config, rules=StopRules(60))
    engine = Engine(backend)
    engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    return sequence.output


@pytest.mark.parametrize(
    "config",
    [
        LookaheadConfig(),
        LookaheadConfig(exact=False),
        LookaheadConfig.paper(3, 4, 3),
        LookaheadConfig.jacobi(5),
        LookaheadConfig.prompt_lookup(),
        LookaheadConfig.autoregressive(),
    ],
)
@pytest.mark.thinned(1, most=3)
def test_where_trees_cannot_branch_a_step_is_one_guess(config: LookaheadConfig) -> None:
    backend, lines = Chains(), list[str]()
    fitted = exact_config(config, backend, lines.append)  # type: ignore[arg-type]
    assert (fitted is config) == config.is_chain == (not lines)
    assert all("cannot branch" in line and "exact=False" not in line for line in lines)
    assert output_of(backend, fitted) == output_of(ToyBackend(), LookaheadConfig.autoregressive())
    assert (max(backend.sizes) > 1) == (config.budget > 1)
    if lines:
        with pytest.raises(ValueError, match="cannot branch"):
            output_of(backend, config)


def test_chains_keep_to_the_other_limits_too() -> None:
    backend, lines = Chains(), list[str]()
    backend.capabilities = replace(backend.capabilities, exact_nodes=8)
    backend.dtype = torch.int8  # type: ignore[assignment]
    fitted = exact_config(LookaheadConfig(), backend, lines.append)  # type: ignore[arg-type]
    assert (fitted.is_chain, fitted.budget) == (True, 8)
    assert len(lines) == 1
    assert "cannot branch" in lines[0]
    assert "the budget from 128 to 8 tokens" in lines[0]
    assert default_within(backend).is_chain  # type: ignore[arg-type]


def test_noise_needs_a_backend_that_draws_with_it() -> None:
    request = Request(DecodingSequence([1, 2], LookaheadConfig.autoregressive()), noise=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="toy backend cannot sample with a request's own noise"):
        Engine(ToyBackend()).submit(request)
    draws = ToyBackend()
    draws.capabilities = Capabilities("toy", draws_noise=True)
    Engine(draws).submit(request)


SNIFFS = (
    r"isinstance\([^)]*Backend",
    r"(getattr|hasattr)\(\s*[\w.]*\bbackend\s*,",
    r"_tp_size",
)


@pytest.mark.parametrize("pattern", SNIFFS)
def test_callers_ask_the_capabilities(pattern: str) -> None:
    """Not a backend's class, nor whether it has some attribute. Who splits a model is read in one function."""
    source = Path(lookahead.__file__).parent
    found = [
        str(path.relative_to(source))
        for path in sorted(source.rglob("*.py"))
        for _ in re.finditer(pattern, path.read_text(encoding="utf-8"))
    ]
    assert found == (["models/facts.py"] if "_tp_size" in pattern else [])
