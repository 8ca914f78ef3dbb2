"""The ways to decode that are compared: ours by name or config, and transformers' own. docs/bench.md lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

from lookahead.config import METHODS as OURS
from lookahead.config import LookaheadConfig

STOCK = {
    "hf-greedy": "transformers' greedy search, dynamic cache",
    "hf-static": "the same with a static cache and torch.compile",
    "hf-prompt-lookup": "transformers' prompt lookup, 10 tokens",
    "hf-assisted": "transformers' assisted generation; needs --draft-model",
}
NAMES = (*OURS, *STOCK)


@dataclass(frozen=True)
class Method:
    """One way to decode. `config` None is the model's own default, for `how='lookahead'`.

    `dtype`, `backend` and `attention` (of transformers) ask for a model loaded that way instead of the run's. Of a
    preset's methods those with another `device` than the run's are left out.
    """

    label: str
    how: str
    config: LookaheadConfig | None = None
    dtype: str | None = None
    backend: str | None = None
    attention: str | None = None
    ranks: int = 1
    device: str | None = None

    @property
    def stock(self) -> bool:
        return self.how in STOCK

    def facts(self) -> dict[str, Any]:
        """What decides the answers and their time; the label does not."""
        found = {name: getattr(self, name) for name in ("how", "dtype", "backend", "attention", "ranks")}
        return {**found, "config": plain(self.config)}


def plain(config: LookaheadConfig | None) -> dict[str, Any] | None:
    """A config as JSON, without what the user did not choose: the measured step cost, and limits that are not set."""
    hidden = {"step_cost"}
    if config is not None:
        hidden |= {
            name
            for name, usual in (("max_depth", None), ("exact", True), ("chain", False))
            if getattr(config, name) is usual
        }
    return None if config is None else {k: v for k, v in asdict(config).items() if k not in hidden}


def near(name: str, known: Sequence[str]) -> str:
    """A question about the known name that is most like this one; nothing where none is."""
    found = get_close_matches(name, known, n=1)
    return f"did you mean {found[0]!r}? " if found else ""


def named(name: str, label: str | None = None, **where: Any) -> Method:
    kind, colon, rest = name.partition(":")
    if not colon:
        if name not in NAMES:
            hint, names = near(name, NAMES), ", ".join(NAMES)
            raise ValueError(f"unknown method {name!r}: {hint}choose from {names}, paper:W,N,G, config:...")
        return Method(label or name, name, **where)
    if kind not in ("paper", "paper+prompt", "config"):
        raise ValueError(f"unknown method {name!r}: write paper, paper+prompt or config before the colon")
    config = _fields(rest, name) if kind == "config" else _paper(rest, name, prompt=kind == "paper+prompt")
    return Method(label or name, "lookahead", config, **where)


def _paper(text: str, name: str, *, prompt: bool) -> LookaheadConfig:
    try:
        window, ngram, guesses = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"method {name!r}: give W,N,G as three whole numbers, such as paper:15,5,15") from error
    return LookaheadConfig.paper(window, ngram, guesses, prompt=prompt)


def _fields(text: str, name: str) -> LookaheadConfig:
    known = {field.name for field in fields(LookaheadConfig)} - {"step_cost", "suffix_oldest"}
    given: dict[str, Any] = {}
    for part in text.split(","):
        field, equals, value = part.partition("=")
        if field not in known or not equals:
            raise ValueError(f"method {name!r}: {part!r} is no FIELD=VALUE of {', '.join(sorted(known))}")
        if field == "exact":
            if value not in ("true", "false"):
                raise ValueError(f"method {name!r}: exact={value!r} must be true or false")
            given[field] = value == "true"
            continue
        try:
            given[field] = tuple(value.split("+")) if field == "sources" else int(value)
        except ValueError as error:
            if field != "recycle_scope":
                raise ValueError(f"method {name!r}: {field}={value!r} must be a whole number") from error
            given[field] = value
    return LookaheadConfig().adapted(**given)
