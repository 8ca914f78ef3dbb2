"""`custom_generate=lookahead.decoding(...)`: the decoding loop that `model.generate` calls in place of its own.

`generate` has by then read every argument: it hands over the prompt, the logits processors, the stopping criteria and
the generation config. What is left is to decode, with the same result as one token per step would give.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lookahead import cost
from lookahead.backends.check import layer_shapes, position_limit, probe
from lookahead.backends.eager import PREFILL_CHUNK, EagerBackend
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine import Accepted, Engine
from lookahead.hook import caches
from lookahead.hook.arguments import Dropped, Rows, dropped_arguments, refuse_unsupported, rows_of
from lookahead.hook.rules import Plan
from lookahead.models import cache_dir
from lookahead.sequence import DecodingSequence
from lookahead.sources import Warmth
from lookahead.stats import Stats


def decoding(config: LookaheadConfig | None = None, *, seed: int | None = None, **settings: Any) -> Decoding:
    """Lookahead decoding for `model.generate(..., custom_generate=lookahead.decoding())`.

    `settings` are fields of `LookaheadConfig`: `window=15, ngram=5, guesses=15`. With neither `config` nor settings the
    cost of a step is measured at the first call (once per model and machine) and the default fitted to it.
    Sampling draws from torch's generator, as `generate` does; with a `seed` row i of a batch draws from its own
    generator, seeded with `seed + i`, so that rows need not wait for each other.
    """
    if config is None and not settings:
        return Decoding(None, seed)
    return Decoding((config or LookaheadConfig()).adapted(**settings), seed)


class Decoding:
    """What `generate` calls. `stats` are those of the last call, one per row."""

    def __init__(self, config: LookaheadConfig | None = None, seed: int | None = None) -> None:
        if seed is not None:
            SamplingParams(seed=seed)
        self.config, self.seed = config, seed
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
            refuse_unsupported(generation_config, dropped, model_kwargs)
            run = Run(model, rows_of(input_ids, generation_config, model_kwargs), generation_config, model_kwargs)
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


@dataclass
class Known:
    """What was found out about a model; it holds as long as the model's `state` does."""

    state: tuple[Any, ...]
    shapes: list[tuple[torch.Tensor, torch.Tensor]]
    warmth: Warmth = field(default_factory=Warmth)
    default: LookaheadConfig | None = None


_known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
"""Facts, not settings: `decoding()` is often made anew for every call, and to probe the model again takes 7 passes."""


class Run:
    """One call of `generate`."""

    def __init__(self, model: Any, rows: Rows, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        self.model, self.rows, self.wants = model, rows, generation_config
        self.cache, self.embeds = model_kwargs.get("past_key_values"), model_kwargs.get("inputs_embeds")
        caches.check(self.cache)
        self.known = self._know()
        chunk = generation_config.prefill_chunk_size or PREFILL_CHUNK
        self.backend = EagerBackend(model, verify=False, shapes=self.known.shapes, prefill_chunk=chunk)
        self.sequences: list[DecodingSequence] = []
        self._left: dict[DecodingSequence, caches.Layers] = {}

    def _know(self) -> Known:
        model = self.model
        place = model.get_input_embeddings().weight
        state = (place.device, place.dtype, model.config._attn_implementation, model.training)
        known = _known.get(model)
        if known is None or known.state != state:
            known = Known(state, layer_shapes(model))
            probe(EagerBackend(model, verify=False, shapes=known.shapes))
            _known[model] = known
        return known

    def decode(self, config: LookaheadConfig | None, plan: Plan, streamer: Any) -> Any:
        ids = self.rows.input_ids
        keeps_cache = self.wants.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)
        # 1. One sequence per row, and the K/V that came along.
        self.sequences = self._sequences(config or self._default(), plan, ids.shape[1])
        judge = plan.judge(self.sequences, ids)
        engine = Engine(self.backend, judge, self._leave if keeps_cache else None)
        for row, sequence in enumerate(self.sequences):
            engine.add(sequence, self._slot(row))
        # 2. Step until all have ended.
        while engine.running:
            self._stream(streamer, engine.step(), plan)
        # 3. What was asked for.
        self._check_ends()
        output = plan.output(self.sequences, ids)
        if keeps_cache and self.cache is not None:
            caches.extend(self.cache, self.backend, self.rows, output[:, :-1], [self._left[s] for s in self.sequences])
        if not self.wants.return_dict_in_generate:
            return output
        kept: dict[str, Any] = {
            name: plan.kept(name) for name in ("scores", "logits") if getattr(self.wants, f"output_{name}")
        }
        return GenerateDecoderOnlyOutput(sequences=cast(Any, output), past_key_values=self.cache, **kept)

    def _default(self) -> LookaheadConfig:
        if self.known.default is None:
            self.known.default = cost.fitted(LookaheadConfig(), self.backend, self.model.config.to_dict(), cache_dir())
        return self.known.default

    def _sequences(self, config: LookaheadConfig, plan: Plan, length: int) -> list[DecodingSequence]:
        model_config = self.model.config.get_text_config(decoder=True)
        limit = position_limit(model_config)
        prompts = [self.rows.tokens(row) for row in range(len(self.rows.input_ids))]
        room = max(1, plan.max_length - length)
        if limit.hard and limit.positions is not None:
            longest = max(map(len, prompts)) + room
            if longest > limit.positions:
                raise ValueError(
                    f"model type {self.model.config.model_type!r} can be decoded exactly up to {limit.positions} "
                    f"positions ({limit.reason}), and {longest} are asked for; lower max_new_tokens"
                )
        rules = StopRules(room, plan.eos_ids, limit.positions)
        return [DecodingSequence(prompt, config, rules=rules, warmth=self.known.warmth) for prompt in prompts]

    def _slot(self, row: int) -> int:
        slot = self.backend.open()
        if self.rows.past:
            length = self.rows.cached(row)
            self.backend.adopt(slot, length, caches.row_of(self.cache, row, self.rows.mask[row, : self.rows.past]))
        return slot

    def _leave(self, sequence: DecodingSequence, slot: int) -> None:
        self._left[sequence] = self.backend.cached(slot)

    def _stream(self, streamer: Any, accepted: Sequence[Accepted], plan: Plan) -> None:
        """A whole block for one row; for several, which then move together, one tensor [B] per position."""
        if streamer is None:
            return
        if len(self.sequences) == 1:
            streamer.put(torch.tensor(accepted[0].tokens))
            return
        for column in plan.newest(len(accepted[0].tokens)).T.cpu():
            streamer.put(column)

    def _check_ends(self) -> None:
        for sequence in self.sequences:
            rules = sequence.rules
            if sequence.finish_reason == "length" and sequence.room < rules.max_tokens:
                raise ValueError(
                    f"the model's {rules.max_length} positions are full after {sequence.room} of "
                    f"{rules.max_tokens} tokens; lower max_new_tokens or shorten the prompt"
                )
