"""Which rows of a batch may run at their own pace, and which rule they follow.

Rows that accept different numbers of tokens stand at different lengths. That is right only if nothing looks at two of
them at once. A processor or criterion of our users' may: it is called with the whole batch, in stock `generate` with
all rows at one length. So rows part only where every processor and criterion is known to look at each row by itself;
else they move together, and each step gives all of them as many tokens as the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers.generation.logits_process as processors
import transformers.generation.stopping_criteria as criteria

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.engine.processors import Draw, PathVerifier, Rule, joint_draw, uniform_draw

ROWWISE = (
    "ExponentialDecayLengthPenalty", "EpsilonLogitsWarper", "EtaLogitsWarper", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
)  # fmt: skip
"""Processors that look at each row by itself and remember nothing. Those of users are not known to."""


@dataclass
class Plan:
    """How one call of `generate` chooses tokens and ends: its rule, and who follows it together.

    With nothing but an end token and a length limit there is no rule to walk by: the backend picks, the sequence cuts.
    """

    rule: Rule
    together: bool
    plain: bool
    max_length: int
    eos_ids: frozenset[int]
    pad: int
    seed: int | None
    _verifiers: list[PathVerifier] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        logits_processor: Any,
        stopping_criteria: Any,
        config: Any,
        batch: int,
        generator: torch.Generator | None,
        seed: int | None,
        streaming: bool,
    ) -> Plan:
        """`config` is the call's GenerationConfig, the rest what `generate` made of it and of its arguments."""
        if generator is not None and seed is not None:
            raise ValueError(f"seed={seed} and a generator are two sources to draw from; leave one of them out")
        has_eos = any(hasattr(rule, "eos_token_id") for rule in stopping_criteria)
        pad = config._pad_token_tensor
        usual = (criteria.EosTokenCriteria, criteria.MaxLengthCriteria)
        rule = Rule(
            processors=logits_processor if len(logits_processor) else None,
            draw=multinomial(generator) if config.do_sample else None,
            criteria=stopping_criteria,
            pad=int(pad) if has_eos and pad is not None else None,
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        )
        rowwise = {getattr(processors, name, None) for name in ROWWISE}
        plain = not rule.wants_logits and all(type(c) in usual for c in stopping_criteria)
        ends = [c.eos_token_id for c in stopping_criteria if type(c) is criteria.EosTokenCriteria]
        limits = [c.max_length for c in stopping_criteria if type(c) is criteria.MaxLengthCriteria]
        return cls(
            rule=rule,
            together=batch > 1
            and (
                streaming
                or (rule.draw is not None and seed is None)
                or not all(type(p) in rowwise for p in logits_processor)
                or not all(type(c) in (*usual, criteria.StopStringCriteria) for c in stopping_criteria)
                or (rule.pad is None and not all(type(c) in usual for c in stopping_criteria))
            ),
            plain=plain,
            max_length=min(limits, default=config.max_length),
            eos_ids=frozenset(int(i) for ids in ends for i in ids.flatten()) if plain else frozenset(),
            pad=0 if pad is None else int(pad),
            seed=seed if config.do_sample else None,
        )

    def verifiers(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor) -> Sequence[PathVerifier | None]:
        """What verifies each of these sequences; `ids` [B, L] is the prompt as given."""
        if self.plain and not self.together:
            return [None] * len(sequences)
        rules = [self.rule] * len(sequences)
        if self.seed is not None:
            rules = [replace(self.rule, draw=uniform_draw(self.seed + entry)) for entry in range(len(sequences))]
        if self.together:
            draws = [rule.draw for rule in rules if rule.draw is not None]
            rule = self.rule if self.seed is None else replace(self.rule, draw=joint_draw(draws))
            self._verifiers = [PathVerifier(sequences, ids, rule)]
            return self._verifiers * len(sequences)
        for entry, (sequence, rule) in enumerate(zip(sequences, rules, strict=True)):
            self._verifiers.append(PathVerifier([sequence], ids[entry : entry + 1], rule))
        return self._verifiers

    def newest(self, count: int) -> torch.Tensor:
        """The last tokens of rows that move together, [B, count]."""
        return self._verifiers[0].ids[:, -count:]

    def output(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor) -> torch.Tensor:
        """Prompt and output, [B, L + longest output]; shorter rows end in padding."""
        if self.together:
            return self._verifiers[0].ids
        longest = max(sequence.stats.generated_tokens for sequence in sequences)
        rows = [s.output + [self.pad] * (longest - s.stats.generated_tokens) for s in sequences]
        return torch.cat([ids, torch.tensor(rows, dtype=torch.long, device=ids.device)], dim=1)

    def kept(self, name: str) -> tuple[torch.Tensor, ...]:
        """The kept scores or logits: one [B, V] tensor per output position."""
        parts: list[list[torch.Tensor]] = [getattr(verifier, name) for verifier in self._verifiers]
        if len(parts) == 1:
            return tuple(parts[0])
        longest, nothing = max(map(len, parts)), torch.zeros_like(parts[0][0])
        return tuple(torch.cat([part[i] if i < len(part) else nothing for part in parts]) for i in range(longest))


def multinomial(generator: torch.Generator | None) -> Draw:
    """Draws as `generate` makes them, so that the same `torch.manual_seed` gives the same tokens."""
    return lambda scores: torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=generator).squeeze(1)
