"""The tests' tiny random models, of any family, and the engine around a backend.

The weights are wide (`initializer_range` 0.3), so that no two logits are within rounding of each other and tokens can
be compared exactly. `docs/tiny_models.py` makes a tiny model of every class by rules instead, for the table of models.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

VOCABULARY = 61
PROMPTS = ([5, 9, 5, 9, 5, 3], [7], list(range(2, 32)), [4, 4, 8, 1, 4, 4, 8, 1, 4, 4])
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny(kind: str, *, seed: int = 1, stirred: bool = True, device: str | torch.device = "cpu", **changes: Any) -> Any:
    """A tiny random model of this family in fp32; equal weights for equal arguments, on every device.

    Two query heads share a K/V head where the family knows such groups; `changes` are config fields. When `stirred`,
    gains of norms, biases, sinks and the like are random, too: as they come from transformers, ones and zeros, a
    backend that forgot them would pass every test.
    """
    key = f"{kind} {seed} {stirred} {sorted(changes.items())}"
    if key not in _made:
        _made[key] = _make(kind, seed, stirred, changes), torch.get_rng_state()
    model, state = _made[key]
    torch.set_rng_state(state)  # what a test draws next does not depend on which test made the model first
    return copy.deepcopy(model).to(device)


_made: dict[str, tuple[Any, torch.Tensor]] = {}
"""Models that nobody changes, and the state of torch's generator after each: a copy takes half the time or less."""


def _make(kind: str, seed: int, stirred: bool, changes: dict[str, Any]) -> Any:
    torch.manual_seed(seed)
    made = getattr(transformers, f"{kind}Config")
    grouped = {"num_key_value_heads": 2} if hasattr(made, "num_key_value_heads") else {}
    fields = {made.attribute_map.get(name, name): value for name, value in {**TINY, **grouped, **changes}.items()}
    model = transformers.AutoModelForCausalLM.from_config(made(**fields)).float().eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if stirred and "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif stirred and name.endswith(("bias", "sinks", "alpha_p", "alpha_n")):
            parameter.data.normal_(0, 0.5, generator=generator)
        elif stirred and name.endswith("A_log"):
            parameter.data.uniform_(-3.0, 0.0, generator=generator)  # so slow a decay that states reach far back
        elif stirred and name.endswith(".D"):
            parameter.data.normal_(1, 0.5, generator=generator)
        elif stirred and not parameter.any():  # AFMoE's routers
            parameter.data.normal_(0, TINY["initializer_range"], generator=generator)
    for name, buffer in model.named_buffers():
        if stirred and name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=generator)
        elif stirred and name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0, 0.2, generator=generator)
    return model


def run(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    config: LookaheadConfig,
    count: int = 24,
    sampling: SamplingParams | None = None,
) -> list[DecodingSequence]:
    """All prompts in one batch, to their ends."""
    rules = StopRules(count, frozenset(), backend.max_length)
    sequences = [DecodingSequence(prompt, config, sampling, rules) for prompt in prompts]
    engine = Engine(backend)
    for sequence in sequences:
        engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    return sequences


def outputs(*args: Any, **kwargs: Any) -> list[list[int]]:
    """As `run`: the new tokens alone."""
    return [sequence.output for sequence in run(*args, **kwargs)]


def greedy(slot: int, chunk: Sequence[int], tree: TokenTree, top: int = 0, *, logits: bool = False) -> StepInput:
    return StepInput(slot, list(chunk), tree, SamplingParams(), (), top, logits)


def root(token: int) -> TokenTree:
    return TokenTree([token], [-1], [0], [0])


def random_tree(size: int, seed: int, rows: int | None = None) -> TokenTree:
    """Nodes that hang from one of the nine before them, and logits of all or of `rows` of them."""
    rng = random.Random(repr((size, seed)))
    parents = [-1, *(rng.randrange(max(0, i - 9), i) for i in range(1, size))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    needed = sorted(rng.sample(range(size), size if rows is None else rows))
    return TokenTree([rng.randrange(VOCABULARY) for _ in range(size)], parents, depths, needed)
