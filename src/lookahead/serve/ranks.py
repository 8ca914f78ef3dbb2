"""A server whose engine is a group of ranks: rank 0 serves HTTP, and the others run the same steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.engine.request import Request
from lookahead.engine.text import SharedTokenizer
from lookahead.generate import LookaheadModel
from lookahead.parallel.leader import Recipe
from lookahead.parallel.model import ParallelModel
from lookahead.serve.grammar import Grammars
from lookahead.serve.keys import KeyRing
from lookahead.serve.requests import RequestSpec, RequestState
from lookahead.serve.serialize import GrammarText, GrammarTexts, spec_from_dict, spec_to_dict
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings


class LeadingService(Service):
    """The service of rank 0, which broadcasts its requests to the other ranks.

    It does not save drafting state across restarts: all ranks must start with the same, which is empty.
    """

    def __init__(self, model: LookaheadModel, settings: ServeSettings) -> None:
        super().__init__(model, replace(settings, memory_folder=None))
        self.grammars: GrammarTexts = GrammarTexts(model)

    def make_state(self, spec: RequestSpec, index: int) -> RequestState:
        recipe = Recipe(spec_to_dict(spec, self.keys.owners.index(spec.owner)))
        if isinstance(spec.mask, GrammarText):
            spec = replace(spec, mask=self.grammars.compiled(spec.mask))
        state = super().make_state(spec, index)
        state.request.recipe = recipe
        return state


def run_follower(model: ParallelModel, settings: ServeSettings) -> None:
    """Run the requests of rank 0 until it stops serving. `settings` must be the same as there."""
    owners = KeyRing(settings.keys, model.memory, settings.share_memory, settings.public).owners
    grammars, tokenizer = Grammars(model), SharedTokenizer(model.tokenizer)
    model.engine.set_max_sequences(settings.max_concurrency)
    model.prepare(settings.max_concurrency)

    def make(data: Any) -> Request:
        return RequestState(model, tokenizer, spec_from_dict(data, owners, grammars), 0).request

    model.follow(make)
