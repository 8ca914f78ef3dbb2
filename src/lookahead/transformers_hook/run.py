"""Decodes one call of `generate`: one sequence per prompt, the engine's steps, and transformers' output types."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, cast

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lookahead.algorithm.budget import for_bigrams, without_cost
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.eager.chains import ChainBackend
from lookahead.backends.exact import exact_config
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.kv import MOST_SHIFT
from lookahead.backends.sampling import top_tokens
from lookahead.cache import cache_dir
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Event, Request, StepResult, raise_errors
from lookahead.loading.fitting import fitted
from lookahead.models.facts import PositionLimit, UnsupportedModelError, cached_copies, kind_of
from lookahead.transformers_hook import caches, chains, facts, output_collector
from lookahead.transformers_hook.arguments import check_prompt, is_ids_only, limit_of
from lookahead.transformers_hook.backends import Backends
from lookahead.transformers_hook.cache_state import restored_on_error
from lookahead.transformers_hook.draws import StepNoise, multinomial_sampling
from lookahead.transformers_hook.prompt import (
    Start,
    check_hidden,
    is_of_library,
    is_usual,
    run_prompt,
    why_not_on_graph,
)
from lookahead.transformers_hook.rules import BatchRules


class Run:
    """One call of `generate`."""

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        backend: str = "auto",
    ) -> None:
        self.model, self.wants, self.kwargs = model, generation_config, model_kwargs
        self.batch = check_prompt(input_ids, generation_config, model_kwargs)
        self.cache = model_kwargs.get("past_key_values")
        modules = facts.modules_of(model)
        facts.check_adapters(modules, len(input_ids))
        self.outputs = output_collector.requested_outputs(generation_config)
        output_collector.check_outputs(model, self.outputs)
        self.facts = facts.of(model, modules)
        self._backends = Backends(model, modules, self.facts, backend)
        self._trees = self.facts.runs_trees(model)
        if self._trees:
            if getattr(self.cache, "_is_user_defined", False) or self.cache is None or self.cache.get_seq_length():
                caches.check_cache(self.cache, len(input_ids))  # one that `generate` made is checked when it is filled
        else:
            chains.check_given_cache(self.cache, len(input_ids), model_kwargs)
        self.sequences: list[DecodingSequence] = []
        self.collector: output_collector.OutputCollector | None = None
        self._offsets: list[tuple[int, ...]] = [()] * len(input_ids)
        self._left: dict[DecodingSequence, Any] = {}
        self._chains: ChainBackend | None = None
        self._start: Start | None = None  # if the prompt has run
        self._begin = perf_counter()

    def decode(self, config: LookaheadConfig | None, rules: BatchRules, streamer: Any) -> Any:
        """Decode. If the call is refused or fails, a given cache is as it was."""
        with restored_on_error(self.cache):
            return self._decode_on_backend(config, rules, streamer)

    def _decode_on_backend(self, config: LookaheadConfig | None, rules: BatchRules, streamer: Any) -> Any:
        length, (batch_size, tokens) = self.batch.input_ids.shape[1], self.batch.mask.shape
        self._limit(self.batch.mask.sum(dim=-1).tolist(), max(1, rules.max_length - length))
        graph = self._backends.graph_or_none(batch_size, tokens + max(0, self.wants.max_length - length))
        if graph is not None and not graph.capabilities.adopts and not self._fits_graph(graph):
            graph = None
        if graph is None:
            return self._decode_after(None, config, rules, streamer)
        with self.facts.turn:
            whole = not graph.capabilities.adopts  # see `_fits_graph`
            plain = whole or (is_usual(self.model) and is_ids_only(self.batch, self.kwargs))
            if plain and graph.capabilities.runs_prompts:
                engine = self._set_up(graph, config, rules)
                noise = self._noise(graph, rules)
                graph.prepare_fallbacks(noise=noise is not None)
                return self._decode(engine, None, noise, rules, streamer)
            return self._decode_after(graph, config, rules, streamer)

    def _fits_graph(self, graph: GraphBackend) -> bool:
        """Whether a graph backend that adopts no K/V can run the call: its prompt too, and no cache is left behind."""
        biased = any(layer.projection.bias is not None for layer in graph.layers.recurrent)
        reason, remedy = why_not_on_graph(self.model, self.batch, self.kwargs, self._keeps_cache, biased=biased)
        if not reason:
            return True
        if self._backends.name == "graph":
            raise UnsupportedModelError(f"{reason}; {remedy}use backend='auto'")
        self.facts.log_once(f"note: {reason}; the eager backend runs it")
        return False

    @property
    def _keeps_cache(self) -> bool:
        """Whether the caller gets the cache: it was asked for, or given."""
        return bool(self.wants.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False))

    def _decode_after(
        self, graph: GraphBackend | None, config: LookaheadConfig | None, rules: BatchRules, streamer: Any
    ) -> Any:
        """Run the prompt as `generate` does, then decode."""
        start = run_prompt(self.model, self.batch.input_ids, self.wants, self.kwargs, trees=self._trees)
        if self._trees:
            check_hidden(self.model, start, self.batch.mask)
        engine = self._set_up_after(start, graph, config, rules)
        return self._decode(engine, start.logits, None, rules, streamer)

    def _set_up_after(
        self, start: Start, graph: GraphBackend | None, config: LookaheadConfig | None, rules: BatchRules
    ) -> Engine:
        """`_set_up` after the prompt has run, on the graph backend if it can continue from there."""
        shifts = start.shifts
        may_shift = is_of_library(self.model) and shifts is not None and max(shifts)[0] <= MOST_SHIFT
        if graph is not None and shifts is not None and (may_shift or not any(map(any, shifts))):
            self.batch, self.cache, self._offsets = start.batch, start.cache, list(shifts)
            engine = self._set_up(graph, config, rules)
            graph.prepare_fallbacks()
            return engine
        if graph is not None:
            reason = (
                f"the graph backend cannot continue from this prompt, since model type {kind_of(self.model)!r} "
                "counts positions or takes arguments in its own way"
            )
            if self._backends.name == "graph":
                raise UnsupportedModelError(f"{reason}; use backend='auto'")
            self.facts.log_once(f"note: {reason}; the eager backend runs it")
        eager, self._chains = self._backends.eager_or_chains(start, self.batch.past, config)
        backend: EagerBackend | ChainBackend | None = eager or self._chains
        if backend is None:
            raise RuntimeError("every model that is not refused runs trees or chains")
        self._start, self.batch, self.cache, self._offsets = start, start.batch, start.cache, start.offsets
        if self.outputs:
            if self._chains is not None:
                chains.check_outputs(self.outputs)
            self.collector = output_collector.OutputCollector(backend, start.batch, start.output, self.outputs)
        return self._set_up(backend, config, rules)

    def _set_up(self, backend: Backend, config: LookaheadConfig | None, rules: BatchRules) -> Engine:
        """Set the backend, and create one sequence per prompt and the engine that decodes them."""
        self.backend = backend
        chosen, budget = (config, DraftBudget()) if config is not None else self._default()
        chosen = self._exact(chosen)
        if backend.capabilities.row_sizes and "recycle" in chosen.active_sources:
            self._learn_bigrams(chosen.budget)
            if config is None and self.facts.memory.bigrams is not None:
                chosen = for_bigrams(chosen)
        self.sequences = self._sequences(chosen, rules)
        return Engine(backend, budget)

    def _learn_bigrams(self, nodes: int) -> None:
        self._backends.learn_bigrams(self.backend, self.batch.tokens(0), nodes)

    def _decode(
        self,
        engine: Engine,
        first: torch.Tensor | None,
        noise: StepNoise | None,
        rules: BatchRules,
        streamer: Any,
    ) -> Any:
        """Decode. `first` are the logits [B, V] after the prompt if it has run."""
        ids = self.batch.input_ids
        keeps_cache = self._keeps_cache
        # 1. One request per sequence, with any K/V that exist already.
        verifiers = rules.verifiers(self.sequences, ids) if noise is None else [None]
        try:
            requests = [
                Request(
                    sequence, verifier, noise, finished=self._keep_cache if keeps_cache else None, begin=self._begin
                )
                for sequence, verifier in zip(self.sequences, verifiers, strict=True)
            ]
            for batch_index, request in enumerate(requests):
                self._submit(batch_index, request, engine)
            if self._chains is not None and self._start is not None:
                chains.adopted(self._chains, self._start, [request.slot for request in requests])
            if first is not None:
                finished = engine.accept_and_commit(self._roots(requests, first), commit=False)
                self._stream(streamer, raise_errors(finished.events()), rules)
            # 2. Step until all have ended.
            while engine.running:
                events = raise_errors(engine.step())
                self._stream(streamer, events, rules)
                if self.collector is not None:
                    self.collector.collect(events, [self.sequences.index(event.request.sequence) for event in events])
        finally:
            for id in engine.running:
                engine.cancel(id)
            if noise is not None:
                noise.end()
        # 3. The requested outputs.
        self._check_ends()
        output = rules.output(self.sequences, ids)
        if keeps_cache and self.cache is not None:
            left = [self._left[sequence] for sequence in self.sequences]
            if self._chains is not None and self._start is not None:
                chains.extend(self.cache, self._chains, self._start, output[:, :-1], left[0])
            else:
                caches.extend(self.cache, self.backend, self.batch, output[:, :-1], left, self._offsets, self._copies)
        if not self.wants.return_dict_in_generate:
            return output
        kept: dict[str, Any] = {
            name: rules.kept(name) for name in ("scores", "logits") if getattr(self.wants, f"output_{name}")
        }
        if self.collector is not None:
            kept |= {name: tuple(parts) for name, parts in self.collector.kept.items()}
        return GenerateDecoderOnlyOutput(sequences=cast(Any, output), past_key_values=self.cache, **kept)

    @property
    def _copies(self) -> int:
        """How often the cache holds each of the backend's K/V heads. The eager backend has those of the cache."""
        config = self.model.config.get_text_config(decoder=True)
        return cached_copies(config) if self.used == "graph" else 1

    def _default(self) -> tuple[LookaheadConfig, DraftBudget]:
        """The config where none was given, and what decides how many draft tokens its steps take.

        Where steps are captured, and there are no experts, one of the whole budget costs little more than one of a
        token, so that nothing is measured and no clock decides. Neither does one for the ranks of a tensor-parallel
        model: each would judge by its own, and wait for the others for ever. Elsewhere a curve is measured quickly,
        and the budget is guarded.
        """
        capabilities = self.backend.capabilities
        if capabilities.row_sizes and not capabilities.experts:
            return without_cost(LookaheadConfig()), DraftBudget()
        if self.facts.default is None:
            default = fitted(LookaheadConfig(), self.backend, cache_dir(), quick=True)
            if capabilities.ranks == 1:
                cost = None if default.step_cost is None else PassCost(default.step_cost)
                self.facts.budget = DraftBudget(cost, guarded=True)
            self.facts.default = default
        return self.facts.default, self.facts.budget

    def _exact(self, config: LookaheadConfig) -> LookaheadConfig:
        """The config limited to what the backend runs exactly. Changes are logged."""
        return exact_config(config, self.backend, self.facts.log_once)

    def _noise(self, graph: GraphBackend, rules: BatchRules) -> StepNoise | None:
        """Noise for sampling inside the graph backend's steps, for one sequence with supported processors; else
        None."""
        if not (rules.by_scores and len(self.sequences) == 1):
            return None
        sampling = multinomial_sampling(cast(Any, rules.rule.processors) or ())
        if sampling is None:
            return None
        return StepNoise(self.sequences[0], sampling, graph.noise, rules.generator)

    @property
    def used(self) -> str:
        """The name of the backend that the call ran on."""
        return self.backend.capabilities.name

    def _limit(self, lengths: Sequence[int], room: int) -> PositionLimit:
        """The position limit of this call, less the tokens by which positions exceed indices."""
        further = max((max(offset, default=0) for offset in self._offsets), default=0)
        return limit_of(self.model.config, lengths, room, max(0, further), own_masks=not self._trees)

    def _sequences(self, config: LookaheadConfig, rules: BatchRules) -> list[DecodingSequence]:
        prompts = [self.batch.tokens(batch_index) for batch_index in range(len(self.batch.input_ids))]
        room = max(1, rules.max_length - self.batch.input_ids.shape[1])
        limit = self._limit(list(map(len, prompts)), room)
        stop = StopRules(room, rules.eos_ids, limit.positions, last_is_free=True)
        return [DecodingSequence(prompt, config, rules=stop, memory=self.facts.memory) for prompt in prompts]

    def _submit(self, batch_index: int, request: Request, engine: Engine) -> None:
        """Submit a request, with its part of the given cache.

        It has a slot from the start: sequences in lockstep must not wait for others to end.
        """
        engine.check_request(request)  # one that is refused must have no slot
        request.slot = self.backend.open()
        engine.submit(request)
        if self.batch.past and self._chains is None:
            mask = self.batch.mask[batch_index, : self.batch.past]
            layers = caches.layers_of(self.cache, batch_index, mask, self._copies)
            self.backend.adopt(request.slot, self.batch.cached(batch_index), layers, self._offsets[batch_index])

    def _roots(self, requests: Sequence[Request], logits: torch.Tensor) -> list[StepResult]:
        """The results of a step of bare roots with these logits [B, V]."""
        results = []
        for request, sequence_logits in zip(requests, logits, strict=True):
            sequence, row = request.sequence, sequence_logits[None]
            step = StepInput(request.slot, (), TokenTree(sequence.tokens[-1:], [-1], [0], [0]), sequence.sampling, ())
            top = top_tokens(row, MAX_SUCCESSORS).cpu().numpy()
            results.append(StepResult(request, step, StepOutput([int(row.argmax())], top, row)))
        return results

    def _keep_cache(self, request: Request) -> None:
        slot = request.slot
        if self._chains is None:
            self._left[request.sequence] = self.backend.cached(slot)
        elif len(self.sequences) == 1:
            self._left[request.sequence] = self._chains.length(slot), self._chains.cache_of_rows([slot])
        else:
            self._left[request.sequence] = None

    def _stream(self, streamer: Any, events: Sequence[Event], rules: BatchRules) -> None:
        """Send a step's tokens to the streamer as `generate` does: one tensor [B] per position.

        A streamer for one sequence with a true attribute `takes_blocks` gets the entire block at once.
        """
        if streamer is None:
            return
        if len(self.sequences) == 1:
            block = torch.tensor(events[0].tokens)
            for tokens in [block] if getattr(streamer, "takes_blocks", False) else block.split(1):
                streamer.put(tokens)
            return
        # The sequences are in lockstep, but one that ended inside the block has fewer tokens.
        for column in rules.newest(max(len(event.tokens) for event in events)).T.cpu():
            streamer.put(column)

    def _check_ends(self) -> None:
        for sequence in self.sequences:
            rules = sequence.rules
            if sequence.finish_reason == "length" and sequence.room < rules.max_tokens:
                raise ValueError(
                    f"the model's {rules.max_length} positions are full after {sequence.room} of "
                    f"{rules.max_tokens} tokens; lower max_new_tokens or shorten the prompt"
                )
