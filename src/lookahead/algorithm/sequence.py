"""One request's state: tokens, window, sources, uniforms. It proposes a step's tree and accepts the step's tokens.

A sequence knows nothing about tensors or text, and a backend nothing about windows or pools; the engine connects them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lookahead.algorithm.budget import chain_length, equal_share, weighing_curve
from lookahead.algorithm.cost import Costs, PassCost
from lookahead.algorithm.draft import RECYCLE_BONUS, CachedInputs, Candidates, Draft, Drafter
from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.sources import Outcome, PredictionSource, SharedMemory, build_sources, source_of, wants_top
from lookahead.algorithm.tree import NO_DRAFT_TOKENS, TokenTree, WindowLayout, window_layout
from lookahead.algorithm.uniforms import UNIFORMS_AHEAD, Uniforms
from lookahead.algorithm.verify import Verdict, accept, cut_at_stop
from lookahead.algorithm.window import Window
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.stats import Stats

MAX_TEXT = 2**31 - 1
"""C counts the tokens of a text in 32 bits."""
LEAST_SCORE = 0.01
"""A chain without a known cost ends before a draft token with less chance to be accepted."""


class DecodingSequence:
    """Prompt and output of one request, and the state of its lookahead decoding.

    `ends` is called with every accepted token and returns whether it ends the sequence (stop strings use it). `memory`
    is shared by all requests of a loaded model; without it, or with scope 'request', the sequence starts with an empty
    one. `prediction` is a text that the output may resemble, a source of draft tokens.

    `output` is the beginning of the output, if another sequence has already generated it. This one continues after it,
    and the complete output is that of a single sequence. `ends` and a grammar must already have seen these tokens.
    `stats` counts only what is generated here.
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
        self._end = self.prompt_tokens + self.room  # the length at which the sequence ends
        self.ends = ends
        self._eos_ids = self.rules.eos_ids
        self.finish_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        self.wants_top = wants_top(self.config)
        self._bonus = RECYCLE_BONUS if self.wants_top else 0.0
        self.greedy = self.sampling.greedy
        self._penalised = self.sampling.penalised or bool(self.sampling.logit_bias)
        self.adjusts = self._penalised or bool(self.rules.min_tokens and self.rules.eos_ids)
        self._unlearned: tuple[TokenTree, StepOutput, Verdict] | None = None
        self.best_refused = 0.0  # the best score that the last step refused (see `choice.choose_trees`)
        if memory is None or self.config.recycle_scope != "model":
            memory = SharedMemory() if memory is None else memory.new()
        self._memory, self._trust = memory, memory.calibration.trust
        self._uniforms = Uniforms(self.sampling.seed)
        width = self.config.window if "jacobi" in self.config.sources else 0
        self._window = Window(width, self.config.ngram, self.tokens)
        self._sources = build_sources(self.config, self._memory)
        self.prediction: PredictionSource | None = None
        if prediction and self.config.sources:
            self.prediction = PredictionSource(self._memory.calibration, prediction, self.config.deepest)
            self._sources.insert(0, self.prediction)
            if output:
                self.prediction.record_output(self.tokens, output)
        self.never_drafts = not self._sources and not width
        self._learns_early = all(source.learns_early for source in self._sources)
        self.weighing_times = weighing_curve(self.config)
        self._shares: dict[tuple[int, bool], int] = {}
        self._deepest = self.config.deepest
        # The smallest share of the budget of which a window fills at most half.
        self.min_window_share = min(self.config.budget, 2 * self.config.window_tokens) if width else sys.maxsize
        self.root_alone = window_layout(0, self.config.ngram)
        self._candidates = Candidates.after(self.tokens, self._memory.calibration.rates)
        self._candidates.chain = self.config.chain
        for source in self._sources:
            source.start(self.tokens)
            if source.proposes_once:
                source.propose(self.tokens, self._candidates)
        self._proposing = [source for source in self._sources if not source.proposes_once]
        self.cached_draft = self._cached_draft(alone=False) if self.config.step_cost is not None else None
        self._draft_alone = self._cached_draft(alone=True) if self.weighing_times is None else None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.room - len(self.tokens) + self.prompt_tokens

    @property
    def drafter(self) -> Drafter:
        return self._memory.drafter

    @property
    def trust(self) -> float:
        """The factor by which scores are corrected before they are weighed against time (see `calibration.Trust`)."""
        return self._trust.ratio

    def share(self, sequences: int, pads: bool) -> int:
        """The most tokens of this sequence's tree in equal shares of a step (see `budget.equal_share`)."""
        key = sequences, pads
        if key not in self._shares:
            self._shares[key] = equal_share(self.config, sequences, pads=pads)
        return self._shares[key]

    def propose(self, limit: int | None = None, cost: PassCost | None = None, *, runs_ahead: bool = False) -> TokenTree:
        """The tree of a step of this sequence alone, of at most `limit` tokens. `cost` is the current cost of a pass;
        without it, the config's curve is used. `runs_ahead`: see `choice.choose_trees`."""
        most = self.config.budget
        weighed: Sequence[float] | None = self.weighing_times
        if weighed is not None and cost is not None:
            weighed = cost.times_up_to(most, int(runs_ahead)) or weighed
        layout = self.layout(most)
        if limit is not None and layout.size > limit:
            layout = self.root_alone
        if layout is self.root_alone and self._draft_alone is not None and (limit is None or limit >= most):
            return self.drafter.draft_trees([self._draft_alone])[0][0]
        trees, _ = self.drafter.draft_trees([self.draft(layout, most if limit is None else min(most, limit), weighed)])
        return trees[0]

    def propose_chain(self, limit: int | None = None, cost: PassCost | None = None, again: int = 0) -> TokenTree:
        """The chain of a step of this sequence, of at most `limit` tokens. The budget includes the `again` tokens in
        front of its root that run for the second time. `cost` is as in `propose`; without any, no draft token below
        LEAST_SCORE is taken."""
        most = self.config.budget - again if limit is None else min(limit, self.config.budget - again)
        if most < 2:
            return self.bare_root()
        tree = self.drafter.draft_trees([self.draft(self.root_alone, most, None)])[0][0]
        rates, score, scores = self._memory.calibration.rates, 1.0, list[float]()
        for origin in tree.origins:
            score *= rates[origin]
            scores.append(score)
        times: Costs | None = self.config.step_cost
        if times is None:
            count = sum(score >= LEAST_SCORE for score in scores)
        else:
            if cost is not None:
                times = cost.times_up_to(most + again) or times
            count = chain_length(scores, times, again, self._bonus)
        return tree.first_of_chain(count, sum(scores[:count]))

    def draft(
        self,
        layout: WindowLayout,
        most: int,
        cost: Sequence[float] | None,
        trust: float = 1.0,
        all_taken: bool = True,
    ) -> Draft:
        """This sequence's draft of a step: at most `most` tokens, including the window's.

        `cost` weighs the draft tokens (see `draft.Limits`). `trust` and `all_taken` are for steps of several sequences.
        """
        # 1. The root and the lookahead branch.
        text = self.tokens
        branch = [text[-1], *self._window.flat()] if layout.width else text[-1:]
        # 2. The verification branch: the best draft tokens, up to the limit.
        # An accepted draft token at depth d gives d + 1 tokens, so none deeper than left - 1 can count.
        room, deepest = most - layout.size, self.room - (len(text) - self.prompt_tokens) - 1
        if deepest > self._deepest:
            deepest = self._deepest
        candidates = self._candidates if room > 0 and deepest > 0 and self._sources else None
        if candidates is not None:
            candidates.restart(text)
            for source in self._proposing:
                source.propose(text, candidates)
        return Draft(layout, branch, candidates, room, deepest, cost, trust, self._bonus, all_taken)

    def _cached_draft(self, *, alone: bool) -> Draft | None:
        """The draft of this sequence in all steps in which it has no window, of this sequence alone or of several, if
        everything that changes from one step to the next is in C; else None."""
        config, candidates = self.config, self._candidates
        if config.budget < 2 or self._proposing or candidates.text is None:
            return None
        cached = CachedInputs(self._trust.cell, min(self.prompt_tokens + self.room, MAX_TEXT))
        layout, most, cost = self.root_alone, config.budget - 1, self.weighing_times
        return Draft(
            layout, (), candidates, most, self._deepest, cost, bonus=self._bonus, all_taken=alone, cached=cached
        )

    def bare_root(self) -> TokenTree:
        """The tree of a step without draft tokens or a window: one token, as in autoregressive decoding."""
        return self.root_alone.tree(self.tokens[-1:], NO_DRAFT_TOKENS)

    def layout(self, share: int) -> WindowLayout:
        """The layout of the tree's lookahead branch. The window is left out when only one token is left to generate,
        when it would exceed the context (its last column is W + N - 3 positions after the root), and when it would fill
        more than half of a share of the budget."""
        if share < self.min_window_share or self.left <= 1:
            return self.root_alone
        config, width, limit = self.config, self._window.width, self.rules.max_length
        fits = limit is None or len(self.tokens) + width + config.ngram - 3 <= limit
        return window_layout(width, config.ngram) if fits else self.root_alone

    def adjustment(self) -> Adjustment | None:
        """The adjustment of the next step's logits, or None. It is always None if `adjusts` is false."""
        rules = self.rules
        if not self._penalised and (self.generated >= rules.min_tokens or not rules.eos_ids):
            return None
        return Adjustment(self.tokens, self.prompt_tokens, rules.eos_ids, rules.min_tokens)

    def uniforms(self, tree: TokenTree) -> list[float]:
        """One uniform per needed node (see `Uniforms.of_tree`); empty for greedy decoding."""
        return [] if self.greedy else self._uniforms.of_tree(tree, len(self.tokens) - self.prompt_tokens)

    def next_uniforms(self, count: int) -> list[float]:
        """The uniforms of `count` output positions after the next one; empty for greedy decoding."""
        first = self.generated + 1
        return [] if self.greedy else self._uniforms.between(first, first + count)

    @property
    def learner(self) -> Candidates | None:
        """The candidates, if they may learn from a step before this sequence accepts it (see `Drafter.verification`).
        None if one of its sources cannot."""
        return self._candidates if self._learns_early else None

    def verify(self, tree: TokenTree, output: StepOutput) -> Verdict:
        """Accept draft tokens by their targets, up to the first token that ends the sequence."""
        return self.apply_stop_rules(Verdict(*accept(tree, output.targets)))

    def apply_stop_rules(self, verdict: Verdict) -> Verdict:
        """Cut a verdict after the first token that ends the sequence."""
        tokens = verdict.tokens
        if self.ends is None and len(self.tokens) + len(tokens) < self._end and self._eos_ids.isdisjoint(tokens):
            return verdict  # most steps: twice as fast as `cut_at_stop`, and tested against it in test_sequence.py
        count, reason = cut_at_stop(tokens, self.generated, self.room, self.rules, self.ends)
        if reason is not None:
            verdict.path, verdict.tokens, verdict.finish_reason = verdict.path[: count - 1], tokens[:count], reason
        return verdict

    def accept_step(self, tree: TokenTree, output: StepOutput, verdict: Verdict | None = None) -> Verdict:
        """Append the accepted tokens, roll the window, learn. Without a verdict the sequence verifies itself."""
        if self._unlearned is not None:
            self.learn_while_running()  # the engine did not call it, and the previous step would be lost
        # 1. The accepted tokens.
        verdict = verdict or self.verify(tree, output)
        self.tokens += verdict.tokens
        if self.prediction is not None:
            self.prediction.record_output(self.tokens, verdict.tokens)
        if verdict.finish_reason is not None:
            self.finish_reason = verdict.finish_reason
            return verdict
        # 2. The window: one n-gram per column, and a new window row.
        ngrams: Sequence[tuple[int, ...]] = ()
        if tree.width:
            first = 1 if self.config.ngram > 2 else 0  # with N = 2 the root is part of the newest window row
            new = output.targets[first : first + tree.width]
            if not verdict.learned:
                ngrams = self._window.ngrams(tree.tokens[0], new)
            self._window.roll(new)
        # 3. Learn what the next step's draft needs. The rest waits until the device runs that step.
        self._unlearned = tree, output, verdict
        if not verdict.learned:
            self._update_sources(tree, output, verdict, ngrams)
        return verdict

    def _update_sources(
        self, tree: TokenTree, output: StepOutput, verdict: Verdict, ngrams: Sequence[tuple[int, ...]]
    ) -> None:
        """Let the sources learn from a step."""
        outcome = Outcome(
            self.tokens, verdict.tokens, tree, verdict.path, output.targets, output.top, ngrams, verdict.learned
        )
        for source in self._sources:
            source.learn_from(outcome)

    def count_step(self, tree: TokenTree, verdict: Verdict) -> None:
        """Add an accepted step to the stats. Call it before `learn_while_running`, which changes `trust`."""
        sources = [source_of(tree.origins[node - tree.branch]) for node in verdict.path] if verdict.path else ()
        self.stats.count_step(tree.size, len(verdict.tokens), sources, self._trust.ratio * tree.expected)

    def learn_while_running(self) -> None:
        """Do the part of learning that can wait until the device runs the next step: the calibration, and what the
        sources have deferred."""
        if not self.greedy:
            self._uniforms.draw(self.generated + UNIFORMS_AHEAD)
        if self._unlearned is None:
            return
        (tree, output, verdict), self._unlearned = self._unlearned, None
        if verdict.learned:
            self._update_sources(tree, output, verdict, [])
        self._trust.record_step(len(verdict.path), tree.expected)
        self._memory.calibration.record_step(tree, verdict.path, verdict.tokens)
        for source in self._sources:
            source.learn_while_running()
