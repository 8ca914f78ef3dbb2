"""Sample all nodes of a tree at once with the draws that `generate` makes token by token.

`torch.multinomial` of one sample divides the probabilities by exponential noise and takes the largest. The noise of an
output position depends only on the generator, not on the text. So the noise of several positions is drawn first, every
node's target follows from its probabilities and its position's noise, and finally the generator's state is set to that
after the accepted tokens. A step then syncs with the device once or twice, not once per token. This is for processors
that use only the scores; see `engine.processors` for the others.
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
"""transformers' processors that use only each row of scores, neither the text nor its length."""
FUSED_WARPERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")
"""Those that the graph backend applies itself, in the order of `generate`."""
LEVELS = 4
"""Tree depths whose targets are sampled at once."""


def by_scores(logits_processor: Sequence[object]) -> bool:
    """Whether all of these processors use only the scores."""
    known = {getattr(processors, name, None) for name in BY_SCORES}
    return all(type(processor) in known for processor in logits_processor)


def multinomial_sampling(logits_processor: Sequence[Any]) -> SamplingParams | None:
    """The sampling parameters of these processors if the graph backend can apply them, else None."""
    known = [getattr(processors, name, None) for name in FUSED_WARPERS]
    order = [known.index(type(one)) if type(one) in known else -1 for one in logits_processor]
    if -1 in order or order != sorted(set(order)):
        return None
    if any(getattr(one, "filter_value", -math.inf) != -math.inf for one in logits_processor):
        return None
    if any(getattr(one, "min_tokens_to_keep", 1) != 1 for one in logits_processor):
        return None
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {names[i]: getattr(one, names[i]) for i, one in zip(order, logits_processor, strict=True)}
    return SamplingParams(**{"temperature": 1.0, **given})


def multinomial(generator: torch.Generator | None) -> Draw:
    """Sample as `generate` does, so that the same `torch.manual_seed` gives the same tokens."""
    return lambda scores: torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=generator).squeeze(1)


def generator_of(device: torch.device) -> torch.Generator:
    """torch's default generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class TreeSampler(PathVerifier):
    """Verifies sampled sequences that advance in lockstep, with `rule.processors` that use only the scores.

    Targets are sampled for `LEVELS` depths of the trees at a time, which suffice for most steps. Sequences end by their
    own stop rules; `rule.criteria` is not used.
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
        self._targets: dict[tuple[int, int], int] = {}  # by batch index and node
        self._states: list[torch.Tensor] = []  # the generator's, before each position's draw
        self._columns: list[list[int]] = []

    def _begin(self, results: Sequence[StepResult]) -> None:
        self._results, self._targets, self._states, self._columns = results, {}, [], []

    @torch.no_grad()
    def _draw(self) -> None:
        """Sample the targets of the next depths of every tree."""
        # 1. The nodes of these depths: the root, or guesses. Their logits are the last rows of a tree.
        first = len(self._states)
        nodes, rows, noise_rows, count = list[tuple[int, int]](), list[int](), list[int](), 0
        for result in self._results:
            tree, batch_index = result.input.tree, self.batch_indices[result.request.sequence]
            for node in (0, *range(tree.branch, len(tree))):
                depth = tree.depths[node]
                if first <= depth < first + LEVELS:
                    nodes.append((batch_index, node))
                    rows.append(count + tree.needed_index(node))
                    noise_rows.append((depth - first) * len(self.batch_indices) + batch_index)
            count += len(result.output.logits)
        # 2. The noise of their positions, as `torch.multinomial` would draw it.
        outputs = [result.output.logits for result in self._results]
        logits = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        at = torch.tensor([rows, noise_rows], device=logits.device)
        shape = len(self.batch_indices), logits.shape[-1]
        noise = torch.empty(1 + max(noise_rows) // len(self.batch_indices), *shape, device=self.ids.device)
        for row in noise:
            self._states.append(self.generator.get_state())
            row.exponential_(1, generator=self.generator)
        # 3. Every node's target.
        scores = logits[at[0]].to(device=self.ids.device, dtype=torch.float32)
        if self.rule.processors is not None:
            scores = self.rule.processors(self.ids[:1].expand(len(nodes), -1), scores)
        own = noise.flatten(0, 1)[at[1].to(self.ids.device)]
        targets = (scores.softmax(dim=-1) / own).argmax(dim=-1).tolist()
        self._targets |= dict(zip(nodes, targets, strict=True))

    def _choose_tokens(self, reached: Reached) -> list[int]:
        if len(self._columns) == len(self._states):  # this depth has no targets yet
            self._draw()
        tokens = [self.rule.pad or 0] * len(self.batch_indices)
        for batch_index, (_, node) in reached.items():
            tokens[batch_index] = self._targets[batch_index, node]
        return tokens

    def _append(self, tokens: Sequence[int]) -> None:
        self._columns.append(list(tokens))

    def _ended(self) -> list[bool]:
        return [False] * len(self.batch_indices)

    def _end(self) -> None:
        """Set the generator's state to that after one draw per token, and append the tokens to the text."""
        if len(self._columns) < len(self._states):
            self.generator.set_state(self._states[len(self._columns)])
        self.ids = torch.cat([self.ids, torch.tensor(self._columns, device=self.ids.device).T], dim=1)
        self._results = ()


class StepNoise:
    """One sequence's draws inside the steps of the graph backend: an `engine.request.Noise`.

    The noise of an output position is in row (position modulo the number of rows) of the backend's noise. It is drawn
    before a tree first reaches the position, in order of positions, as `torch.multinomial` would draw it.
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
        self._first = 0  # output position of the last tree's root

    def rows(self, tree: TokenTree) -> list[int]:
        first, count, guesses = self.sequence.stats.generated_tokens, len(self._noise), tree.depths[tree.branch :]
        self._first = first
        self._draw_to(first + max(guesses, default=0))
        window = [-1] * (len(tree.needed) - 1 - len(guesses))
        return [first % count, *window, *[(first + depth) % count for depth in guesses]]

    def draw_ahead(self) -> None:
        """Fill all rows but those of the last tree, whose step may not have begun."""
        self._draw_to(self._first + len(self._noise) - 1)

    @torch.no_grad()
    def _draw_to(self, position: int) -> None:
        """Draw the noise of all positions up to this one that have none yet."""
        while len(self._states) <= position:
            row = len(self._states) % len(self._noise)
            self._states.append(self.generator.get_state())
            self._noise[row : row + 1].exponential_(1, generator=self.generator)

    def end(self) -> None:
        """Set the generator's state to that after one draw per token."""
        drawn = self.sequence.stats.generated_tokens
        if drawn < len(self._states):
            self.generator.set_state(self._states[drawn])
