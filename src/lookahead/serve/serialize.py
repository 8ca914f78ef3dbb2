"""A request spec as plain data, from which a rank or a replica builds the same request.

A mask is compiled in the process that runs the sequence. Until then its grammar is passed as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.request import TokenMask
from lookahead.engine.text import StopStrings
from lookahead.serve.grammar import GrammarMask, Grammars
from lookahead.serve.keys import Owner
from lookahead.serve.requests import RequestSpec


@dataclass(frozen=True)
class GrammarText:
    """A grammar to be compiled in the process that runs the sequence; used instead of a mask until then."""

    grammar: str
    least: int

    def mask(self, grammars: Grammars) -> TokenMask:
        return grammars.mask(self.grammar, self.least)


class GrammarTexts(Grammars):
    """Validates grammars, and returns their text instead of a mask."""

    def mask(self, grammar: str, least: int = 0) -> GrammarMask:
        self.newest(grammar)
        return cast(GrammarMask, GrammarText(grammar, least))

    def compiled(self, text: GrammarText) -> GrammarMask:
        return super().mask(text.grammar, text.least)


def check_for_ranks(spec: RequestSpec) -> None:
    """Raise ValueError if a group of ranks cannot run this request."""
    if spec.sampling.logprobs is not None:
        raise ValueError("logprobs: the ranks of this server exchange tokens, not log-probabilities; leave it out")
    if spec.mask is not None and not isinstance(spec.mask, GrammarText):
        raise ValueError("only masks of grammars can be sent to other ranks")


def spec_to_dict(spec: RequestSpec, owner: int) -> dict[str, Any]:
    """The spec as JSON-compatible data. `owner` is the index of its key."""
    check_for_ranks(spec)
    return {
        "owner": owner,
        "prompt": spec.prompt,
        "config": asdict(spec.config),
        "sampling": asdict(spec.sampling),
        "rules": {**asdict(spec.rules), "eos_ids": sorted(spec.rules.eos_ids)},
        "stops": spec.stops.stops,
        "grammar": asdict(spec.mask) if isinstance(spec.mask, GrammarText) else None,
        "prediction": list(spec.prediction),
        "unsearched": spec.unsearched,
        "output": list(spec.output),
    }


def spec_from_dict(data: dict[str, Any], owners: Sequence[Owner], grammars: Grammars) -> RequestSpec:
    """The spec, with an owner and a mask of this process."""
    rules, grammar = data["rules"], data["grammar"]
    return RequestSpec(
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
