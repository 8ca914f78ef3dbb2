"""The backends of a call: the graph backend that is kept with the model, or an eager one that a probe has passed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast
from weakref import proxy

import torch

from lookahead.backends.base import Backend
from lookahead.backends.choose import graph_backend, graph_or_eager
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.eager.chains import ChainBackend
from lookahead.backends.failures import CompilerError
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.planner import LAZY_CAPTURE
from lookahead.backends.probe import probe
from lookahead.backends.support import cached_shapes
from lookahead.cache import cache_dir
from lookahead.config import LookaheadConfig
from lookahead.loading.bigrams import bigrams
from lookahead.loading.quantised.held import packed_view
from lookahead.models.facts import UnsupportedModelError, first_line, kind_of
from lookahead.models.read import read
from lookahead.transformers_hook import facts
from lookahead.transformers_hook.chains import chain_backend
from lookahead.transformers_hook.facts import ModelFacts
from lookahead.transformers_hook.probe import lengths_of, probe_lengths, probe_start
from lookahead.transformers_hook.prompt import Start

logger = logging.getLogger("lookahead")

BIGRAMS_CALL, BIGRAMS_SECONDS = 3, 4.0
"""The model's bigrams are computed after this many calls, if that takes at most this many seconds."""


@dataclass(frozen=True)
class Backends:
    """Makes the backends for a model's calls, or takes those of earlier calls from its facts.

    `name` is the one that the user asked for: 'auto', 'graph' or 'eager'.
    """

    model: Any
    modules: Sequence[torch.nn.Module]
    facts: ModelFacts
    name: str

    def graph_or_none(self, batch_size: int, tokens: int) -> GraphBackend | None:
        """The graph backend for sequences that grow to `tokens` each, or None: the call needs an eager backend."""
        return graph_or_eager(
            self.model, self.name, lambda: self._graph(batch_size, tokens), lambda: None, self.facts.log_once
        )

    def _graph(self, batch_size: int, tokens: int) -> GraphBackend:
        """The graph backend of earlier calls, unless a weight has been replaced since."""
        if self.model.training:
            raise UnsupportedModelError("the graph backend does not run a model in training mode; call model.eval()")
        if self.facts.graph is None:
            read(packed_view(self.model), "graph")  # refuse it before taking the lock
        # Tensors that become the model's parameters must support training.
        with self.facts.turn, torch.inference_mode(False):
            kept, addresses = self.facts.graph, facts.weight_addresses(self.modules)
            if kept is None or addresses != self.facts.addresses or self.facts.computed_weights:
                if kept is None or not kept.reads_weights_of(packed_view(self.model)):
                    # A script may call once or twice, with a prompt of another length each time. A cache that it gave
                    # gets all K/V.
                    kept = self._new_graph()
                    self.facts.computed_weights = kept.has_computed_weights
                    kept.model = proxy(self.model)  # so that the facts do not keep the model alive
                    self.facts.graph = kept
                self.facts.addresses = facts.weight_addresses(self.modules)
            # With backend="graph" try anyway: an answer may end before the pages run out. Slots are needed at once.
            tries = self.name == "graph" and batch_size <= kept.slots.most_slots
            with suppress(UnsupportedModelError) if tries else nullcontext():
                kept.check_room(batch_size, tokens)
        return kept

    def _new_graph(self) -> GraphBackend:
        """A graph backend for this call and the next ones. Kernels that did not compile once are not tried again."""
        if self.facts.broken is not None:
            raise UnsupportedModelError(self.facts.broken)
        try:
            made = graph_backend(
                packed_view(self.model), capture_after=LAZY_CAPTURE, drop_pages=False, adopts_prompts=True
            )
            return cast(GraphBackend, made)
        except CompilerError as error:
            self.facts.broken = str(error)
            raise

    def eager_or_chains(
        self, start: Start, past: int, config: LookaheadConfig | None
    ) -> tuple[EagerBackend | None, ChainBackend | None]:
        """An eager backend for this call, or a chain backend if the model cannot run trees. If a probe refuses both,
        the error is that of the trees.

        The first `past` positions were in the given cache before the prompt ran.
        """
        reason = self.facts.chains
        if self.facts.runs_trees(self.model) and start.form not in self.facts.chain_forms:
            try:
                return self._eager(start, past, config), None
            except UnsupportedModelError as error:
                if self.facts.patch is not None:
                    raise
                try:
                    backend = chain_backend(self.model, self.facts, start)
                except UnsupportedModelError:
                    raise error from None
                reason = first_line(error)
                self.facts.chain_forms.add(start.form)
                if start.plain:
                    self.facts.chains = reason
        else:
            backend = chain_backend(self.model, self.facts, start)
        self.facts.log_once(f"note: {reason or 'trees cannot run'}; its steps are chains, in its own cache")
        return None, backend

    def _eager(self, start: Start, past: int, config: LookaheadConfig | None) -> EagerBackend:
        """The model is probed unless an earlier call had the same form."""
        shapes = cached_shapes(start.cache, kind_of(self.model), start.batch.past)
        backend = EagerBackend(self.model, probed=False, shapes=shapes, arguments=start.arguments)
        usual = start.plain and start.has_positions
        form = () if usual else start.form
        widest = (config or LookaheadConfig()).budget
        lengths = set() if self.facts.patch is None else lengths_of(widest, start.batch.past - past)
        with facts.probing:
            if form not in self.facts.probed:
                if usual:
                    probe(EagerBackend(self.model, probed=False, shapes=shapes), lengths)
                else:
                    probe_start(backend, start)
                self.facts.probed[form] = lengths if usual else set()
            if further := lengths - self.facts.probed[form]:
                probe_lengths(backend, start, further)
                self.facts.probed[form] |= further
        return backend

    def learn_bigrams(self, backend: Backend, prompt: Sequence[int], nodes: int) -> None:
        """Give the memory the model's bigrams: in the first call those on disk, later they are computed. A script that
        calls once or twice would not gain what that takes. The prefix is the end of a prompt: the hook knows no
        tokenizer, and prompts often end in a line break."""
        call, self.facts.graph_calls = self.facts.graph_calls, self.facts.graph_calls + 1
        if self.facts.memory.bigrams is not None or call not in (0, BIGRAMS_CALL):
            return
        begin = self.model.generation_config.bos_token_id
        prefix = [*([begin] if begin is not None and prompt[0] == begin else []), prompt[-1]]
        limit = BIGRAMS_SECONDS if call else 0.0
        with suppress(MemoryError, torch.OutOfMemoryError):
            top = bigrams(backend, prefix, nodes, cache_dir(), logger.info, limit)
            self.facts.memory.set_bigrams(top)
