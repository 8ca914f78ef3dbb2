"""Drawing for all nodes of a tree at once what `generate` would draw for one token after the other.

`torch.multinomial` of one sample divides the probabilities by exponential noise and takes the largest. The noise of an
output position depends on the generator alone, not on the text. So the noise of all positions that a tree reaches is
drawn first, every node's target follows from its own probabilities and its position's noise, and at the end the
generator is set to where it would stand after the accepted tokens. A step then waits for the device once, not once per
token. It is for processors that look at the scores alone; see `engine.processors` for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transformers.generation.logits_process as processors

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.engine.processors import PathVerifier, Reached, Rule
from lookahead.engine.request import StepResult

BY_SCORES = (
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper",
)  # fmt: skip
"""transformers' processors that look at each row of scores by itself, and neither at the text nor at its length."""
Draw = Callable[[torch.Tensor], torch.Tensor]


def by_scores(logits_processor: Sequence[object]) -> bool:
    """True when all of these processors look at the scores alone."""
    known = {getattr(processors, name, None) for name in BY_SCORES}
    return all(type(processor) in known for processor in logits_processor)


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

    Sequences end by their own stop rules; `rule.criteria` is not asked.
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
        self._targets: dict[int, dict[int, int]] = {}  # entry -> node -> target
        self._states: list[torch.Tensor] = []  # the generator's, before each position's draw
        self._columns: list[list[int]] = []

    @torch.no_grad()
    def _begin(self, results: Sequence[StepResult]) -> None:
        # 1. The rows that matter: the root and the guesses of every entry, with their depths.
        nodes, depths, rows = list[tuple[int, int]](), list[int](), list[torch.Tensor]()
        for result in results:
            tree, entry = result.input.tree, self.entries[result.request.sequence]
            nodes += [(entry, 0), *((entry, guess) for guess in range(tree.branch, len(tree)))]
            depths += [0, *tree.depths[tree.branch :]]
            logits = result.output.logits
            rows += [logits[:1], logits[len(logits) - (len(tree) - tree.branch) :]]
        logits = torch.cat(rows).to(device=self.ids.device, dtype=torch.float32)
        ids = self.ids[:1].expand(len(nodes), -1)
        scores = logits if self.rule.processors is None else self.rule.processors(ids, logits)
        # 2. The noise of every position that the trees reach, as `torch.multinomial` would draw it.
        noise, self._states = [], []
        for _ in range(1 + max(depths)):
            self._states.append(self.generator.get_state())
            drawn = logits.new_empty(len(self.entries), logits.shape[-1])
            noise.append(drawn.exponential_(1, generator=self.generator))
        # 3. Every node's target.
        at = torch.tensor([(depth, entry) for (entry, _), depth in zip(nodes, depths, strict=True)])
        own = torch.stack(noise)[at[:, 0].to(logits.device), at[:, 1].to(logits.device)]
        targets = (scores.softmax(dim=-1) / own).argmax(dim=-1).tolist()
        self._targets = {entry: {} for entry, _ in nodes}
        for (entry, node), target in zip(nodes, targets, strict=True):
            self._targets[entry][node] = target
        self._columns = []

    def _choose(self, reached: Reached) -> list[int]:
        tokens = [self.rule.pad or 0] * len(self.entries)
        for entry, (_, node) in reached.items():
            tokens[entry] = self._targets[entry][node]
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
