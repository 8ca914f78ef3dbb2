"""An ask as plain data, from which another process makes the same request: on ranks, and on replicas.

A mask is compiled where its sequence runs, so the text of its grammar stands in its place until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.request import TokenMask
from lookahead.engine.text import StopStrings
from lookahead.serve.grammar import GrammarMask, Grammars
from lookahead.serve.jobs import Ask
from lookahead.serve.keys import Owner


@dataclass(frozen=True)
class GrammarText:
    """A grammar that is compiled where the sequence runs. It stands in place of a mask until then."""

    grammar: str
    least: int

    def mask(self, grammars: Grammars) -> TokenMask:
        return grammars.mask(self.grammar, self.least)


class GrammarTexts(Grammars):
    """Checks grammars, and gives their text in place of a mask."""

    def mask(self, grammar: str, least: int = 0) -> GrammarMask:
        self.newest(grammar)
        return cast(GrammarMask, GrammarText(grammar, least))

    def compiled(self, text: GrammarText) -> GrammarMask:
        return super().mask(text.grammar, text.least)


def check_for_ranks(ask: Ask) -> None:
    """Raise ValueError if several ranks cannot generate this sequence together."""
    if ask.sampling.logprobs is not None:
        raise ValueError("logprobs: the ranks of this server exchange tokens, not log-probabilities; leave it out")
    if ask.mask is not None and not isinstance(ask.mask, GrammarText):
        raise ValueError("only masks of grammars can be handed to other ranks")


def as_plain(ask: Ask, owner: int) -> dict[str, Any]:
    """The ask as JSON knows it. `owner` is the place of its key in the list of keys."""
    check_for_ranks(ask)
    return {
        "owner": owner,
        "prompt": ask.prompt,
        "config": asdict(ask.config),
        "sampling": asdict(ask.sampling),
        "rules": {**asdict(ask.rules), "eos_ids": sorted(ask.rules.eos_ids)},
        "stops": ask.stops.stops,
        "grammar": asdict(ask.mask) if isinstance(ask.mask, GrammarText) else None,
        "prediction": list(ask.prediction),
        "unsearched": ask.unsearched,
        "output": list(ask.output),
    }


def from_plain(data: dict[str, Any], owners: Sequence[Owner], grammars: Grammars) -> Ask:
    """The ask, with an owner and a mask of this process."""
    rules, grammar = data["rules"], data["grammar"]
    return Ask(
        data["prompt"],
        LookaheadConfig.from_json(data["config"]),
        SamplingParams(**data["sampling"]),
        StopRules(**{**rules, "eos_ids": frozenset(rules["eos_ids"])}),
        owners[data["owner"]],
        StopStrings(data["stops"]),
        None if grammar is None else GrammarText(**grammar).mask(grammars),
        data["prediction"],
        data["unsearched"],
        output=data["output"],
    )
