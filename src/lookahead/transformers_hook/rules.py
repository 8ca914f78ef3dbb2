"""How the sequences of a batch choose tokens and end, and whether they advance independently.

Sequences that accept different numbers of tokens per step diverge in length. `generate` calls processors and stopping
criteria with the full batch at one length, and a user's own may compare sequences. So sequences advance independently
only if every processor and criterion is known to treat each by itself. Otherwise they advance in lockstep: a step gives
each as many tokens as the slowest accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers.generation.logits_process as processors
import transformers.generation.stopping_criteria as criteria

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.engine.processors import PathVerifier, Rule, joint_draw, uniform_draw
from lookahead.transformers_hook import draws

PER_SEQUENCE = (
    "ExponentialDecayLengthPenalty", "EpsilonLogitsWarper", "EtaLogitsWarper", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
)  # fmt: skip
"""transformers' processors that treat each sequence by itself and keep no state between calls."""


@dataclass
class BatchRules:
    """How the sequences of one `generate` call choose tokens and end.

    `rule` maps logits to tokens and ends. `together`: the sequences advance in lockstep. `plain`: only argmax, EOS
    tokens and a length limit, so that the backend chooses the tokens and each sequence ends by itself, without `rule`.
    `by_scores`: the same, but sampled from torch's generator, so that a tree's targets can be sampled at once
    (`draws`). `seed`: sequence i samples from a generator seeded with `seed + i`.
    """

    rule: Rule
    together: bool
    plain: bool
    max_length: int
    eos_ids: frozenset[int]
    pad: int
    seed: int | None
    by_scores: bool = False
    generator: torch.Generator | None = None
    _verifiers: list[PathVerifier] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        logits_processor: Any,
        stopping_criteria: Any,
        config: Any,
        batch_size: int,
        generator: torch.Generator | None,
        seed: int | None,
        in_step: bool,
    ) -> BatchRules:
        """The rules of a call. `config` is its GenerationConfig, from which `generate` made processors and criteria.

        `in_step`: the sequences must advance in lockstep regardless of the processors, as for a streamer.
        """
        if generator is not None and seed is not None:
            raise ValueError(f"seed={seed} and a generator are two random sources; leave one of them out")
        has_eos = any(hasattr(rule, "eos_token_id") for rule in stopping_criteria)
        pad = config._pad_token_tensor
        usual = (criteria.EosTokenCriteria, criteria.MaxLengthCriteria)
        rule = Rule(
            processors=logits_processor if len(logits_processor) else None,
            draw=draws.multinomial(generator) if config.do_sample else None,
            criteria=stopping_criteria,
            pad=int(pad) if has_eos and pad is not None else None,
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        )
        per_sequence = {getattr(processors, name, None) for name in PER_SEQUENCE}
        plain = not rule.wants_logits and all(type(c) in usual for c in stopping_criteria)
        by_scores = (
            bool(config.do_sample)
            and seed is None
            and draws.by_scores(logits_processor)
            and all(type(c) in usual for c in stopping_criteria)
            and not (rule.keep_scores or rule.keep_logits)
            and (rule.pad is not None or not has_eos)
        )
        ends = [c.eos_token_id for c in stopping_criteria if type(c) is criteria.EosTokenCriteria]
        limits = [c.max_length for c in stopping_criteria if type(c) is criteria.MaxLengthCriteria]
        return cls(
            rule=rule,
            together=batch_size > 1
            and (
                in_step
                or (rule.draw is not None and seed is None)
                or not all(type(p) in per_sequence for p in logits_processor)
                or not all(type(c) in (*usual, criteria.StopStringCriteria) for c in stopping_criteria)
                or (rule.pad is None and not all(type(c) in usual for c in stopping_criteria))
            ),
            plain=plain,
            max_length=min(limits, default=config.max_length),
            eos_ids=frozenset(int(i) for ids in ends for i in ids.flatten()) if plain or by_scores else frozenset(),
            pad=0 if pad is None else int(pad),
            seed=seed if config.do_sample else None,
            by_scores=by_scores,
            generator=generator,
        )

    def verifiers(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor) -> Sequence[PathVerifier | None]:
        """Each sequence's verifier, or None if the sequence needs none. `ids` [B, L] is the prompt."""
        if self.plain and not self.together:
            return [None] * len(sequences)
        if self.by_scores:
            self._verifiers = [draws.TreeSampler(sequences, ids, self.rule, self.generator)]
            return self._verifiers * len(sequences)
        rules = [self.rule] * len(sequences)
        if self.seed is not None:
            rules = [
                replace(self.rule, draw=uniform_draw(self.seed + batch_index)) for batch_index in range(len(sequences))
            ]
        if self.together:
            own = [rule.draw for rule in rules if rule.draw is not None]
            rule = self.rule if self.seed is None else replace(self.rule, draw=joint_draw(own))
            self._verifiers = [PathVerifier(sequences, ids, rule)]
            return self._verifiers * len(sequences)
        for batch_index, (sequence, rule) in enumerate(zip(sequences, rules, strict=True)):
            self._verifiers.append(PathVerifier([sequence], ids[batch_index : batch_index + 1], rule))
        return self._verifiers

    def newest(self, count: int) -> torch.Tensor:
        """The last `count` tokens of sequences in lockstep, [B, count]."""
        return self._verifiers[0].ids[:, -count:]

    def output(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor) -> torch.Tensor:
        """Prompt and output, [B, L + longest output], right-padded."""
        if self.together:
            return self._verifiers[0].ids
        longest = max(sequence.stats.generated_tokens for sequence in sequences)
        padded = [s.output + [self.pad] * (longest - s.stats.generated_tokens) for s in sequences]
        return torch.cat([ids, torch.tensor(padded, dtype=torch.long, device=ids.device)], dim=1)

    def kept(self, name: str) -> tuple[torch.Tensor, ...]:
        """The 'scores' or 'logits': one [B, V] tensor per output position; zeros for sequences that have ended."""
        found: list[list[torch.Tensor]] = [getattr(verifier, name) for verifier in self._verifiers]
        if len(found) == 1:
            return tuple(found[0])
        longest, ended = max(map(len, found)), torch.zeros_like(found[0][0])
        return tuple(torch.cat([one[i] if i < len(one) else ended for one in found]) for i in range(longest))
