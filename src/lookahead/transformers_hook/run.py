"""One call of `generate`, decoded: a sequence per row, the engine's steps, and the output in transformers' terms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lookahead.algorithm.sampling import top_tokens
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import StepOutput, TokenTree
from lookahead.backends.base import Backend, Layers, StepInput
from lookahead.backends.choose import choose, graph_backend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.weights import check_graph, relay
from lookahead.backends.support import UnsupportedModelError, input_device, layer_shapes, position_limit, probe
from lookahead.cache import cache_dir
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Event, Request, StepResult
from lookahead.loading import step_cost as cost
from lookahead.transformers_hook import caches
from lookahead.transformers_hook.arguments import Batch
from lookahead.transformers_hook.rules import BatchRules


@dataclass
class ModelFacts:
    """What was found out about a model. It holds as long as the model's `state` does.

    `graph` is the model's graph backend, if a call asked for one; its captured steps are kept for the next call. Only
    one call at a time may use it (`turn`).
    """

    state: tuple[Any, ...]
    shapes: list[tuple[torch.Tensor, torch.Tensor]]
    memory: SharedMemory = field(default_factory=SharedMemory)
    defaults: dict[str, LookaheadConfig] = field(default_factory=dict)
    graph: GraphBackend | None = None
    turn: RLock = field(default_factory=RLock)


_facts_of: WeakKeyDictionary[Any, ModelFacts] = WeakKeyDictionary()
"""Kept beside the model: `decoding()` is often made anew for every call, and probing the model takes 7 passes."""
_finding_out = RLock()
"""Threads that use a model for the first time at once wait here, and share what one of them finds out."""


def state_of(model: Any) -> tuple[Any, ...]:
    """What decides how a model's forward pass computes: where one of these has changed, the model is probed again.

    Besides the weights' device and dtype these are its modules (an adapter replaces some), their hooks, the active
    adapters, and autocast.
    """
    device, weight = input_device(model), model.get_input_embeddings().weight
    modules = tuple(
        (type(module), tuple(module._forward_hooks), tuple(module._forward_pre_hooks), adapters_of(module))
        for module in model.modules()
    )
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return (
        device, weight.dtype, weight.shape, model.config._attn_implementation, model.training, autocast, hash(modules),
    )  # fmt: skip


def adapters_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """The adapters that a PEFT layer applies; nothing for any other module."""
    active = getattr(module, "active_adapters", None)  # on a transformers model this is a method
    return (*active, module.disable_adapters) if isinstance(active, list) else ()


class Run:
    """One call of `generate`."""

    def __init__(
        self, model: Any, batch: Batch, generation_config: Any, model_kwargs: dict[str, Any], backend: str = "eager"
    ) -> None:
        self.model, self.batch, self.wants = model, batch, generation_config
        self.cache, self.embeds = model_kwargs.get("past_key_values"), model_kwargs.get("inputs_embeds")
        caches.check(self.cache, len(batch.input_ids))
        self.facts = self._facts()
        self.backend = self._backend(backend)
        self.sequences: list[DecodingSequence] = []
        self._left: dict[DecodingSequence, Layers] = {}

    def _facts(self) -> ModelFacts:
        """The model's facts; they are found out at the first call, and again when the model's state has changed."""
        model = self.model
        state = state_of(model)
        with _finding_out:
            facts = _facts_of.get(model)
            if facts is None or facts.state != state:
                facts = ModelFacts(state, layer_shapes(model))
                probe(EagerBackend(model, probed=False, shapes=facts.shapes))
                _facts_of[model] = facts
        return facts

    def _backend(self, name: str) -> Backend:
        """An eager backend of this call's own, or the model's graph backend."""
        model, shapes, chunk = self.model, self.facts.shapes, self.wants.prefill_chunk_size

        def eager() -> EagerBackend:
            return EagerBackend(model, probed=False, shapes=shapes, prefill_chunk=chunk)

        return choose(model, name, self._graph, eager)

    def _graph(self) -> GraphBackend:
        """The one that earlier calls used, unless a weight has been replaced since: it would not be seen."""
        if self.model.training:
            raise UnsupportedModelError("the graph backend does not run a model in training mode; call model.eval()")
        check_graph(self.model)
        # What becomes the model's parameters must be fit for training, too.
        with self.facts.turn, torch.inference_mode(False):
            kept = self.facts.graph
            if kept is None or not kept.weights.follow(relay(self.model)):
                kept = cast(GraphBackend, graph_backend(self.model))
                kept.model = proxy(self.model)  # or the model would live as long as what is known about it
                self.facts.graph = kept
        return kept

    def decode(self, config: LookaheadConfig | None, rules: BatchRules, streamer: Any) -> Any:
        with self.facts.turn if isinstance(self.backend, GraphBackend) else nullcontext():
            return self._decode(config, rules, streamer)

    def _decode(self, config: LookaheadConfig | None, rules: BatchRules, streamer: Any) -> Any:
        ids = self.batch.input_ids
        keeps_cache = self.wants.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)
        # 1. One sequence per batch entry, and the K/V that came along.
        first = None if self.embeds is None else self._run_embeds(self.embeds)
        self.sequences = self._sequences(config or self._default(), rules, ids.shape[1])
        verifiers = rules.verifiers(self.sequences, ids)
        engine = Engine(self.backend)
        try:
            requests = [
                Request(sequence, verifier, finished=self._keep_cache if keeps_cache else None)
                for sequence, verifier in zip(self.sequences, verifiers, strict=True)
            ]
            for entry, request in enumerate(requests):
                self._submit(entry, request, engine)
            if first is not None:
                self._stream(streamer, engine.settle(self._roots(requests, first), commit=False), rules)
            # 2. Step until all have ended.
            while engine.running:
                self._stream(streamer, engine.step(), rules)
        finally:
            for id in engine.running:
                engine.cancel(id)
        # 3. What was asked for.
        self._check_ends()
        output = rules.output(self.sequences, ids)
        if keeps_cache and self.cache is not None:
            caches.extend(self.cache, self.backend, self.batch, output[:, :-1], [self._left[s] for s in self.sequences])
        if not self.wants.return_dict_in_generate:
            return output
        kept: dict[str, Any] = {
            name: rules.kept(name) for name in ("scores", "logits") if getattr(self.wants, f"output_{name}")
        }
        return GenerateDecoderOnlyOutput(sequences=cast(Any, output), past_key_values=self.cache, **kept)

    def _default(self) -> LookaheadConfig:
        defaults, kind = self.facts.defaults, type(self.backend).__name__
        if kind not in defaults:
            defaults[kind] = cost.fitted(LookaheadConfig(), self.backend, cache_dir())
        return defaults[kind]

    def _sequences(self, config: LookaheadConfig, rules: BatchRules, length: int) -> list[DecodingSequence]:
        model_config = self.model.config.get_text_config(decoder=True)
        limit = position_limit(model_config)
        prompts = [self.batch.tokens(entry) for entry in range(len(self.batch.input_ids))]
        room = max(1, rules.max_length - length)
        if limit.hard and limit.positions is not None:
            longest = max(map(len, prompts)) + room - 1
            if longest > limit.positions:
                raise ValueError(
                    f"model type {self.model.config.model_type!r} can be decoded exactly up to {limit.positions} "
                    f"positions ({limit.reason}), and {longest} are asked for; lower max_new_tokens"
                )
        stop = StopRules(room, rules.eos_ids, limit.positions, last_is_free=True)
        return [DecodingSequence(prompt, config, rules=stop, memory=self.facts.memory) for prompt in prompts]

    def _submit(self, entry: int, request: Request, engine: Engine) -> None:
        """Let a request take part, with the K/V that came along."""
        engine.submit(request)
        if self.batch.past:
            layers = caches.entry_of(self.cache, entry, self.batch.mask[entry, : self.batch.past])
            self.backend.adopt(request.slot, self.batch.cached(entry), layers)

    @torch.no_grad()
    def _run_embeds(self, embeds: torch.Tensor) -> torch.Tensor:
        """Run a prompt that is given as embeddings [B, T, D]. Returns the logits [B, V] after its last one.

        There is no id for the root of a first tree, so the first token comes from these logits alone.
        """
        if self.cache is None:
            raise ValueError("inputs_embeds needs a K/V cache; leave out use_cache=False")
        mask, past = self.batch.mask, self.batch.past
        positions = (mask.long().cumsum(dim=-1) - 1).clamp_min(0)
        output = self.model(
            inputs_embeds=embeds[:, past:],
            attention_mask=mask.long(),
            position_ids=positions[:, past:],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.batch = replace(self.batch, past=mask.shape[1])
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _roots(self, requests: Sequence[Request], logits: torch.Tensor) -> list[StepResult]:
        """A step of bare roots that gave these logits [B, V]."""
        results = []
        for request, entry_logits in zip(requests, logits, strict=True):
            sequence, row = request.sequence, entry_logits[None]
            step = StepInput(request.slot, (), TokenTree(sequence.tokens[-1:], [-1], [0], [0]), sequence.sampling, ())
            top = top_tokens(row, KEPT_TOKENS).cpu().numpy()
            results.append(StepResult(request, step, StepOutput([int(row.argmax())], top, row)))
        return results

    def _keep_cache(self, request: Request) -> None:
        self._left[request.sequence] = self.backend.cached(request.slot)

    def _stream(self, streamer: Any, events: Sequence[Event], rules: BatchRules) -> None:
        """Put what a step gave as `generate` does: one tensor [B] per position.

        A streamer for one sequence that has a true attribute `takes_blocks` gets the whole block at once.
        """
        if streamer is None:
            return
        if len(self.sequences) == 1:
            block = torch.tensor(events[0].tokens)
            for part in [block] if getattr(streamer, "takes_blocks", False) else block.split(1):
                streamer.put(part)
            return
        # The entries move together, but one that ended inside the block has fewer tokens than the others.
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
