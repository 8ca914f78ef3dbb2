"""The settings of a request. Each is checked once, and an error says what to change.

The paper's symbols: W is `window`, N is `ngram`, G is `guesses`, K is `budget`.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

SOURCES = ("jacobi", "prompt", "suffix", "recycle")
"""The sources of guesses that a config has by default (`algorithm.sources.table` makes them)."""
OTHER_SOURCES = ("fixed-point",)
"""Sources that a config has only if it names them."""
SCOPES = ("off", "request", "model")
METHODS = ("lookahead", "autoregressive", "jacobi", "prompt-lookup")
BACKENDS = ("auto", "cpu", "eager", "graph")
MOST_LOGPROBS = 20
"""The most likely tokens whose log-probabilities a request may have."""


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Any = _Unchanged()
"""The default of a parameter that leaves a field as it is. It cannot be None, which is a value of some fields."""


def new_seed() -> int:
    """A random seed."""
    return random.SystemRandom().getrandbits(31)


@dataclass(frozen=True)
class LookaheadConfig:
    """How a step is filled with tokens. No setting can change the output, only the number of steps; but see `exact`.

    `window`, `ngram` and `guesses` are the paper's W, N and G; `budget` is the maximum number of tokens of one sequence
    in a step. `sources` are the names of the sources of draft tokens; the extra source `fixed-point` (Jacobi decoding,
    Algorithm 1) cannot be combined with others. `max_depth` limits the depth of draft tokens in the tree.
    `step_cost[k]` is the time of a step of k + 1 tokens: with it, a step takes the draft tokens that are expected to
    pay for their time, and sequences that run at once share it (see `algorithm.budget`); without it, every sequence
    fills its whole budget. `shared` is deprecated: it gives a config without a step cost a flat one. A config that is
    `exact` is fitted to the trees that a backend runs exactly (see `within`); with `exact=False` a half-precision text
    may differ from the autoregressive one by rounding.
    """

    window: int = 5
    ngram: int = 5
    guesses: int = 8
    budget: int = 128
    sources: tuple[str, ...] = SOURCES
    recycle_scope: str = "model"
    suffix_key: int = 12
    suffix_branches: int = 4
    suffix_length: int = 16
    suffix_oldest: bool = False
    step_cost: tuple[float, ...] | None = field(default=None, repr=False)
    shared: InitVar[bool | None] = None
    max_depth: int | None = None
    exact: bool = True

    def __post_init__(self, shared: bool | None) -> None:
        _at_least("window", self.window, 0)
        _at_least("ngram", self.ngram, 2)
        _at_least("guesses", self.guesses, 0)
        _at_least("budget", self.budget, 1)
        _at_least("suffix_key", self.suffix_key, 1)
        _at_least("suffix_branches", self.suffix_branches, 1)
        _at_least("suffix_length", self.suffix_length, 1)
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
            _at_least("max_depth", self.max_depth, 1)
        for name, value in (("shared", shared), ("exact", self.exact)):
            if not isinstance(value, bool) and (name, value) != ("shared", None):
                raise ValueError(f"{name}={value!r} must be True or False")
        if self.window_tokens > self.budget:
            raise ValueError(
                f"window={self.window} with ngram={self.ngram} fills {self.window_tokens} tokens of a step, more "
                f"than budget={self.budget}; lower the window or raise the budget"
            )
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
        """The maximum depth of a draft token. The default, 16, is also the depth to which half-precision steps on a GPU
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
        if self.active_sources == ("suffix",):
            return self.suffix_branches == 1
        return self.budget == 1 or self.active_sources in ((), ("fixed-point",))

    def as_chain(self) -> LookaheadConfig:
        """This config for a backend whose trees cannot branch: the continuation of the best suffix match alone."""
        return self if self.is_chain else replace(self, window=0, guesses=0, sources=("suffix",), suffix_branches=1)

    @classmethod
    def paper(
        cls, window: int, ngram: int, guesses: int, *, prompt: bool = False, exact: bool = True
    ) -> LookaheadConfig:
        """The paper's method alone: the window and its n-gram pool, with `prompt` also the prompt's n-grams."""
        sources = ("jacobi", "prompt") if prompt else ("jacobi",)
        for name, value, least in (("window", window, 0), ("ngram", ngram, 2), ("guesses", guesses, 0)):
            _at_least(name, value, least)
        budget = (window + guesses) * (ngram - 1) + 1
        return cls(window, ngram, guesses, budget, sources, exact=exact)

    @classmethod
    def autoregressive(cls) -> LookaheadConfig:
        """No window and no draft tokens: one token per step."""
        return cls(window=0, guesses=0, budget=1, sources=())

    @classmethod
    def jacobi(cls, block: int = 16) -> LookaheadConfig:
        """Jacobi decoding (Algorithm 1) on a block of this many future tokens."""
        return cls(window=0, guesses=0, budget=_at_least("block", block, 1) + 1, sources=("fixed-point",))

    @classmethod
    def prompt_lookup(cls, tokens: int = 10, key: int = 2) -> LookaheadConfig:
        """Prompt lookup as in transformers: the continuation of the oldest match of at most `key` tokens."""
        return cls(
            window=0,
            guesses=0,
            budget=_at_least("tokens", tokens, 1) + 1,
            sources=("suffix",),
            suffix_key=key,
            suffix_branches=1,
            suffix_length=tokens,
            suffix_oldest=True,
        )

    @classmethod
    def for_method(
        cls, method: str, *, window: int | None = None, ngram: int | None = None, guesses: int | None = None,
        budget: int | None = None, sources: Sequence[str] | None = None, recycle_scope: str | None = None,
        suffix_key: int | None = None, suffix_branches: int | None = None, suffix_length: int | None = None,
        suffix_oldest: bool | None = None, step_cost: Sequence[float] | None = None, shared: bool | None = None,
        max_depth: int | None = None, exact: bool | None = None,
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
        exact: bool = UNCHANGED,
    ) -> LookaheadConfig:  # fmt: skip
        """A copy with these fields changed, and with the other fields fitted to them.

        - A budget without a window drops the window where it would fill more than half of that budget.
        - A window without a budget raises the budget so that both branches fit.
        - A window or a budget removes the step cost, so that every sequence of a batch gets it whole.
        - The source `jacobi` sets the default window if the config has no window.
        - A config without sources has nothing to adapt, so the changes are made to the default config.
        """
        changes = given_fields(locals())
        if changes and not self.sources:
            return type(self)().adapted(**changes)
        for name, least in (("window", 0), ("ngram", 2), ("budget", 1)):
            _at_least(name, changes.get(name, least), least)
        if "budget" in changes and "window" not in changes:
            ngram = changes.get("ngram", self.ngram)
            if self.window * (ngram - 1) > changes["budget"] // 2:
                changes["window"] = 0
        elif "jacobi" in changes.get("sources", ()) and not self.window:
            changes.setdefault("window", type(self).window)
        if "window" in changes and "budget" not in changes:
            branches = changes["window"] + changes.get("guesses", self.guesses)
            changes["budget"] = max(self.budget, branches * (changes.get("ngram", self.ngram) - 1) + 1)
        if {"window", "budget"} & set(changes):
            changes.setdefault("step_cost", None)
        return replace(self, **changes)


@dataclass(frozen=True)
class SamplingParams:
    """How a node's logits become its target. `temperature` 0 is greedy.

    `repetition_penalty` is for tokens of prompt and output: a score above 0 is divided by it, one below multiplied.
    `presence_penalty` is taken from the score of every token of the output, `frequency_penalty` once for each time that
    it occurs there. `logit_bias` is added to the scores of some tokens; -inf bans one. It may be given as a mapping,
    and is stored as sorted pairs. `sampling.adjusted` defines all four. `logprobs` requests log-probabilities: of the
    chosen token (0), and of the n likeliest ones (n).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be a number")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be a number from 0 (greedy) up, such as 0.8")
        _at_least("top_k", self.top_k, 0)
        _at_least("seed", self.seed, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (1 keeps every token)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be between 0 (keeps every token) and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 (1 changes nothing)")
        for name in penalties[1:]:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number (0 changes nothing)")
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.logprobs is not None and _at_least("logprobs", self.logprobs, 0) > MOST_LOGPROBS:
            raise ValueError(f"logprobs={self.logprobs} must be at most {MOST_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is stored: pairs of a token id and a number, by token id."""
        return tuple(self.logit_bias)  # type: ignore[arg-type]

    @property
    def penalised(self) -> bool:
        """Whether a target depends on which tokens the text has."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class StopRules:
    """When a sequence ends. The rules are tested after every accepted token, not once per step.

    `max_length` is the model's context: the most tokens of prompt and output together. With `last_is_free`
    there may be one more, because the last token is never run through the model and needs no position. The first
    `min_tokens` tokens of the output cannot be one of `eos_ids`.
    """

    max_tokens: int = 256
    eos_ids: frozenset[int] = frozenset()
    max_length: int | None = None
    last_is_free: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _at_least("max_tokens", self.max_tokens, 1)
        if _at_least("min_tokens", self.min_tokens, 0) > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")

    def room(self, prompt_tokens: int) -> int:
        """How many tokens may be generated after a prompt of this length."""
        if self.max_length is None:
            return self.max_tokens
        return min(self.max_tokens, self.max_length + self.last_is_free - prompt_tokens)


def given_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `LookaheadConfig` among a function's parameters by name (its `locals()`), but unchanged ones."""
    names = [*(known.name for known in fields(LookaheadConfig)), "shared"]  # which is no field any more
    named = {name: parameters[name] for name in names}
    return {name: value for name, value in named.items() if value is not UNCHANGED}


def reject_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword argument, and suggest the known one with the most similar name."""
    for name in unknown:
        near = get_close_matches(name, list(known), n=1, cutoff=0.5)
        raise TypeError(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _at_least(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return value


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """A mapping from token ids to numbers, or pairs of these -> sorted pairs, without those that add 0."""
    try:
        pairs = sorted(dict(given or ()).items())
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias={given!r:.60} must map token ids to numbers, such as {{42: -1.5}}") from None
    for token, value in pairs:
        _at_least("a token id of logit_bias", token, 0)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value < math.inf:
            raise ValueError(f"logit_bias={{{token}: {value!r}}} must be a number; -inf bans the token")
    return tuple((token, float(value)) for token, value in pairs if value)


def _repeated(names: Sequence[str]) -> str:
    return next(n for i, n in enumerate(names) if n in names[:i])
