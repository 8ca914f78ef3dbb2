"""How the entries of a batch choose tokens and end, and whether each may run at its own pace.

Entries that accept different numbers of tokens in a step come to have different lengths. A processor or stopping
criterion is called with the whole batch, and `generate` calls it with all entries at one length; one that a user wrote
may compare two entries. So entries run at their own pace only if every processor and every criterion is known to look
at each entry by itself. Otherwise they move together: a step gives each of them as many tokens as the slowest accepted.
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

PER_ENTRY = (
    "ExponentialDecayLengthPenalty", "EpsilonLogitsWarper", "EtaLogitsWarper", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
)  # fmt: skip
"""transformers' processors that look at each batch entry by itself and remember nothing between calls."""


@dataclass
class BatchRules:
    """How the entries of one call of `generate` choose their tokens and end.

    `rule` takes logits to tokens to the end. `together`: the entries move together. `plain`: the call asks for argmax
    targets, end tokens and a length limit only, so that the backend can choose the tokens and each sequence can end by
    itself; then `rule` is not needed. `by_scores`: the same but for draws from torch's generator, so that a tree's
    targets can be drawn at once (`draws`). `seed`: entry i draws from a generator seeded with `seed + i`.
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
        entries: int,
        generator: torch.Generator | None,
        seed: int | None,
        in_step: bool,
    ) -> BatchRules:
        """The rules of a call. `config` is its GenerationConfig; `generate` made processors and criteria from it.

        `in_step`: the entries must move together whatever the processors are, as for a streamer.
        """
        if generator is not None and seed is not None:
            raise ValueError(f"seed={seed} and a generator are two sources to draw from; leave one of them out")
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
        per_entry = {getattr(processors, name, None) for name in PER_ENTRY}
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
            together=entries > 1
            and (
                in_step
                or (rule.draw is not None and seed is None)
                or not all(type(p) in per_entry for p in logits_processor)
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
        """What verifies each of these sequences: None where the sequence itself can.

        `ids` [B, L] is the prompt as given.
        """
        if self.plain and not self.together:
            return [None] * len(sequences)
        if self.by_scores:
            self._verifiers = [draws.TreeSampler(sequences, ids, self.rule, self.generator)]
            return self._verifiers * len(sequences)
        rules = [self.rule] * len(sequences)
        if self.seed is not None:
            rules = [replace(self.rule, draw=uniform_draw(self.seed + entry)) for entry in range(len(sequences))]
        if self.together:
            own = [rule.draw for rule in rules if rule.draw is not None]
            rule = self.rule if self.seed is None else replace(self.rule, draw=joint_draw(own))
            self._verifiers = [PathVerifier(sequences, ids, rule)]
            return self._verifiers * len(sequences)
        for entry, (sequence, rule) in enumerate(zip(sequences, rules, strict=True)):
            self._verifiers.append(PathVerifier([sequence], ids[entry : entry + 1], rule))
        return self._verifiers

    def newest(self, count: int) -> torch.Tensor:
        """The last `count` tokens of entries that move together, [B, count]."""
        return self._verifiers[0].ids[:, -count:]

    def output(self, sequences: Sequence[DecodingSequence], ids: torch.Tensor) -> torch.Tensor:
        """Prompt and output, [B, L + longest output]; shorter entries end in padding."""
        if self.together:
            return self._verifiers[0].ids
        longest = max(sequence.stats.generated_tokens for sequence in sequences)
        padded = [s.output + [self.pad] * (longest - s.stats.generated_tokens) for s in sequences]
        return torch.cat([ids, torch.tensor(padded, dtype=torch.long, device=ids.device)], dim=1)

    def kept(self, name: str) -> tuple[torch.Tensor, ...]:
        """The kept 'scores' or 'logits': one [B, V] tensor per output position; entries that have ended hold zeros."""
        parts: list[list[torch.Tensor]] = [getattr(verifier, name) for verifier in self._verifiers]
        if len(parts) == 1:
            return tuple(parts[0])
        longest, nothing = max(map(len, parts)), torch.zeros_like(parts[0][0])
        return tuple(torch.cat([part[i] if i < len(part) else nothing for part in parts]) for i in range(longest))
