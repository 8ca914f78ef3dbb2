"""One request's state: tokens, window, sources, uniforms. It proposes a step's tree and absorbs what the step gave.

A sequence knows nothing of tensors or text, and a backend nothing of windows or pools; the engine joins the two.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

from lookahead.algorithm.budget import equal_share, weighing_curve
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.draft import TAUGHT, Cached, Candidates, Draft, Drafter
from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sampling import NO_DRAW, Adjustment
from lookahead.algorithm.sources import Outcome, PredictionSource, SharedMemory, build, source_of, wants_top
from lookahead.algorithm.tree import NO_GUESSES, TokenTree, WindowLayout, window_layout
from lookahead.algorithm.verify import Verdict, accept, cut
from lookahead.algorithm.window import Window
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.stats import Stats

MOST_TOKENS = 2**31 - 1
"""C counts the tokens of a text in 32 bits."""
AHEAD = 64
"""For so many output positions the uniforms are drawn before a step needs them, while the device runs."""


class DecodingSequence:
    """Prompt and output of one request, and all that lookahead decoding remembers about it.

    `ends` is asked after every accepted token and may end the sequence (stop strings live there). `memory` is shared
    by all requests of a loaded model; without it, or with scope 'request', the sequence starts with an empty one.
    `prediction` is a text that the output may resemble, from which guesses are made.

    `output` is the beginning of the output, if another sequence has generated it already. This one continues behind it,
    and its output is the one that a single sequence gives. Whatever else follows the output (`ends`, a grammar) must
    have been told these tokens. `stats` counts only what is generated here.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        config: LookaheadConfig | None = None,
        sampling: SamplingParams | None = None,
        rules: StopRules | None = None,
        ends: Callable[[int], bool] | None = None,
        memory: SharedMemory | None = None,
        prediction: Sequence[int] = (),
        output: Sequence[int] = (),
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
        if len(output) >= self.room:
            raise ValueError(f"the output already has {len(output)} of its {self.room} tokens; there is nothing to add")
        self.tokens = [*prompt, *output]
        self.prompt_tokens = len(prompt)
        self.ends = ends
        self._eos_ids = self.rules.eos_ids
        self.finish_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        self.wants_top = wants_top(self.config)
        self._bonus = TAUGHT if self.wants_top else 0.0
        self._greedy = self.sampling.greedy
        self._penalised = self.sampling.penalised or bool(self.sampling.logit_bias)
        self.adjusts = self._penalised or bool(self.rules.min_tokens and self.rules.eos_ids)
        self._waiting: tuple[TokenTree, StepOutput, Verdict] | None = None
        self.best_refused = 0.0  # the score of the best guess that the last step refused (see `choice.choose_trees`)
        if memory is None or self.config.recycle_scope != "model":
            memory = SharedMemory(None if memory is None else memory.drafter)
        self._memory, self._trust = memory, memory.calibration.trust
        self._uniforms: list[float] = []
        self._random = random.Random(self.sampling.seed)
        width = self.config.window if "jacobi" in self.config.sources else 0
        self._window = Window(width, self.config.ngram, self.tokens)
        self._sources = build(self.config, self._memory)
        self.prediction: PredictionSource | None = None
        if prediction and self.config.sources:
            self.prediction = PredictionSource(self._memory.calibration, prediction, self.config.deepest)
            self._sources.insert(0, self.prediction)
            if output:
                self.prediction.follow(self.tokens, output)
        self._learns_early = all(source.learns_early for source in self._sources)
        self.weighed = weighing_curve(self.config)
        self._shares: dict[tuple[int, bool], int] = {}
        self._deepest = self.config.deepest
        # A window fills more than half of a share of the budget that is smaller than this.
        self._crowds_below = min(self.config.budget, 2 * self.config.window_tokens) if width else sys.maxsize
        self.root_alone = window_layout(0, self.config.ngram)
        self._candidates = Candidates.after(self.tokens, self._memory.calibration.rates)
        for source in self._sources:
            source.start(self.tokens)
            if source.proposes_once:
                source.propose(self.tokens, self._candidates)
        self._proposing = [source for source in self._sources if not source.proposes_once]
        self.cached_draft = self._cached_draft()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        """How many tokens the output has."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def left(self) -> int:
        """How many tokens may still be generated."""
        return self.room - self.generated

    @property
    def continues_alone(self) -> bool:
        """True when this sequence never guesses, so its next step needs only this step's token."""
        return not self._sources and not self._window.width and self.left > 1

    @property
    def drafter(self) -> Drafter:
        return self._memory.drafter

    @property
    def trust(self) -> float:
        """What scores are multiplied by before they are weighed against time."""
        return self._trust.ratio

    def share(self, sequences: int, pads: bool) -> int:
        """The most tokens of this sequence's tree if all in a step get the same (see `budget.equal_share`)."""
        key = sequences, pads
        if key not in self._shares:
            self._shares[key] = equal_share(self.config, sequences, pads=pads)
        return self._shares[key]

    def propose(self, limit: int | None = None, cost: PassCost | None = None) -> TokenTree:
        """The tree of a step of this sequence alone, of at most `limit` tokens. `cost` is what a pass costs now;
        without it, the config's curve counts."""
        most = self.config.budget
        weighed: Sequence[float] | None = self.weighed
        if weighed is not None and cost is not None:
            weighed = cost.first(most) or weighed
        layout = self.layout(most)
        if limit is not None and layout.size > limit:
            layout = self.root_alone
        trees, _ = self.drafter.choose([self.draft(layout, most if limit is None else min(most, limit), weighed)])
        return trees[0]

    def draft(
        self,
        layout: WindowLayout,
        most: int,
        cost: Sequence[float] | None,
        trust: float = 1.0,
        all_taken: bool = True,
    ) -> Draft:
        """What this sequence would put into a step: at most `most` tokens, the window's among them.

        `cost` weighs the guesses (see `draft.Limits`). `trust` and `all_taken` are for the choice among several
        sequences.
        """
        # 1. The root and the lookahead branch.
        text = self.tokens
        branch = [text[-1], *self._window.flat()] if layout.width else text[-1:]
        # 2. The verification branch: the best guesses that the rest has room for.
        # An accepted guess at depth d means d + 1 tokens, so no guess deeper than left - 1 can count.
        room, deepest = most - layout.size, self.room - (len(text) - self.prompt_tokens) - 1
        if deepest > self._deepest:
            deepest = self._deepest
        candidates = self._candidates if room > 0 and deepest > 0 and self._sources else None
        if candidates is not None:
            candidates.restart(text)
            for source in self._proposing:
                source.propose(text, candidates)
        return Draft(layout, branch, candidates, room, deepest, cost, trust, self._bonus, all_taken)

    def _cached_draft(self) -> Draft | None:
        """The draft of this sequence in all steps that it shares with others and in which it has no window, if all that
        changes from one to the next is in C."""
        config, candidates = self.config, self._candidates
        if config.step_cost is None or config.budget < 2 or self._proposing or candidates.text is None:
            return None
        cached = Cached(self._trust.cell, min(self.prompt_tokens + self.room, MOST_TOKENS))
        layout, most, cost = self.root_alone, config.budget - 1, self.weighed
        return Draft(
            layout, (), candidates, most, self._deepest, cost, bonus=self._bonus, all_taken=False, cached=cached
        )

    def bare_root(self) -> TokenTree:
        """The tree of a step without guesses and without a window: one token, as in autoregressive decoding."""
        return self.root_alone.tree(self.tokens[-1:], NO_GUESSES)

    def layout(self, share: int) -> WindowLayout:
        """The window's place in the tree. A window is left out when only one token is left to generate, where it would
        reach past the context (its last column stands W + N - 3 positions after the root), and where it would fill
        more than half of a share of the budget."""
        if share < self._crowds_below or self.left <= 1:
            return self.root_alone
        config, width, limit = self.config, self._window.width, self.rules.max_length
        fits = limit is None or len(self.tokens) + width + config.ngram - 3 <= limit
        return window_layout(width, config.ngram) if fits else self.root_alone

    def adjustment(self) -> Adjustment | None:
        """What the next step's logits are adjusted by, or None if they are taken as they come. That is always so where
        `adjusts` is false."""
        rules = self.rules
        if not self._penalised and (self.generated >= rules.min_tokens or not rules.eos_ids):
            return None
        return Adjustment(self.tokens, self.prompt_tokens, rules.eos_ids, rules.min_tokens)

    def uniforms(self, tree: TokenTree) -> list[float]:
        """Per needed node, the uniform of the output position that it predicts. The window's nodes take the argmax."""
        if self._greedy:
            return []
        generated, depths = len(self.tokens) - self.prompt_tokens, tree.depths[tree.branch :]
        if len(self._uniforms) <= generated + len(depths):
            self._draw_uniforms(generated + len(depths) + 1)  # no guess is deeper than there are guesses
        ahead = self._uniforms[generated : generated + len(depths) + 1]
        if not tree.width:
            return [ahead[0], *[ahead[depth] for depth in depths]]
        window = len(tree.needed) - 1 - len(depths)
        return [ahead[0], *[NO_DRAW] * window, *[ahead[depth] for depth in depths]]

    def next_uniforms(self, count: int) -> list[float]:
        """The uniforms of the output positions after the next one. None of them for greedy decoding."""
        if self.sampling.greedy:
            return []
        first = self.generated + 1
        self._draw_uniforms(first + count)
        return self._uniforms[first : first + count]

    def _draw_uniforms(self, count: int) -> None:
        """Draw the uniforms of the first `count` output positions, as far as they have not been drawn yet."""
        while len(self._uniforms) < count:
            self._uniforms.append(self._random.random())

    @property
    def learner(self) -> Candidates | None:
        """The candidates that may learn from a step before this sequence absorbs it (see `Drafter.verification`), or
        None if one of its sources cannot."""
        return self._candidates if self._learns_early else None

    def verify(self, tree: TokenTree, output: StepOutput) -> Verdict:
        """Accept what the targets confirm, cut at the first token that ends the sequence."""
        return self.cut(Verdict(*accept(tree, output.targets)))

    def cut(self, verdict: Verdict) -> Verdict:
        """Cut a verdict at the first token that ends the sequence."""
        tokens, generated = verdict.tokens, len(self.tokens) - self.prompt_tokens
        if self.ends is None and generated + len(tokens) < self.room and self._eos_ids.isdisjoint(tokens):
            return verdict  # as `verify.cut` would say, in half the time
        count, reason = cut(tokens, generated, self.room, self.rules, self.ends)
        if reason is not None:
            verdict.path, verdict.tokens, verdict.finish_reason = verdict.path[: count - 1], tokens[:count], reason
        return verdict

    def absorb(self, tree: TokenTree, output: StepOutput, verdict: Verdict | None = None) -> Verdict:
        """Take the accepted tokens, roll the window, learn. Without a verdict the sequence verifies by itself."""
        if self._waiting is not None:
            self.learn_while_running()  # the engine did not call it, and the step before would be lost
        # 1. The accepted tokens.
        verdict = verdict or self.verify(tree, output)
        tokens = verdict.tokens
        self.finish_reason = verdict.finish_reason
        root = self.tokens[-1]
        self.tokens += tokens
        if self.prediction is not None:
            self.prediction.follow(self.tokens, tokens)
        if self.finish_reason is not None:
            return verdict
        # 2. The window: one n-gram per column, and a new window row.
        ngrams: list[tuple[int, ...]] = []
        if tree.width:
            first = 1 if self.config.ngram > 2 else 0  # with N = 2 the root is part of the newest window row
            new = output.targets[first : first + tree.width]
            if not verdict.learned:
                ngrams = self._window.ngrams(root, new)
            self._window.roll(new)
        # 3. Learn what the next step's guesses need. The rest waits until the device runs that step.
        self._waiting = tree, output, verdict
        if not verdict.learned:
            self._show(tree, output, verdict, ngrams)
        return verdict

    def _show(self, tree: TokenTree, output: StepOutput, verdict: Verdict, ngrams: list[tuple[int, ...]]) -> None:
        """Show a step to the sources."""
        outcome = Outcome(
            self.tokens, verdict.tokens, tree, verdict.path, output.targets, output.top, ngrams, verdict.learned
        )
        for source in self._sources:
            source.absorb(outcome)

    def count(self, tree: TokenTree, verdict: Verdict) -> None:
        """Count a step that was absorbed. That may wait until the device runs the next one, but not until it learns."""
        sources = [source_of(tree.origins[node - tree.branch]) for node in verdict.path] if verdict.path else ()
        self.stats.count_step(tree.size, len(verdict.tokens), sources, self._trust.ratio * tree.expected)

    def learn_while_running(self) -> None:
        """Do the part of learning that may wait until the device runs the next step: how good the guesses were, and
        what the sources leave for it."""
        if not self._greedy:
            self._draw_uniforms(self.generated + AHEAD)
        if self._waiting is None:
            return
        (tree, output, verdict), self._waiting = self._waiting, None
        if verdict.learned:
            self._show(tree, output, verdict, [])
        self._trust.learn(len(verdict.path), tree.expected)
        self._memory.calibration.learn(tree, verdict.path, verdict.tokens)
        for source in self._sources:
            source.learn_while_running()
