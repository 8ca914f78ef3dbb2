"""How draft tokens are made. The paper's symbols: W is `window`, N is `ngram`, G is `guesses`, K is `budget`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any

from lookahead.config.checks import at_least

SOURCES = ("jacobi", "prompt", "suffix", "recycle")
"""The sources of guesses that a config has by default (`algorithm.sources.table` makes them)."""
OTHER_SOURCES = ("fixed-point",)
"""Sources that a config has only if it names them."""
SCOPES = ("off", "request", "model")
METHODS = ("lookahead", "autoregressive", "jacobi", "prompt-lookup")
BACKENDS = ("auto", "cpu", "eager", "graph")


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Any = _Unchanged()
"""The default of a parameter that leaves a field as it is. It cannot be None, which is a value of some fields."""


@dataclass(frozen=True)
class LookaheadConfig:
    """How a step is filled with tokens. No setting can change the output, only the number of steps; but see `exact`.

    `window`, `ngram` and `guesses` are the paper's W, N and G; `budget` is the maximum number of tokens of one sequence
    in a step. `sources` are the names of the sources of draft tokens; the extra source `fixed-point` (Jacobi decoding,
    Algorithm 1) cannot be combined with others. `max_depth` limits the depth of draft tokens in the tree.
    `step_cost[k]` is the time of a step of k + 1 tokens: with it, a step takes the draft tokens that are expected to
    pay for their time, and sequences that run at once share it (see `algorithm.budget`); without it, every sequence
    fills its whole budget. With `chain` a step is one chain of tokens, for models whose trees cannot branch, and there
    is no window. `shared` is deprecated: it gives a config without a step cost a flat one. A config that is
    `exact` is fitted to the trees that a backend runs exactly (see `within`); with `exact=False` a half-precision text
    may differ from the autoregressive one by rounding.
    """

    window: int = 5
    ngram: int = 5
    guesses: int = 8
    budget: int = 128
    sources: tuple[str, ...] = SOURCES
    recycle_scope: str = "model"
    suffix_key: int = 64
    suffix_branches: int = 4
    suffix_length: int = 64
    suffix_oldest: bool = False
    step_cost: tuple[float, ...] | None = field(default=None, repr=False)
    shared: InitVar[bool | None] = None
    max_depth: int | None = None
    exact: bool = True
    chain: bool = False

    def __post_init__(self, shared: bool | None) -> None:
        at_least("window", self.window, 0)
        at_least("ngram", self.ngram, 2)
        at_least("guesses", self.guesses, 0)
        at_least("budget", self.budget, 1)
        at_least("suffix_key", self.suffix_key, 1)
        at_least("suffix_branches", self.suffix_branches, 1)
        at_least("suffix_length", self.suffix_length, 1)
        if isinstance(self.sources, str):
            raise ValueError(f"sources={self.sources!r} must be a list of names, such as [{self.sources!r}]")
        object.__setattr__(self, "sources", tuple(self.sources))
        unknown = [s for s in self.sources if s not in (*SOURCES, *OTHER_SOURCES)]
        if unknown:
            raise ValueError(f"unknown source {unknown[0]!r}; choose from {', '.join(SOURCES)}")
        if "fixed-point" in self.sources and len(self.sources) > 1:
            raise ValueError(
                f"source 'fixed-point' cannot be combined with others, as in sources={list(self.sources)}; use it alone"
            )
        if len(set(self.sources)) != len(self.sources):
            raise ValueError(f"sources name {_repeated(self.sources)!r} twice; name each once")
        if self.recycle_scope not in SCOPES:
            raise ValueError(f"recycle_scope={self.recycle_scope!r}; choose from {', '.join(SCOPES)}")
        if self.max_depth is not None:
            at_least("max_depth", self.max_depth, 1)
        for name, value in (("shared", shared), ("exact", self.exact), ("chain", self.chain)):
            if not isinstance(value, bool) and (name, value) != ("shared", None):
                raise ValueError(f"{name}={value!r} must be True or False")
        if self.window_tokens > self.budget:
            raise ValueError(
                f"window={self.window} with ngram={self.ngram} fills {self.window_tokens} tokens of a step, more "
                f"than budget={self.budget}; lower the window or raise the budget"
            )
        if self.chain and self.window:
            raise ValueError(f"chain=True leaves no room for a window, and window={self.window}; use window=0")
        if shared is not None:
            warnings.warn(
                "LookaheadConfig(shared=...) is deprecated: sequences share a step wherever a config has a step_cost",
                DeprecationWarning,
                stacklevel=3,
            )
            if shared and self.step_cost is None:
                object.__setattr__(self, "step_cost", (1.0,) * self.budget)
        if self.step_cost is not None:
            object.__setattr__(self, "step_cost", tuple(self.step_cost))
            bad = [t for t in self.step_cost if not 0 < t < math.inf]
            if bad or not self.step_cost:
                raise ValueError(f"step_cost needs positive times, one per step size, not {bad[0] if bad else 'none'}")

    @property
    def active_sources(self) -> tuple[str, ...]:
        """The sources in use. The recycle scope 'off' removes `recycle`."""
        return tuple(s for s in self.sources if s != "recycle" or self.recycle_scope != "off")

    @property
    def window_tokens(self) -> int:
        """Tokens of the root and the lookahead branch: W(N-1), as the root is column 0 of the oldest window row."""
        return max(1, self.window * (self.ngram - 1)) if "jacobi" in self.sources else 1

    @property
    def deepest(self) -> int:
        """The maximum depth of a draft token. The default, 64, is also the depth to which half-precision steps on a GPU
        are exact."""
        deepest = self.budget - 1
        if "fixed-point" not in self.sources:
            deepest = min(deepest, max(self.suffix_length, self.ngram - 1))
        return deepest if self.max_depth is None else min(deepest, self.max_depth)

    def is_within(self, nodes: int | None, depth: int | None) -> bool:
        """Whether trees have at most `nodes` nodes, and draft tokens at most this depth; None for no limit."""
        return (nodes is None or self.budget <= nodes) and (depth is None or self.deepest <= depth)

    def within(self, nodes: int | None, depth: int | None) -> LookaheadConfig:
        """This config for trees of at most `nodes` nodes, with draft tokens at most `depth` deep; None for no limit.

        Window nodes may be deeper, since they only make n-grams. ValueError if the window alone has more nodes.
        """
        if nodes is not None and self.window_tokens > nodes:
            raise ValueError(
                f"window={self.window} with ngram={self.ngram} fills {self.window_tokens} tokens of a step, and steps "
                f"are exact up to {nodes} here; use window={nodes // (self.ngram - 1)}, or exact=False to allow "
                "rounding to change the text"
            )
        config = self
        if depth is not None and "fixed-point" in self.sources:  # its one chain fills the whole budget
            nodes = depth + 1 if nodes is None else min(nodes, depth + 1)
        if nodes is not None and config.budget > nodes:
            config = replace(config, budget=nodes)
        if depth is not None and config.deepest > depth:
            config = replace(config, max_depth=depth)
        return config

    @property
    def is_chain(self) -> bool:
        """Whether no tree branches: every step is one chain of tokens."""
        return self.chain or self.budget == 1 or not self.active_sources

    def as_chain(self) -> LookaheadConfig:
        """This config for a backend whose trees cannot branch: its best draft tokens, each below the last one. Instead
        of the source `jacobi`, which needs the window, one without others has `suffix`."""
        if self.is_chain:
            return self
        others = tuple(source for source in self.sources if source != "jacobi")
        return replace(self, window=0, sources=others or ("suffix",), chain=True)

    @classmethod
    def paper(
        cls, window: int, ngram: int, guesses: int, *, prompt: bool = False, exact: bool = True
    ) -> LookaheadConfig:
        """The paper's method alone: the window and its n-gram pool, with `prompt` also the prompt's n-grams."""
        sources = ("jacobi", "prompt") if prompt else ("jacobi",)
        for name, value, least in (("window", window, 0), ("ngram", ngram, 2), ("guesses", guesses, 0)):
            at_least(name, value, least)
        budget = (window + guesses) * (ngram - 1) + 1
        return cls(window, ngram, guesses, budget, sources, exact=exact)

    @classmethod
    def autoregressive(cls) -> LookaheadConfig:
        """No window and no draft tokens: one token per step."""
        return cls(window=0, guesses=0, budget=1, sources=())

    @classmethod
    def jacobi(cls, block: int = 16) -> LookaheadConfig:
        """Jacobi decoding (Algorithm 1) on a block of this many future tokens."""
        return cls(window=0, guesses=0, budget=at_least("block", block, 1) + 1, sources=("fixed-point",), chain=True)

    @classmethod
    def prompt_lookup(cls, tokens: int = 10, key: int = 2) -> LookaheadConfig:
        """Prompt lookup as in transformers: the continuation of the oldest match of at most `key` tokens."""
        return cls(
            window=0,
            guesses=0,
            budget=at_least("tokens", tokens, 1) + 1,
            sources=("suffix",),
            suffix_key=key,
            suffix_branches=1,
            suffix_length=tokens,
            suffix_oldest=True,
            chain=True,
        )

    @classmethod
    def for_method(
        cls, method: str, *, window: int | None = None, ngram: int | None = None, guesses: int | None = None,
        budget: int | None = None, sources: Sequence[str] | None = None, recycle_scope: str | None = None,
        suffix_key: int | None = None, suffix_branches: int | None = None, suffix_length: int | None = None,
        suffix_oldest: bool | None = None, step_cost: Sequence[float] | None = None, shared: bool | None = None,
        max_depth: int | None = None, exact: bool | None = None, chain: bool | None = None,
    ) -> LookaheadConfig:  # fmt: skip
        """The config of a method by its name. The fields, which only 'lookahead' has, are ignored where they are
        None."""
        given = {name: value for name, value in given_fields(locals()).items() if value is not None}
        if method == "lookahead":
            return cls().adapted(**given)
        makers = {
            "autoregressive": cls.autoregressive,
            "jacobi": cls.jacobi,
            "prompt-lookup": cls.prompt_lookup,
        }
        if method not in makers:
            raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
        if given:
            name = next(iter(given))
            raise ValueError(f"{name}={given[name]!r} belongs to method 'lookahead', not {method!r}; leave it out")
        return makers[method]()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LookaheadConfig:
        """A config from its fields as they were read from JSON, where a tuple is a list.

        Configs of earlier releases have a field `shared`.
        """
        times, shared = fields["step_cost"], fields.get("shared", False)
        if times is None and shared:
            times = (1.0,) * fields["budget"]
        known = {name: value for name, value in fields.items() if name != "shared"}
        return cls(**{**known, "step_cost": None if times is None else tuple(map(float, times))})

    def adapted(
        self, *, window: int = UNCHANGED, ngram: int = UNCHANGED, guesses: int = UNCHANGED, budget: int = UNCHANGED,
        sources: Sequence[str] = UNCHANGED, recycle_scope: str = UNCHANGED, suffix_key: int = UNCHANGED,
        suffix_branches: int = UNCHANGED, suffix_length: int = UNCHANGED, suffix_oldest: bool = UNCHANGED,
        step_cost: Sequence[float] | None = UNCHANGED, shared: bool = UNCHANGED, max_depth: int | None = UNCHANGED,
        exact: bool = UNCHANGED, chain: bool = UNCHANGED,
    ) -> LookaheadConfig:  # fmt: skip
        """A copy with these fields changed, and with the other fields fitted to them.

        - A budget without a window drops the window where it would fill more than half of that budget.
        - A window without a budget raises the budget so that both branches fit.
        - A window or a budget removes the step cost, so that every sequence of a batch gets it whole.
        - A chain drops the window.
        - The source `jacobi` sets the default window if the config has no window.
        - A config without sources has nothing to adapt, so the changes are made to the default config.
        """
        changes = given_fields(locals())
        if changes and not self.sources:
            return type(self)().adapted(**changes)
        for name, least in (("window", 0), ("ngram", 2), ("budget", 1)):
            at_least(name, changes.get(name, least), least)
        chain = changes.get("chain", self.chain)
        if chain is True:
            changes.setdefault("window", 0)
        if "budget" in changes and "window" not in changes:
            ngram = changes.get("ngram", self.ngram)
            if self.window * (ngram - 1) > changes["budget"] // 2:
                changes["window"] = 0
        elif "jacobi" in changes.get("sources", ()) and not self.window and not chain:
            changes.setdefault("window", type(self).window)
        if "window" in changes and "budget" not in changes:
            branches = changes["window"] + changes.get("guesses", self.guesses)
            changes["budget"] = max(self.budget, branches * (changes.get("ngram", self.ngram) - 1) + 1)
        if {"window", "budget"} & set(changes):
            changes.setdefault("step_cost", None)
        return replace(self, **changes)


def given_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `LookaheadConfig` among a function's parameters by name (its `locals()`), but unchanged ones."""
    names = [*(known.name for known in fields(LookaheadConfig)), "shared"]  # which is no field any more
    named = {name: parameters[name] for name in names}
    return {name: value for name, value in named.items() if value is not UNCHANGED}


def _repeated(names: Sequence[str]) -> str:
    return next(n for i, n in enumerate(names) if n in names[:i])
