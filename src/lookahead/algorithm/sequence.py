"""One request's state: tokens, window, sources, uniforms. It proposes a step's tree and absorbs its targets.

A sequence knows nothing of tensors or text, and a backend nothing of windows or pools; the engine joins the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lookahead.algorithm.draft import NO_GUESSES, Draft
from lookahead.algorithm.sampling import NO_DRAW
from lookahead.algorithm.sources import Outcome, SharedMemory, build, source_of, wants_top
from lookahead.algorithm.tree import StepOutput, TokenTree, window_layout
from lookahead.algorithm.verify import Verdict, accept, cut
from lookahead.algorithm.window import Window
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.stats import Stats


class DecodingSequence:
    """Prompt and output of one request, and all that lookahead decoding remembers about it.

    `ends` is asked after every accepted token and may end the sequence (stop strings live there). `memory` is shared
    state of the loaded model; without it, or with scope 'request', the sequence starts cold.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        config: LookaheadConfig | None = None,
        sampling: SamplingParams | None = None,
        rules: StopRules | None = None,
        ends: Callable[[int], bool] | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        self.config = config or LookaheadConfig()
        self.sampling = sampling or SamplingParams()
        self.rules = rules or StopRules()
        if not prompt:
            raise ValueError("the prompt has no tokens; give at least one")
        self.room = self.rules.room(len(prompt))
        if self.room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and the model's context holds {self.rules.max_length}; "
                "shorten the prompt or the conversation"
            )
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.ends = ends
        self.finish_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        self.wants_top = wants_top(self.config)
        shared = memory is not None and self.config.recycle_scope == "model"
        self._memory = memory if memory is not None and shared else SharedMemory()
        self._uniforms: list[float] = []
        self._random = random.Random(self.sampling.seed)
        width = self.config.window if "jacobi" in self.config.sources else 0
        self._window = Window(width, self.config.ngram, self.tokens)
        self._sources = build(self.config, self._memory)
        for source in self._sources:
            source.start(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def continues_alone(self) -> bool:
        """Whether the next step's target is, unless it ends the sequence, all of the step after it: nothing guesses."""
        left = self.room - self.stats.generated_tokens
        return left > 1 and self.sampling.greedy and not self._sources and not self._window.width

    def propose(self, together: int = 1) -> TokenTree:
        """The next step's tree: the root, the window, and the best guesses the budget has room for.

        `together` sequences take part in the step. A window that would fill more than half of a share is left out.
        """
        config, window = self.config, self._window
        budget = config.share(together)
        shares = budget < config.budget
        left = self.room - self.stats.generated_tokens
        # A guess at depth d is followed by one more token, so deeper than left - 1 cannot count. A window that would
        # reach past the context is left out: its last column stands W + N - 3 positions after the root.
        limit = self.rules.max_length
        fits = limit is None or len(self.tokens) + window.width + config.ngram - 3 <= limit
        fits = fits and (not shares or 2 * config.window_tokens <= budget)
        width = window.width if fits and left > 1 else 0
        layout = window_layout(width, config.ngram)

        branch = [self.tokens[-1], *window.flat()] if width else self.tokens[-1:]
        room, deepest = budget - layout.size, min(left - 1, config.deepest)
        if room < 1 or deepest < 1:
            return layout.tree(branch, NO_GUESSES)
        draft = Draft(self.tokens, self._memory.calibration.rates)
        for source in self._sources:
            source.propose(self.tokens, draft)
        return draft.tree(layout, branch, room, deepest, None if shares else config.step_cost)

    def uniforms(self, tree: TokenTree) -> list[float]:
        """One per needed row: that of the output position the row predicts; the window's rows are greedy."""
        if self.sampling.greedy:
            return []
        generated, depths = self.stats.generated_tokens, tree.depths[tree.branch :]
        while len(self._uniforms) <= generated + max(depths, default=0):
            self._uniforms.append(self._random.random())
        left = self._uniforms[generated:]
        window = len(tree.needed) - 1 - len(depths)
        return [left[0], *[NO_DRAW] * window, *[left[depth] for depth in depths]]

    def verify(self, tree: TokenTree, result: StepOutput) -> Verdict:
        """Accept what the targets confirm, cut at the first token that ends the sequence."""
        path, tokens = accept(tree, result.targets)
        count, reason = cut(tokens, self.stats.generated_tokens, self.room, self.rules, self.ends)
        return Verdict(path[: count - 1], tokens[:count], reason)

    def absorb(self, tree: TokenTree, result: StepOutput, verdict: Verdict | None = None) -> Verdict:
        """Take the accepted tokens, roll the window, learn. Without a verdict the sequence verifies by itself."""
        verdict = verdict or self.verify(tree, result)
        path, tokens = verdict.path, verdict.tokens
        self.finish_reason = verdict.finish_reason
        root = self.tokens[-1]
        self.tokens += tokens
        origins = [tree.origins[node - tree.branch] for node in path]
        self.stats.count_step(len(tree), len(tokens), [source_of(origin) for origin in origins])
        if self.finish_reason is not None:
            return verdict
        ngrams: list[tuple[int, ...]] = []
        if tree.width:
            first = 1 if self.config.ngram > 2 else 0
            new = result.targets[first : first + tree.width]
            ngrams = self._window.ngrams(root, new)
            self._window.roll(new)
        self._learn(Outcome(self.tokens, tokens, tree, path, result.targets, result.top, ngrams))
        return verdict

    def learn_while_running(self) -> None:
        """What can wait until the next step runs."""
        for source in self._sources:
            source.learn_while_running()

    def _learn(self, shown: Outcome) -> None:
        """Learn what a step has shown: how good its guesses were, and new ones for the sources."""
        self._memory.calibration.learn_step(shown.tree, shown.path, shown.accepted)
        for source in self._sources:
            source.absorb(shown)
