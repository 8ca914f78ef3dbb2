"""A server whose engine is a group of ranks: rank 0 serves, and the others make the same steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.engine.request import Request
from lookahead.engine.text import SharedTokenizer
from lookahead.generate import LookaheadModel
from lookahead.parallel.lead import Recipe
from lookahead.parallel.model import ParallelModel
from lookahead.serve.grammar import Grammars
from lookahead.serve.jobs import Ask, Job
from lookahead.serve.keys import KeyRing
from lookahead.serve.recipes import GrammarText, GrammarTexts, as_plain, from_plain
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings


class LeadingService(Service):
    """The service of rank 0. Its requests carry recipes for the other ranks.

    It keeps no memory over restarts: all ranks must begin with the same one, which is empty.
    """

    def __init__(self, model: LookaheadModel, settings: ServeSettings) -> None:
        super().__init__(model, replace(settings, memory_folder=None))
        self.grammars: GrammarTexts = GrammarTexts(model)

    def make_job(self, ask: Ask, index: int) -> Job:
        recipe = Recipe(as_plain(ask, self.keys.owners.index(ask.owner)))
        if isinstance(ask.mask, GrammarText):
            ask = replace(ask, mask=self.grammars.compiled(ask.mask))
        job = super().make_job(ask, index)
        job.request.recipe = recipe
        return job


def follow(model: ParallelModel, settings: ServeSettings) -> None:
    """What the other ranks do for as long as rank 0 serves with the same settings."""
    owners = KeyRing(settings.keys, model.memory, settings.share_memory, settings.public).owners
    grammars, tokenizer = Grammars(model), SharedTokenizer(model.tokenizer)
    model.engine.limit(settings.max_concurrency)
    model.prepare(settings.max_concurrency)

    def make(data: Any) -> Request:
        return Job(model, tokenizer, from_plain(data, owners, grammars), 0).request

    model.follow(make)
