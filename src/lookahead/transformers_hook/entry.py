"""`custom_generate=lookahead.decoding(...)`: what `model.generate` calls instead of its own decoding loop.

`generate` has then processed its arguments, and passes the prompt, logits processors, stopping criteria and generation
config. `run.Run` decodes with them, and returns the tokens of `generate`'s own loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch

from lookahead.backends.choose import HOOK_BACKENDS, check_backend_name
from lookahead.backends.failures import clear_errors
from lookahead.backends.support import check_supported
from lookahead.config import UNCHANGED, LookaheadConfig, SamplingParams, given_fields, reject_unknown
from lookahead.stats import Stats
from lookahead.transformers_hook import facts, output_collector
from lookahead.transformers_hook.arguments import refuse_unsupported
from lookahead.transformers_hook.dropped import Dropped, recover_dropped, warn_if_dropped
from lookahead.transformers_hook.rules import BatchRules
from lookahead.transformers_hook.run import Run


def decoding(
    config: LookaheadConfig | None = None,
    *misplaced: NoReturn,
    seed: int | None = None, backend: str = "auto", streamer: Any = None,
    window: int = UNCHANGED, ngram: int = UNCHANGED, guesses: int = UNCHANGED, budget: int = UNCHANGED,
    sources: Sequence[str] = UNCHANGED, recycle_scope: str = UNCHANGED, suffix_key: int = UNCHANGED,
    suffix_branches: int = UNCHANGED, suffix_length: int = UNCHANGED, suffix_oldest: bool = UNCHANGED,
    step_cost: Sequence[float] | None = UNCHANGED, shared: bool = UNCHANGED, max_depth: int | None = UNCHANGED,
    exact: bool = UNCHANGED, chain: bool = UNCHANGED,
    **unknown: NoReturn,
) -> Decoding:  # fmt: skip
    """Lookahead decoding for `model.generate(..., custom_generate=lookahead.decoding())`.

    `window` to `chain` are fields of `LookaheadConfig`: `window=15, ngram=5, guesses=15`. They change the config that
    is given, or the default one; see `LookaheadConfig.adapted`. With neither a `config` nor a field, the first call
    measures what a step costs (once per model and machine) and fits the default config to it.

    Sampling uses torch's generator, as `generate` does. With a `seed`, sequence i of a batch has its own generator,
    seeded with `seed + i`, so that sequences do not wait for each other.

    `backend`: 'eager' runs the model as it is. 'graph' runs models with a reader, as `load(backend="graph")` does, and
    is made for GPUs: the model's projections become views of larger matrices, and a K/V buffer and captured steps are
    kept with the model for the next call. 'auto', the default, is 'graph' on CUDA for the models and prompts that it
    can run and the memory that is free, else 'eager'.

    `streamer` is the same as `generate`'s argument. Give it here if a version of transformers does not pass it on. A
    streamer gets one token at a time, as from `generate`; one with a true attribute `takes_blocks` gets entire blocks.
    """
    changes = given_fields(locals())
    if misplaced or not isinstance(config, LookaheadConfig | None):
        raise TypeError(
            "lookahead.decoding takes a LookaheadConfig and settings by name; as `custom_generate` it needs its "
            "parentheses: custom_generate=lookahead.decoding()"
        )
    reject_unknown(unknown, ["seed", "backend", "streamer", *(one.name for one in fields(LookaheadConfig))])
    if changes or config is not None:
        config = (config or LookaheadConfig()).adapted(**changes)
    return Decoding(config, seed, backend, streamer)


class Decoding:
    """The callable passed to `generate`.

    After a call, `stats` holds its counters, one `Stats` per sequence, and `used` the name of the backend it ran on.
    """

    def __init__(
        self,
        config: LookaheadConfig | None = None,
        seed: int | None = None,
        backend: str = "auto",
        streamer: Any = None,
    ) -> None:
        if seed is not None:
            SamplingParams(seed=seed)  # refuses a seed out of range
        check_backend_name(backend, HOOK_BACKENDS)
        self.config, self.seed, self.backend, self.streamer = config, seed, backend, streamer
        self.stats: list[Stats] = []
        self.used = ""

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of `__call__`, by which `generate` selects the arguments to pass.

        `generate` inspects it while it still has the arguments it would drop, so we recover them here.
        """
        recover_dropped(self, inspect.currentframe())
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
        synced_gpus: bool | None = None,
        dropped: Dropped | None = None,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """input_ids [B, L] -> [B, L + output], or a `GenerateDecoderOnlyOutput` if the config requests one.

        `dropped` holds what `recover_dropped` found; a transformers that passes these arguments itself gives them by
        name. `tokenizer` is here because `generate` reads it for stop strings only if our signature names it.
        """
        if self.streamer is None:
            warn_if_dropped(dropped, synced_gpus)
        dropped = dropped or Dropped(streamer, assistant_model, bool(synced_gpus))
        streamer = self.streamer if dropped.streamer is None else dropped.streamer
        try:
            if self.streamer is not None and self.streamer is not streamer:
                raise ValueError("generate and lookahead.decoding were given two streamers; leave one of them out")
            if streamer is not None and dropped.streamer is None:
                streamer.put(input_ids.cpu())  # `generate` does this for a streamer of its own
            check_supported(model)
            refuse_unsupported(generation_config, dropped)
            with clear_errors(input_ids.device):
                run = Run(model, input_ids, generation_config, model_kwargs, self.backend)
                rules = BatchRules.of(
                    logits_processor, stopping_criteria, generation_config, len(input_ids), generator, self.seed,
                    in_step=streamer is not None or bool(output_collector.requested_outputs(generation_config)),
                )  # fmt: skip
                output = run.decode(self.config, rules, streamer)
            self.stats, self.used = [sequence.stats for sequence in run.sequences], run.used
            return output
        except BaseException:
            facts.remove_adapter_hooks(model.modules())
            raise
        finally:
            if streamer is not None:
                streamer.end()
