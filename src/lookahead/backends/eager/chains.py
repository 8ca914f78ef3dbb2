"""The backend of models whose trees cannot branch: a step is one chain of tokens, run in the model's own cache.

A recurrent layer has one state, and many attention layers take no mask of ours. But any model continues a text by
several tokens in one pass, as it does in a prompt that is run in chunks. So the tokens of a step are appended to the
cache that the model itself has made, and if a draft token is refused, the cache is what it was before the pass. Then
`length` is what it was, too, and the accepted tokens come again, as a prompt chunk in front of the next root: what is
run twice are rows of a pass, never a pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import sdpa_kernel
from transformers.cache_utils import DynamicCache

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.tree import below_chunk
from lookahead.backends.base import NO_LIMIT, CacheUse, Capabilities, Layers, StepInput
from lookahead.backends.eager.backend import KERNELS, PREFILL_CHUNK, Launched, PassOutput
from lookahead.backends.eager.cache_groups import CacheGroups, Group
from lookahead.backends.eager.cache_rows import can_join, copied, has_keys
from lookahead.backends.eager.reading import per_token, read_logits, shifted
from lookahead.backends.failures import memory_error
from lookahead.backends.support import check_supported, input_device
from lookahead.models.facts import context_length, refusal, tensor_parallel_ranks

CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""The names that models have for their cache, as an argument and in their output."""
RERUN_ROWS = 16
"""A longer prompt chunk in front of a chain runs in a pass of its own, so that it never runs twice."""


@dataclass(frozen=True)
class Uncommitted:
    """A slot's last step: its number of draft tokens, and its group before the step, if they may be refused."""

    drafted: int
    before: Group | None


class ChainBackend:
    """Runs chains in the model's own forward pass, with its own cache.

    Sequences whose steps have the same width run in one pass, if their caches can be joined: then they stay together,
    as the rows of a left-padded batch of `generate`. No padding ever goes through a recurrent layer. Other sequences
    run one after the other.
    """

    def __init__(self, model: Any, *, probed: bool = True, arguments: Mapping[str, Any] | None = None) -> None:
        """`arguments` and `outputs` are those of `EagerBackend`. `probed=False` skips the probe."""
        check_supported(model)
        self.model = model
        self.device = input_device(model)
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config(decoder=True)
        self.max_length = context_length(config, own_masks=True)
        self.vocab_size: int = config.vocab_size
        self.capabilities = Capabilities(
            "eager",
            kernels="chains",
            branches=False,
            pads=True,
            prompt_chunk=PREFILL_CHUNK,
            overlaps=self.device.type == "cuda",
            ranks=tensor_parallel_ranks(model),
        )
        self.most_rows = NO_LIMIT
        self.most_nodes: int | None = None
        self.captures = self.expert_reads = 0
        takes = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in CACHE_NAMES if name in takes), CACHE_NAMES[0])
        self._selects_logits = "logits_to_keep" in takes
        self._takes_positions = "position_ids" in takes
        self._arguments = dict(arguments or {})
        self._keeps_outputs = bool(self._arguments.get("output_hidden_states"))
        self.outputs: dict[int, PassOutput] = {}
        self.joins = True  # the probe may find that rows of a batch differ from single sequences
        self._groups = CacheGroups()
        self._length: dict[int, int] = {}
        self._offset: dict[int, Sequence[int]] = {}  # slot -> position of its first token, per axis
        self._last: dict[int, Uncommitted] = {}
        self._next_slot = 0
        if probed:
            from lookahead.backends.eager.chain_probe import probe_chains

            probe_chains(self)

    # Slots

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        slot = self._next_slot
        self._next_slot += 1
        self._length[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        del self._length[slot]
        self._groups.drop(slot)
        for held in (self._offset, self._last):
            held.pop(slot, None)

    def length(self, slot: int) -> int:
        return self._length[slot]

    def reserve(self, slot: int, tokens: int) -> bool:
        return True

    def holds(self) -> int | None:
        return None

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Nothing is shared between sequences here."""

    def cache_use(self) -> CacheUse:
        return CacheUse()

    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> Mapping[str, float]:
        """Nothing is captured here."""
        return {}

    def reload_weights(self) -> None:
        """Every pass reads them."""

    # A step

    @torch.inference_mode()
    def launch(self, inputs: Sequence[StepInput]) -> Launched:
        try:
            remaining = [self._without_long_chunk(sequence) for sequence in inputs]
            passes = [(batch, *self._forward(batch)) for batch in self._batches(remaining)]
        except torch.OutOfMemoryError as error:
            raise memory_error(error, f"a step of {len(inputs)} sequences", self.device) from error
        return Launched([sequence.slot for sequence in inputs], passes)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[StepOutput]:
        outputs: dict[int, StepOutput] = {}
        for batch, logits, indices in launched.passes:
            outputs.update(read_logits(batch, logits, indices))
        return [outputs.get(slot, StepOutput([])) for slot in launched.slots]

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep all tokens of the last step, or none: then the accepted ones have to run again."""
        for slot, path in accepted:
            last = self._last.pop(slot)
            if len(path) == last.drafted:
                continue
            self._length[slot] = 0
            self._groups.drop(slot)
            if last.before is not None:
                self._length[slot] = last.before.length_of(slot)
                self._groups.restore(slot, last.before)

    def _without_long_chunk(self, sequence: StepInput) -> StepInput:
        """The input without its prompt chunk, if that runs here: where it has no tree, and in front of a chain."""
        chunk, drafted = sequence.chunk, sequence.tree.size - 1
        if drafted == 0 or len(chunk) <= (RERUN_ROWS if drafted > 0 else 0):
            return sequence
        self.append([sequence.slot], np.asarray(chunk)[None], [len(chunk) - 1])
        return replace(sequence, chunk=())

    def _batches(self, inputs: Sequence[StepInput]) -> list[list[StepInput]]:
        """The inputs of each forward pass: of equal width, with caches that can be joined, or a single one. Rows of one
        cache that cannot be joined again run together while all of them do."""
        batches: dict[Any, list[StepInput]] = {}
        for sequence in inputs:
            group, width = self._groups.of(sequence.slot), len(sequence.chunk) + sequence.tree.size
            if not sequence.tree.size:
                continue
            if group is None:
                batches[sequence.slot] = [sequence]
            else:
                batches.setdefault((width, 0 if self._can_join(group) else id(group)), []).append(sequence)
        found = []
        for batch in batches.values():
            group = self._groups.of(batch[0].slot)
            whole = group is None or self._can_join(group) or [one.slot for one in batch] == group.slots
            found += [batch] if whole else [[one] for one in batch]
        return found

    def _can_join(self, group: Group) -> bool:
        """Whether hidden positions before its first token change nothing. A model that counts cached positions itself
        counts these, too."""
        return self.joins and can_join(group.cache) and (self._takes_positions or not has_keys(group.cache))

    def _forward(self, inputs: list[StepInput]) -> tuple[torch.Tensor, list[int]]:
        """Run one batch of equal widths. Returns logits [B, R, V] at every index that one of its inputs needs, and
        these R indices."""
        chains = [below_chunk(sequence.chunk, sequence.tree) for sequence in inputs]
        needed: set[int] = set()
        for chain in chains:
            if chain.parents.tolist() != list(range(-1, chain.size - 1)):
                raise ValueError("trees cannot branch on this backend")
            needed.update(chain.needed)
        indices, slots = sorted(needed), [sequence.slot for sequence in inputs]
        lengths = [self._length[slot] for slot in slots]
        drafts = max(sequence.tree.size for sequence in inputs) > 1
        before = self._groups.gather(slots)
        if drafts and before is not None:
            self._groups.put(Group(copied(before.cache), before.mask, slots))
        output = self.append(slots, np.asarray([chain.tokens for chain in chains]), indices)
        for index, sequence in enumerate(inputs):
            self._last[sequence.slot] = Uncommitted(sequence.tree.size - 1, before)
            if self._keeps_outputs:
                chunk = len(sequence.chunk)
                self.outputs[sequence.slot] = PassOutput(output, index, chunk, lengths[index], lengths[index])
        logits: torch.Tensor = output.logits
        return logits if self._selects_logits else logits[:, indices], indices

    @torch.inference_mode()
    def append(self, slots: list[int], tokens: np.ndarray[Any, Any], indices: list[int]) -> Any:
        """Run tokens [B, T] after the texts of these slots, whose caches change. Returns the model's output, with
        logits at these indices at least."""
        group = self._groups.gather(slots)
        old = torch.ones(len(slots), 0, dtype=torch.bool) if group is None else group.mask
        mask = torch.cat([old, torch.ones(tokens.shape, dtype=torch.bool)], dim=1)
        kwargs = {name: per_token(value, tokens.shape, self.device) for name, value in self._arguments.items()}
        if group is not None:
            kwargs[self.cache_name] = group.cache
        if not mask.all():
            kwargs["attention_mask"] = mask.long().to(self.device)
        if self._takes_positions:
            positions = np.asarray([self._length[slot] for slot in slots])[:, None] + np.arange(tokens.shape[1])
            moved = shifted(positions, [self._offset.get(slot) for slot in slots])
            kwargs["position_ids"] = torch.from_numpy(moved).to(self.device)
        if self._selects_logits:
            kwargs["logits_to_keep"] = torch.tensor(indices, device=self.device)
        with sdpa_kernel(KERNELS) if self.device.type == "cuda" else nullcontext():
            output = self.run(torch.from_numpy(tokens).to(self.device), kwargs)
        self._groups.put(Group(self.cache_of(output), mask, slots))
        for slot in slots:
            self._length[slot] += tokens.shape[1]
        return output

    def run(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """The model's output after tokens [B, T]. Without a cache in `kwargs`, the model makes one."""
        output = self.model(input_ids=ids, use_cache=True, **kwargs)
        if self.cache_name not in kwargs and self.cache_of(output) is None:  # it takes a cache but creates none
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            output = self.model(input_ids=ids, use_cache=True, **{**kwargs, self.cache_name: cache})
        if self.cache_of(output) is None:
            raise refusal(self.model, "it returns no cache")
        return output

    def cache_of(self, output: Any) -> Any:
        """The cache in an output of the model."""
        return getattr(output, self.cache_name, None)

    # Importing and exporting caches

    @torch.inference_mode()
    def adopt_cache(
        self, slots: Sequence[int], cache: Any, mask: torch.Tensor, offsets: Sequence[Sequence[int]]
    ) -> None:
        """Fill slots with the rows of a cache that the model has made. It is not changed.

        `mask` [B, T] is True for tokens and False for padding, and `offsets` are as in `adopt`.
        """
        self._groups.put(Group(copied(cache), mask.bool().cpu(), list(slots)))
        for slot, length, offset in zip(slots, mask.sum(dim=-1).tolist(), offsets, strict=True):
            self._length[slot], self._offset[slot] = length, offset

    @torch.inference_mode()
    def cache_of_rows(self, slots: Sequence[int]) -> Any:
        """The cache of these slots. Further steps do not change it."""
        group = self._groups.gather(list(slots))
        return None if group is None else copied(group.cache)

    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        raise NotImplementedError("keys and values are not all that this model caches; use `adopt_cache`")

    def cached(self, slot: int) -> Layers:
        raise NotImplementedError("keys and values are not all that this model caches; use `own_cache`")
