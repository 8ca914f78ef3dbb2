"""Verification when a target depends on its path: logits processors, draws and stopping criteria, token by token.

`verify.accept` follows targets that the backend has picked for all rows at once. That needs the rule from logits to
token to look at one row alone. A repetition penalty, a grammar or a stopping criterion looks at the text before, and
may remember what it was asked. So `Walk` takes a step's tree one output token at a time, from the root down: process
the row's logits with the text so far, choose the token, ask whether to stop, go on to the guess that equals it. Every
processor and every criterion sees just the calls it would see with one token per step, in the same order, and no
guess that is refused costs anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lookahead.algorithm.sampling import distribution, draw
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.verify import Verdict, cut
from lookahead.config import SamplingParams
from lookahead.engine.engine import StepResult

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids [B, L], scores [B, V]) -> scores [B, V], as transformers' `LogitsProcessorList`."""

Criteria = Callable[[torch.Tensor, "tuple[torch.Tensor, ...] | None"], torch.Tensor]
"""(token ids [B, L], the scores kept so far) -> [B] booleans, as transformers' `StoppingCriteriaList`."""

Draw = Callable[[torch.Tensor], torch.Tensor]
"""Scores [B, V] -> tokens [B]. It is called once per output position."""


Standing = dict[int, tuple[StepResult, int]]
"""Row -> its part of the step, and the node of the tree that it has reached."""


@dataclass(frozen=True)
class Rule:
    """From logits to tokens to the end. Without `processors` and `draw` a target is the logits' argmax.

    `criteria` end rows beside the sequence's own stop rules. `pad` follows the end of a row while others go on; without
    it a row goes on, too, until all have met `criteria`.
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


class Walk:
    """One row or several that share a rule and move together: every step gives all of them as many tokens.

    `ids` [B, L] is the text that processors and criteria see: the prompt as it was given, with its padding, and the
    output. `scores` and `logits` hold one [B, V] tensor per output position, where the rule keeps them; rows that have
    ended hold zeros there.
    """

    def __init__(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor, rule: Rule) -> None:
        self.rule, self.ids = rule, ids
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}
        self._met = torch.zeros(len(sequences), dtype=torch.bool, device=ids.device)

    def __call__(self, ran: Sequence[StepResult]) -> list[Verdict]:
        """Verify one step of the rows that are still running."""
        verdicts = {self._rows[one.sequence]: Verdict([], []) for one in ran}
        at: Standing = {self._rows[one.sequence]: (one, 0) for one in ran}
        while at:
            # 1. The next token of every row, chosen with the text before it.
            tokens = self._choose(at)
            self.ids = torch.cat([self.ids, torch.tensor(tokens, device=self.ids.device)[:, None]], dim=1)
            # 2. Does a row end here?
            ended = self._ended()
            guesses: dict[int, tuple[StepResult, int | None]] = {}
            for row, (one, node) in at.items():
                verdict, sequence = verdicts[row], one.sequence
                verdict.tokens.append(tokens[row])
                generated = sequence.stats.generated_tokens + len(verdict.tokens) - 1
                _, reason = cut(tokens[row : row + 1], generated, sequence.room, sequence.rules, sequence.ends)
                verdict.finish_reason = reason or ("stop" if ended[row] else None)
                if verdict.finish_reason is None:
                    guesses[row] = one, one.item.tree.guesses().get((node, tokens[row]))
            # 3. Go on to the guesses that equal them, as long as every row has one.
            at = {row: (one, node) for row, (one, node) in guesses.items() if node is not None}
            if len(at) < len(guesses):
                break
            for row, (_, node) in at.items():
                verdicts[row].path.append(node)
        return list(verdicts.values())

    def _choose(self, at: Standing) -> list[int]:
        """One token per row; rows that have ended get the padding."""
        tokens = [self.rule.pad or 0] * len(self._rows)
        if not self.rule.wants_logits:
            for row, (one, node) in at.items():
                tokens[row] = one.result.targets[one.item.tree.row(node)]
            return tokens
        size = next(iter(at.values()))[0].result.logits.shape[-1]
        logits = torch.zeros((len(tokens), size), dtype=torch.float32, device=self.ids.device)
        for row, (one, node) in at.items():
            logits[row] = one.result.logits[one.item.tree.row(node)]
        scores = logits if self.rule.processors is None else self.rule.processors(self.ids, logits)
        if self.rule.keep_scores:
            self.scores.append(scores)
        if self.rule.keep_logits:
            self.logits.append(logits)
        chosen = (scores.argmax(dim=-1) if self.rule.draw is None else self.rule.draw(scores)).tolist()
        for row in at:
            tokens[row] = chosen[row]
        return tokens

    def _ended(self) -> list[bool]:
        if self.rule.criteria is not None:
            self._met |= self.rule.criteria(self.ids, tuple(self.scores) if self.rule.keep_scores else None)
        met: list[bool] = self._met.tolist()
        return met if self.rule.pad is not None else [all(met)] * len(met)


class Walks:
    """A step's rows, each judged by the walk it belongs to."""

    def __init__(self) -> None:
        self._of: dict[DecodingSequence, Walk] = {}

    def add(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor, rule: Rule) -> Walk:
        walk = Walk(sequences, ids, rule)
        self._of.update(dict.fromkeys(sequences, walk))
        return walk

    def __call__(self, ran: Sequence[StepResult]) -> list[Verdict]:
        parts: dict[Walk, list[StepResult]] = {}
        for one in ran:
            parts.setdefault(self._of[one.sequence], []).append(one)
        verdicts: dict[DecodingSequence, Verdict] = {}
        for walk, members in parts.items():
            verdicts.update(zip([one.sequence for one in members], walk(members), strict=True))
        return [verdicts[one.sequence] for one in ran]


def row_draws(draws: Sequence[Draw]) -> Draw:
    """Draws for rows that move together, each from its own source."""
    return lambda scores: torch.cat([draw(scores[row : row + 1]) for row, draw in enumerate(draws)])


def uniform_draw(seed: int, params: SamplingParams | None = None) -> Draw:
    """Draws for one row by inverse CDF, one uniform per output position: the same uniforms as a sequence's own.

    With `params` the scores go through their temperature, top-k, top-p and min-p first.
    """
    uniforms = random.Random(seed)

    def choose(scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.tensor([uniforms.random()], dtype=torch.float64, device=scores.device)
        return draw(distribution(scores, params or SamplingParams(temperature=1.0)), uniform)

    return choose
