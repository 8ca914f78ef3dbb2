"""`custom_generate=lookahead.decoding(...)`: what `model.generate` calls in place of its own decoding loop.

`generate` has by then read every argument: it hands over the prompt, the logits processors, the stopping criteria and
the generation config. What is left is to decode (`run.Run`), with the same result as one token per step would give.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from lookahead.backends.choose import check_name
from lookahead.backends.support import check_supported
from lookahead.config import LookaheadConfig, SamplingParams
from lookahead.stats import Stats
from lookahead.transformers_hook.arguments import Dropped, check_padding, dropped_arguments, refuse_unsupported, rows_of
from lookahead.transformers_hook.rules import Plan
from lookahead.transformers_hook.run import Run


def decoding(
    config: LookaheadConfig | None = None, *, seed: int | None = None, backend: str = "eager", **settings: Any
) -> Decoding:
    """Lookahead decoding for `model.generate(..., custom_generate=lookahead.decoding())`.

    `settings` are fields of `LookaheadConfig`: `window=15, ngram=5, guesses=15`. With neither `config` nor settings the
    cost of a step is measured at the first call (once per model and machine) and the default fitted to it.
    Sampling draws from torch's generator, as `generate` does; with a `seed` row i of a batch draws from its own
    generator, seeded with `seed + i`, so that rows need not wait for each other.

    `backend`: 'eager' runs the model as it is. 'graph' runs Llama-like models as `load(backend="graph")` does, which is
    made for GPUs: the model's projections become views of larger matrices, and a K/V buffer and captured steps are kept
    with it for the next call. 'auto' is 'graph' on CUDA for the models that it runs, else 'eager'.
    """
    if config is None and not settings:
        return Decoding(None, seed, backend)
    return Decoding((config or LookaheadConfig()).adapted(**settings), seed, backend)


class Decoding:
    """What `generate` calls. `stats` are those of the last call, one per row."""

    def __init__(self, config: LookaheadConfig | None = None, seed: int | None = None, backend: str = "eager") -> None:
        if seed is not None:
            SamplingParams(seed=seed)
        check_name(backend)
        self.config, self.seed, self.backend = config, seed, backend
        self.stats: list[Stats] = []

    @property
    def __signature__(self) -> inspect.Signature:
        """What `generate` looks at to learn which arguments to pass: the moment to ask for those it would drop."""
        dropped_arguments(self, sys._getframe(1))
        signature = inspect.signature(type(self).__call__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        tokenizer: Any = None,
        assistant_model: Any = None,
        synced_gpus: bool = False,
        dropped: Dropped | None = None,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """input_ids [B, L] -> [B, L + output], or a `GenerateDecoderOnlyOutput` if the config asks for it."""
        dropped = dropped or Dropped(streamer, assistant_model, synced_gpus)
        try:
            check_supported(model)
            refuse_unsupported(generation_config, dropped, model_kwargs)
            rows = rows_of(input_ids, generation_config, model_kwargs)
            check_padding(model, rows, model_kwargs)
            run = Run(model, rows, generation_config, model_kwargs, self.backend)
            plan = Plan.of(
                logits_processor, stopping_criteria, generation_config, len(input_ids), generator, self.seed,
                streaming=dropped.streamer is not None,
            )  # fmt: skip
            output = run.decode(self.config, plan, dropped.streamer)
            self.stats = [sequence.stats for sequence in run.sequences]
            return output
        finally:
            if dropped.streamer is not None:
                dropped.streamer.end()
