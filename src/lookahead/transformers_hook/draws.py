"""Drawing for all nodes of a tree at once what `generate` would draw for one token after the other.

`torch.multinomial` of one sample divides the probabilities by exponential noise and takes the largest. The noise of an
output position depends on the generator alone, not on the text. So the noise of several positions is drawn first, every
node's target follows from its own probabilities and its position's noise, and at the end the generator is set to where
it would stand after the accepted tokens. A step then waits for the device once or twice, not once per token. It is for
processors that look at the scores alone; see `engine.processors` for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers.generation.logits_process as processors

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.config import SamplingParams
from lookahead.engine.processors import Draw, PathVerifier, Reached, Rule
from lookahead.engine.request import StepResult

BY_SCORES = (
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper",
)  # fmt: skip
"""transformers' processors that look at each row of scores by itself, and neither at the text nor at its length."""
RACED = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")
"""Those that the graph backend applies by itself, in the order in which `generate` applies them."""
LEVELS = 4
"""Depths of a tree whose targets are drawn at once."""


def by_scores(logits_processor: Sequence[object]) -> bool:
    """True when all of these processors look at the scores alone."""
    known = {getattr(processors, name, None) for name in BY_SCORES}
    return all(type(processor) in known for processor in logits_processor)


def multinomial_sampling(logits_processor: Sequence[Any]) -> SamplingParams | None:
    """The sampling that these processors ask for, if the graph backend can apply them by itself."""
    known = [getattr(processors, name, None) for name in RACED]
    places = [known.index(type(one)) if type(one) in known else -1 for one in logits_processor]
    if -1 in places or places != sorted(set(places)):
        return None
    if any(getattr(one, "filter_value", -math.inf) != -math.inf for one in logits_processor):
        return None
    if any(getattr(one, "min_tokens_to_keep", 1) != 1 for one in logits_processor):
        return None
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {names[place]: getattr(one, names[place]) for place, one in zip(places, logits_processor, strict=True)}
    return SamplingParams(**{"temperature": 1.0, **given})


def multinomial(generator: torch.Generator | None) -> Draw:
    """Draw as `generate` does, so that the same `torch.manual_seed` gives the same tokens."""
    return lambda scores: torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=generator).squeeze(1)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that torch uses on a device where none is given."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class TreeSampler(PathVerifier):
    """Verifies sampled sequences that move together, with `rule.processors` that look at the scores alone.

    Targets are drawn for `LEVELS` depths of the trees at a time: most steps are decided there. Sequences end by their
    own stop rules; `rule.criteria` is not asked.
    """

    def __init__(
        self,
        sequences: Sequence[DecodingSequence],
        ids: torch.Tensor,
        rule: Rule,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(sequences, ids, rule)
        self.generator = generator or generator_of(ids.device)
        self._results: Sequence[StepResult] = ()
        self._targets: dict[tuple[int, int], int] = {}  # by entry and node
        self._states: list[torch.Tensor] = []  # the generator's, before each position's draw
        self._columns: list[list[int]] = []

    def _begin(self, results: Sequence[StepResult]) -> None:
        self._results, self._targets, self._states, self._columns = results, {}, [], []

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw the targets of the next depths of every tree."""
        # 1. The nodes of these depths: the root, or guesses. Their logits' rows are the last ones of a tree's.
        first = len(self._states)
        nodes, rows, places, count = list[tuple[int, int]](), list[int](), list[int](), 0
        for result in self._results:
            tree, entry = result.input.tree, self.entries[result.request.sequence]
            for node in (0, *range(tree.branch, len(tree))):
                depth = tree.depths[node]
                if first <= depth < first + LEVELS:
                    nodes.append((entry, node))
                    rows.append(count + tree.place(node))
                    places.append((depth - first) * len(self.entries) + entry)
            count += len(result.output.logits)
        # 2. The noise of their positions, as `torch.multinomial` would draw it.
        parts = [result.output.logits for result in self._results]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        at = torch.tensor([rows, places], device=logits.device)
        shape = len(self.entries), logits.shape[-1]
        noise = torch.empty(1 + max(places) // len(self.entries), *shape, device=self.ids.device)
        for part in noise:
            self._states.append(self.generator.get_state())
            part.exponential_(1, generator=self.generator)
        # 3. Every node's target.
        scores = logits[at[0]].to(device=self.ids.device, dtype=torch.float32)
        if self.rule.processors is not None:
            scores = self.rule.processors(self.ids[:1].expand(len(nodes), -1), scores)
        own = noise.flatten(0, 1)[at[1].to(self.ids.device)]
        targets = (scores.softmax(dim=-1) / own).argmax(dim=-1).tolist()
        self._targets |= dict(zip(nodes, targets, strict=True))

    def _choose(self, reached: Reached) -> list[int]:
        if len(self._columns) == len(self._states):  # all have come to this depth
            self._draw()
        tokens = [self.rule.pad or 0] * len(self.entries)
        for entry, (_, node) in reached.items():
            tokens[entry] = self._targets[entry, node]
        return tokens

    def _append(self, tokens: Sequence[int]) -> None:
        self._columns.append(list(tokens))

    def _ended(self) -> list[bool]:
        return [False] * len(self.entries)

    def _end(self) -> None:
        """Set the generator to where it stands after as many draws as there were tokens, and add these to the text."""
        if len(self._columns) < len(self._states):
            self.generator.set_state(self._states[len(self._columns)])
        self.ids = torch.cat([self.ids, torch.tensor(self._columns, device=self.ids.device).T], dim=1)
        self._results = ()


class StepNoise:
    """One sequence's draws inside the steps of the graph backend: an `engine.request.Noise`.

    The noise of an output position stands in line (position modulo the number of lines) of the backend's noise. It is
    drawn before a tree first reaches the position, in the order of positions, as `torch.multinomial` would draw it.
    """

    def __init__(
        self,
        sequence: DecodingSequence,
        sampling: SamplingParams,
        noise: torch.Tensor,
        generator: torch.Generator | None,
    ) -> None:
        self.sequence, self.sampling, self._noise = sequence, sampling, noise
        self.generator = generator or generator_of(noise.device)
        self._states: list[torch.Tensor] = []  # the generator's, before each position's draw
        self._first = 0  # the position of the last tree's root's target

    def lines(self, tree: TokenTree) -> list[int]:
        first, count, guesses = self.sequence.stats.generated_tokens, len(self._noise), tree.depths[tree.branch :]
        self._first = first
        self._draw_to(first + max(guesses, default=0))
        window = [-1] * (len(tree.needed) - 1 - len(guesses))
        return [first % count, *window, *[(first + depth) % count for depth in guesses]]

    def draw_ahead(self) -> None:
        """Draw as far as there are lines without touching those of the last tree, whose step may not have begun."""
        self._draw_to(self._first + len(self._noise) - 1)

    @torch.no_grad()
    def _draw_to(self, position: int) -> None:
        """Draw the noise of all positions up to this one that have none yet."""
        while len(self._states) <= position:
            line = len(self._states) % len(self._noise)
            self._states.append(self.generator.get_state())
            self._noise[line : line + 1].exponential_(1, generator=self.generator)

    def end(self) -> None:
        """Set the generator to where it stands after as many draws as there were tokens."""
        drawn = self.sequence.stats.generated_tokens
        if drawn < len(self._states):
            self.generator.set_state(self._states[drawn])
