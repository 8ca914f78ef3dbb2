"""Tuning, from a loaded model to a recommendation: measure t(K), run what looks promising, predict the rest, choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lookahead.algorithm.budget import weighing_curve
from lookahead.algorithm.cost import CostCurve
from lookahead.engine.settings import RequestSettings
from lookahead.loading import profiles
from lookahead.loading.timing import WIDE_SIZES, measure
from lookahead.machine import processor
from lookahead.tune.candidates import AUTOREGRESSIVE, BUDGETS, FITTED, Candidate, all_candidates
from lookahead.tune.predict import Laws, Prediction, learn, predict
from lookahead.tune.trials import Trial, weave

PAPER_ANCHORS = ("paper W=4 N=3 G=4", "paper W=7 N=5 G=7", "paper W=15 N=5 G=15")
ANCHORS = ("prompt lookup", *PAPER_ANCHORS, "default K=16", "default K=128")
"""Run first, where they are not hopeless: the laws are fitted to them."""
HOPELESS = 0.6
"""A candidate that the prior gives less than this is not run: no acceptance that was seen would lift it above 1."""
PROMISING = 0.9
"""After the first runs, candidates within this factor of the best are run, too."""
SECOND_LOOKS = 2
"""The most candidates that are run in that second round."""
PAYS = 1.03
"""A smaller predicted speedup is within the noise: plain decoding is recommended."""
WARM_UP_TOKENS = 8
TOGETHER = 4
"""Answers that take turns. Each has its own K/V, so more of them would need more memory."""
PATIENCE = 12.0
"""Seconds after which no further round of t(K) begins: longer than `load()` takes, as every prediction rests on it."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What tuning found: every candidate, fastest first, and the one to use."""

    model: str
    predictions: tuple[Prediction, ...]
    best: Prediction
    cost: CostCurve
    laws: Laws
    prompts: int
    tokens: int
    facts: Mapping[str, Any]

    @property
    def pays(self) -> bool:
        return self.best.candidate.kind != AUTOREGRESSIVE

    def verdict(self) -> str:
        if self.pays:
            return f"best here: {self.best.candidate.name}, expected speedup {self.best.speedup:.2f}x"
        others = [p for p in self.predictions if p.candidate.kind != AUTOREGRESSIVE]
        nearest = f" ({others[0].candidate.name} comes nearest, at {others[0].speedup:.2f}x)" if others else ""
        return f"lookahead does not pay here: plain decoding is as fast as anything it can do{nearest}"

    def record(self) -> dict[str, Any]:
        """Plain data, for `--json` and for the profile."""
        return {
            "model": self.model,
            "pays": self.pays,
            "verdict": self.verdict(),
            "best": row(self.best),
            "candidates": [row(one) for one in self.predictions],
            "step_cost": {"sizes": list(self.cost.sizes), "seconds": list(self.cost.seconds)},
            "law": {**asdict(self.laws.paper), "measured": [asdict(point) for point in self.laws.points]},
            "prompts": self.prompts,
            "tokens": self.tokens,
            **self.facts,
        }


def row(one: Prediction) -> dict[str, Any]:
    config = one.candidate.config
    return {
        "name": one.candidate.name,
        **{name: getattr(config, name) for name in ("window", "ngram", "guesses", "budget")},
        "sources": list(config.sources),
        "fitted": weighing_curve(config) is not None,
        "basis": one.basis,
        "tokens_per_step": one.step_tokens,
        "compression": one.compression,
        "step_ms": 1e3 * one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "speedup": one.speedup,
    }


class Tuner:
    def __init__(
        self, model: Any, settings: RequestSettings, *, cost: CostCurve | None = None, say: Say | None = None
    ) -> None:
        """`settings` are those of every answer: with a seed, so that all candidates write the same text. A `cost` that
        is given is not measured."""
        self.model, self.settings, self.say = model, settings, say or (lambda _: None)
        backend, context = model.backend, model.backend.max_length
        if cost is None:
            self.say("measuring what a step of each size costs ...")
            sizes = [size for size in WIDE_SIZES if context is None or size <= context // 4] or [1]
            cost = measure(backend, sizes, rounds=8, patience=PATIENCE)
        self.cost, self.table = cost, cost.table(BUDGETS[-1])
        half = backend.dtype in (torch.bfloat16, torch.float16)
        limits = backend.capabilities
        self.candidates = all_candidates(
            cost,
            context,
            half=half,
            nodes=limits.exact_nodes,
            depth=limits.exact_depth,
            bigrams=model.memory.bigrams is not None,
        )
        self.plain = self.candidates[0]
        self.trials: dict[Candidate, Trial] = {}

    def anchors(self) -> list[Candidate]:
        """What is run first: plain decoding, the fitted default, and a few of each kind that are not hopeless."""
        expected = {p.candidate: p.speedup for p in self.predictions()}
        return [
            one
            for one in self.candidates
            if one is self.plain or one.kind == FITTED or (one.name in ANCHORS and expected[one] >= HOPELESS)
        ]

    def second_looks(self, most: int = SECOND_LOOKS) -> list[Candidate]:
        """Candidates that a law puts near the top and that have not been run."""
        found = self.predictions()
        top = found[0].speedup
        near = [p.candidate for p in found if p.candidate not in self.trials and p.speedup >= PROMISING * max(1.0, top)]
        return near[:most]

    def round(self, prompt: Any, candidates: Sequence[Candidate]) -> None:
        """One prompt by each of these, beside plain decoding."""
        for group in self._groups(candidates):
            asked = [(one.config, self.trial(one).memory) for one in group]
            runs = weave(self.model, prompt, asked, self.settings)
            for one, run in zip(group, runs, strict=True):
                self.trials[one].add(run, self.table, runs[0])

    def trial(self, candidate: Candidate) -> Trial:
        if candidate not in self.trials:
            self.trials[candidate] = Trial(self.model.memory.new())
        return self.trials[candidate]

    def _groups(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        others = [one for one in candidates if one is not self.plain]
        size = TOGETHER - 1
        return [[self.plain, *others[i : i + size]] for i in range(0, max(1, len(others)), size)]

    def look(self, prompts: Sequence[Any], candidates: Sequence[Candidate]) -> None:
        if not candidates:
            return
        self.say(f"running {', '.join(one.name for one in candidates)} on {len(prompts)} prompts ...")
        for group in self._groups(candidates):  # what happens once per shape of a step happens here
            asked = [(one.config, self.model.memory.new()) for one in group]
            weave(self.model, prompts[0], asked, replace(self.settings, max_tokens=WARM_UP_TOKENS))
        for prompt in prompts:
            self.round(prompt, candidates)

    def predictions(self) -> list[Prediction]:
        return predict(self.candidates, self.table, self.trials, self.settings.max_tokens)

    def result(self, prompts: int) -> Result:
        found = self.predictions()
        plain = next(p for p in found if p.candidate is self.plain)
        best = found[0] if found[0].speedup >= PAYS else plain
        backend, device = self.model.backend, self.model.backend.device
        facts = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            "threads": torch.get_num_threads(),
            "dtype": str(backend.dtype).removeprefix("torch."),
            "backend": backend.capabilities.name,
            "torch": torch.__version__,
        }
        tokens = self.settings.max_tokens
        return Result(self.model.name, tuple(found), best, self.cost, learn(self.trials), prompts, tokens, facts)


def tune(
    model: Any,
    prompts: Sequence[Any],
    *,
    acceptance: bool = True,
    second_looks: int = SECOND_LOOKS,
    cost: CostCurve | None = None,
    say: Say | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    raw: bool = False,
) -> Result:
    """The best config for a loaded model on this machine and these prompts.

    Without `acceptance` only t(K) is measured, and S is the prior's. `max_tokens` and the following are settings of
    `generate`, for every answer; `Tuner` takes all of them.
    """
    settings = RequestSettings(max_tokens, 0, temperature, top_k, top_p, min_p, seed, raw=raw)
    tuner = Tuner(model, settings, cost=cost, say=say)
    if not acceptance:
        return tuner.result(0)
    tuner.look(prompts, tuner.anchors())
    tuner.look(prompts, tuner.second_looks(second_looks))
    return tuner.result(len(prompts))


def save(model: Any, result: Result, folder: Path) -> Path:
    """Keep the recommendation as the profile that `load()` picks up for this model on this machine."""
    best = result.best
    return profiles.save(model.name, model.backend, best.candidate.config, best.candidate.name, result.record(), folder)
