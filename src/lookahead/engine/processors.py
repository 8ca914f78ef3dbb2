"""Verification token by token: for logits processors and stopping criteria that look at the text so far, and for draws
that must be made in order.

`verify.accept` follows targets that the backend has picked for all needed nodes at once. That works only if a target
depends on its node alone. A repetition penalty, a grammar or a stopping criterion depends on the text before the node,
and may keep a state. So `PathVerifier` goes down the tree from the root, one output token at a time: it processes the
node's logits with the text so far, chooses the token, checks whether to stop, and continues with the draft token that
equals it. Every processor and criterion gets the same calls, in the same order, as with one token per step. They are
never called for a rejected draft token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.verify import Verdict, cut_at_stop
from lookahead.backends.sampling import adjusted, distribution, draw
from lookahead.config import SamplingParams
from lookahead.engine.request import StepResult

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids [B, L], scores [B, V]) -> scores [B, V], as transformers' `LogitsProcessorList`."""

Criteria = Callable[[torch.Tensor, "tuple[torch.Tensor, ...] | None"], torch.Tensor]
"""(token ids [B, L], the scores kept so far) -> [B] booleans, as transformers' `StoppingCriteriaList`."""

Draw = Callable[[torch.Tensor], torch.Tensor]
"""Scores [B, V] -> tokens [B]. It is called once per output position."""


Reached = dict[int, tuple[StepResult, int]]
"""Batch index -> the result of that sequence, and the node of the tree that verification has reached."""


@dataclass(frozen=True)
class Rule:
    """How logits become tokens, and when to stop. Without `processors` and `draw` a target is the logits' argmax.

    `criteria` end sequences in addition to their own stop rules. A sequence that has ended is padded with `pad`
    while others continue. Without `pad`, `criteria` end the batch when all sequences have met them.
    """

    processors: Processors | None = None
    draw: Draw | None = None
    criteria: Criteria | None = None
    pad: int | None = None
    keep_scores: bool = False
    keep_logits: bool = False

    @property
    def wants_logits(self) -> bool:
        return self.processors is not None or self.draw is not None or self.keep_scores or self.keep_logits


class PathVerifier:
    """Verifies one sequence, or several that share a rule and step together: all accept the same number of tokens
    per step.

    `ids` [B, L] is the text that processors and criteria see: the prompt as it was given, with its padding, and the
    output. If the rule keeps them, `scores` and `logits` hold one [B, V] tensor per output position, with zeros for
    sequences that have ended.
    """

    def __init__(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor, rule: Rule) -> None:
        self.rule, self.ids = rule, ids
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.batch_indices = {sequence: index for index, sequence in enumerate(sequences)}
        self._met = torch.zeros(len(sequences), dtype=torch.bool, device=ids.device)

    def __call__(self, results: Sequence[StepResult]) -> list[Verdict]:
        """Verify one step of the sequences that are still running."""
        self._begin(results)
        reached: Reached = {self.batch_indices[result.request.sequence]: (result, 0) for result in results}
        verdicts = {index: Verdict([], []) for index in reached}
        while reached:
            # 1. The next token of every sequence, chosen with the text before it.
            tokens = self._choose_tokens(reached)
            self._append(tokens)
            # 2. Does a sequence end here?
            ended = self._ended()
            children: dict[int, tuple[StepResult, int | None]] = {}
            for index, (result, node) in reached.items():
                verdict, sequence = verdicts[index], result.request.sequence
                verdict.tokens.append(tokens[index])
                generated = sequence.generated + len(verdict.tokens) - 1
                _, reason = cut_at_stop(
                    tokens[index : index + 1], generated, sequence.room, sequence.rules, sequence.ends
                )
                verdict.finish_reason = reason or ("stop" if ended[index] else None)
                if verdict.finish_reason is None:
                    children[index] = result, result.input.tree.draft_child(node, tokens[index])
            # 3. Continue with the draft tokens that equal them. If a running sequence has none, all stop here.
            reached = {index: (result, node) for index, (result, node) in children.items() if node is not None}
            if len(reached) < len(children):
                break
            for index, (_, node) in reached.items():
                verdicts[index].path.append(node)
        self._end()
        return list(verdicts.values())

    def _begin(self, results: Sequence[StepResult]) -> None:
        """Called before a step is verified, and `_end` after it."""

    def _end(self) -> None: ...

    def _append(self, tokens: Sequence[int]) -> None:
        """Add one token per sequence to the text."""
        self.ids = torch.cat([self.ids, torch.tensor([tokens], device=self.ids.device).T], dim=1)

    def _choose_tokens(self, reached: Reached) -> list[int]:
        """Choose one token per sequence. Those that have ended get the padding."""
        tokens = [self.rule.pad or 0] * len(self.batch_indices)
        if not self.rule.wants_logits:
            for index, (result, node) in reached.items():
                tokens[index] = result.output.targets[result.input.tree.needed_index(node)]
            return tokens
        size = next(iter(reached.values()))[0].output.logits.shape[-1]
        logits = torch.zeros((len(tokens), size), dtype=torch.float32, device=self.ids.device)
        for index, (result, node) in reached.items():
            logits[index] = result.output.logits[result.input.tree.needed_index(node)]
        scores = logits if self.rule.processors is None else self.rule.processors(self.ids, logits)
        if self.rule.keep_scores:
            self.scores.append(scores)
        if self.rule.keep_logits:
            self.logits.append(logits)
        chosen = (scores.argmax(dim=-1) if self.rule.draw is None else self.rule.draw(scores)).tolist()
        for index in reached:
            tokens[index] = chosen[index]
        return tokens

    def _ended(self) -> list[bool]:
        if self.rule.criteria is not None:
            self._met |= self.rule.criteria(self.ids, tuple(self.scores) if self.rule.keep_scores else None)
        met: list[bool] = self._met.tolist()
        return met if self.rule.pad is not None else [all(met)] * len(met)


def with_adjustment(processors: Processors, sequence: DecodingSequence) -> Processors:
    """The processors, followed by the sequence's own penalties, bias and minimum length (`sampling.adjusted`)."""
    if sequence.adjustment() is None:
        return processors

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rules = sequence.rules
        adjustment = Adjustment(ids[0].tolist(), sequence.prompt_tokens, rules.eos_ids, rules.min_tokens)
        return adjusted(processors(ids, scores), sequence.sampling, adjustment, [()])

    return process


def joint_draw(draws: Sequence[Draw]) -> Draw:
    """One draw for several sequences that step together. Sequence i uses `draws[i]`."""
    return lambda scores: torch.cat([draw(scores[index : index + 1]) for index, draw in enumerate(draws)])


def uniform_draw(seed: int, params: SamplingParams | None = None, drawn: int = 0) -> Draw:
    """Draws for one sequence by inverse CDF, with the uniforms that a `DecodingSequence` of this seed uses.

    With `params` their temperature, top-k, top-p and min-p are applied to the scores first. The first `drawn` tokens of
    the output were drawn elsewhere.
    """
    uniforms = random.Random(seed)
    for _ in range(drawn):
        uniforms.random()

    def choose(scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.tensor([uniforms.random()], dtype=torch.float64, device=scores.device)
        return draw(distribution(scores, params or SamplingParams(temperature=1.0)), uniform)

    return choose
