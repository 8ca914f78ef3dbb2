"""Lookahead parallelism (the paper's section 3.4) as a backend, transparent to the engine and the sequences.

Every rank runs the same engine on the same sequences, so all ranks propose the same tree. A step partitions the tree
(`partition_tree`), runs this rank's share on the inner backend, and exchanges the targets and top tokens of all shares
in one fixed-size tensor. Each rank reads all results from that tensor, its own too, so ranks cannot diverge.

A rank lacks the keys and values of accepted tokens that only another rank has computed. Sending them would take, for a
7B model in half precision, 32 layers x 2 x 4096 x 2 bytes = 0.5 MB per token, in a second collective that has to wait
for the first. Instead the rank recomputes these tokens with its next share, as a chain above the root. That needs no
communication, and adds one or two tokens to a pass of dozens (`Counters.caught_up`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import Backend, CacheUse, Layers, StepInput
from lookahead.backends.failures import DeviceMemoryError
from lookahead.parallel.group import Group, Numbers
from lookahead.parallel.partition import Share, partition_tree
from lookahead.parallel.results import HEADER, SharedStep, len_top, pack, unpack
from lookahead.parallel.watchdog import RankError


@dataclass
class Counters:
    """Totals over all steps since `ParallelBackend.reset`, without the prompt.

    `tree_tokens` counts the tokens of a single-rank run, `tokens[r]` those that rank r ran; `caught_up[r]` of them
    had been accepted already, on another rank. `slowest` sums the largest share of each step. All of these are the same
    on every rank. `sent_bytes` and `exchange_seconds` are this rank's own, including the wait for slower ranks.
    """

    tokens: list[int]
    caught_up: list[int]
    steps: int = 0
    tree_tokens: int = 0
    slowest: int = 0
    collectives: int = 0
    sent_bytes: int = 0
    exchange_seconds: float = 0.0

    def summary(self) -> str:
        """One line of averages per step."""
        steps = max(1, self.steps)
        each = " ".join(f"{tokens / steps:.1f}" for tokens in self.tokens)
        return (
            f"{len(self.tokens)} ranks: {each} of {self.tree_tokens / steps:.1f} tokens per step, "
            f"{self.collectives / steps:.2f} collectives and {self.sent_bytes / steps:.0f} bytes per rank and step"
        )


@dataclass
class Slot:
    """A sequence's state, the same on all ranks. `path` holds the tokens of the last accepted path, of which rank r has
    not computed the last `lacks[r]`. Only `inner`, the slot in the inner backend, is this rank's own."""

    inner: int = field(repr=False)
    lacks: list[int]
    length: int = 0
    path: list[int] = field(default_factory=list)


class ParallelBackend:
    """A backend that runs its rank's share of every tree on the backend `inner`. All ranks make the same calls.

    Every exchange also carries one integer of rank 0: rank 0 sets `announced`, and all ranks read the value of the last
    exchange from `received`. `passes` counts forward passes, prompts included.
    """

    def __init__(self, inner: Backend, group: Group) -> None:
        self.inner, self.group = inner, group
        # Ranks exchange commands between two steps, so that none of them may begin a step early.
        self.capabilities = replace(
            inner.capabilities, overlaps=False, runs_ahead=False, draws_noise=False, ranks=group.size
        )
        self.model, self.device, self.dtype = inner.model, inner.device, inner.dtype
        self.vocab_size: int = inner.vocab_size
        self.max_length: int | None = inner.max_length
        # A rank may have to recompute the tokens that the last step accepted, at most as many as that step had.
        self.most_rows = inner.most_rows // 2
        self.most_nodes: int | None = inner.most_nodes
        self.announced = self.received = 0
        self.reset()
        self.passes = 0
        self._slots: dict[int, Slot] = {}
        self._opened = 0
        self._last: dict[int, tuple[StepInput, list[Share]]] = {}
        self._state = hashlib.blake2b(digest_size=16)

    @property
    def expert_reads(self) -> int:
        return self.inner.expert_reads

    @property
    def captures(self) -> int:
        return self.inner.captures

    def reset(self) -> None:
        """Reset the counters."""
        self.counters = Counters([0] * self.group.shares, [0] * self.group.shares)

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A slot of the inner backend, without prefix caching: the ranks may hold different tokens of an earlier
        sequence."""
        self._opened += 1
        self._slots[self._opened] = Slot(self.inner.open(), [0] * self.group.shares)
        return self._opened

    def close(self, slot: int) -> None:
        self.inner.close(self._slots.pop(slot).inner)
        self._last.pop(slot, None)

    def length(self, slot: int) -> int:
        """The cached length of a single-rank run, including tokens that this rank still lacks."""
        return self._slots[slot].length

    def reserve(self, slot: int, tokens: int) -> bool:
        return self.inner.reserve(self._slots[slot].inner, tokens)

    def holds(self) -> int | None:
        return self.inner.holds()

    def cache_use(self) -> CacheUse:
        """Cache use of this rank's pages."""
        return self.inner.cache_use()

    def reload_weights(self) -> None:
        """Every rank must call it, with the same weights."""
        self.inner.reload_weights()

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Does nothing: sequences share no prefix; see `open`."""

    def launch(self, inputs: Sequence[StepInput]) -> SharedStep:
        """Partition every tree and launch this rank's shares."""
        if any(step_input.logits for step_input in inputs):
            raise ValueError("ranks exchange tokens, not logits: logits processors need a model on one rank")
        if any(step_input.logprobs is not None for step_input in inputs):
            raise ValueError("ranks exchange tokens, not log-probabilities; request them on one rank")
        if self.group.check:
            self._compare(inputs)
        shares = [self._partition(step_input) for step_input in inputs]
        own = [self._own(step_input, share[self.group.share]) for step_input, share in zip(inputs, shares, strict=True)]
        with self.group.guarded(), self._own_slots():
            inner = self.inner.launch(own)
        self._count(inputs, shares)
        for step_input, share in zip(inputs, shares, strict=True):
            if len(step_input.tree):
                self._last[step_input.slot] = step_input, share
            else:
                self._slots[step_input.slot].length += len(step_input.chunk)
        return SharedStep(list(inputs), shares, inner)

    def collect(self, shared_step: SharedStep) -> list[StepOutput]:
        """Wait for this rank's shares, exchange results, and read those of all ranks."""
        with self.group.guarded():
            results = self.inner.collect(shared_step.inner)
        top = max(len_top(step_input, self.vocab_size) for step_input in shared_step.inputs)
        packed = pack(shared_step, results, self.group.share, self.passes, top)
        packed[HEADER - 1] = self.announced
        gathered = self._exchange(packed)
        self._check_headers(gathered[:, :HEADER])
        self.received = int(gathered[0, HEADER - 1])
        gathered = gathered[:: self.group.copies]  # one result per tensor-parallel group
        outputs = unpack(shared_step, gathered, top, self.vocab_size)
        if self.group.check:
            self._state.update(gathered.tobytes())
        return outputs

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Commit the part of the accepted paths that this rank computed. It recomputes the rest in the next step."""
        own = []
        for slot, path in accepted:
            state, (step_input, shares) = self._slots[slot], self._last.pop(slot)
            held = [share.local(path) for share in shares]
            state.length += len(step_input.chunk) + 1 + len(path)
            state.path = [step_input.tree.tokens[node] for node in path]
            state.lacks = [len(path) - len(local) for local in held]
            own.append((state.inner, held[self.group.share]))
        with self.group.guarded():
            self.inner.commit(own)

    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> Mapping[str, float]:
        return self.inner.prepare(tokens, budget, sequences)

    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        """Every rank gets the same K/V."""
        state = self._slots[slot]
        self.inner.adopt(state.inner, length, layers, offset)
        state.length = length

    def cached(self, slot: int) -> Layers:
        """This rank's K/V. Raises ValueError while it lacks accepted tokens that another rank computed."""
        state = self._slots[slot]
        if state.lacks[self.group.share]:
            raise ValueError("this rank has not computed the last accepted tokens; call this after the next step")
        return self.inner.cached(state.inner)

    def _partition(self, step_input: StepInput) -> list[Share]:
        """The ranks' shares of an input. A prompt chunk has no tree: every rank runs all of it."""
        if not len(step_input.tree):
            return [Share([], [])] * self.group.shares
        return partition_tree(step_input.tree, self.group.shares, self._slots[step_input.slot].lacks)

    def _own(self, step_input: StepInput, share: Share) -> StepInput:
        """This rank's share of an input: the tokens it lacks, its nodes, and the uniforms and masks of its needed
        nodes."""
        state = self._slots[step_input.slot]
        if not len(step_input.tree):
            return replace(step_input, slot=state.inner)
        lacks = state.lacks[self.group.share]
        uniforms: Sequence[float] = ()
        if step_input.uniforms:
            by_node = dict(zip(step_input.tree.needed, step_input.uniforms, strict=True))
            uniforms = [by_node[node] for node in share.needed or [0]]
        adjustment = step_input.adjustment
        if adjustment is not None and adjustment.mask is not None:
            index = {node: row for row, node in enumerate(step_input.tree.needed)}
            adjustment = replace(adjustment, mask=adjustment.mask[[index[node] for node in share.needed or [0]]])
        chunk = [*(state.path[-lacks:] if lacks else ()), *step_input.chunk]
        own = StepInput(state.inner, chunk, share.tree(step_input.tree), step_input.sampling, uniforms, step_input.top)
        own.adjustment, own.prompt_tokens = adjustment, step_input.prompt_tokens
        return own

    @contextmanager
    def _own_slots(self) -> Iterator[None]:
        """Let a DeviceMemoryError of the inner backend name the slot of this one."""
        try:
            yield
        except DeviceMemoryError as error:
            error.slot = next((slot for slot, state in self._slots.items() if state.inner == error.slot), None)
            raise

    def _count(self, inputs: Sequence[StepInput], shares: Sequence[Sequence[Share]]) -> None:
        counters = self.counters
        lacks = [self._slots[step_input.slot].lacks for step_input in inputs]
        again = [sum(column) for column in zip(*lacks, strict=True)]
        tokens = [sum(len(share.nodes) for share in column) for column in zip(*shares, strict=True)]
        self.passes += 1
        counters.steps += 1
        counters.tree_tokens += sum(len(step_input.tree) for step_input in inputs)
        counters.slowest += max(map(sum, zip(tokens, again, strict=True)))
        for rank, (fresh, old) in enumerate(zip(tokens, again, strict=True)):
            counters.tokens[rank] += fresh + old
            counters.caught_up[rank] += old

    # Consistency checks.

    def _check_headers(self, headers: Numbers) -> None:
        """Raise RankError unless every rank is at the same step with the same trees."""
        for rank, (step, checksum, *_) in enumerate(headers.tolist()):
            if (step, checksum) != (headers[0, 0], headers[0, 1]):
                what = f"is at step {step}" if step != headers[0, 0] else "has other trees"
                raise RankError(
                    f"rank {rank} {what} and rank 0 is at step {headers[0, 0]}: every rank must make the same calls"
                )

    def _compare(self, inputs: Sequence[StepInput]) -> None:
        """Debug mode: compare a hash of all exchanges so far and of the next step's inputs."""
        for step_input in inputs:
            self._state.update(repr((step_input, self._slots[step_input.slot])).encode())
        digest = np.frombuffer(self._state.digest(), dtype=np.int32).copy()
        hashes = self._exchange(digest)
        for rank, other in enumerate(hashes):
            if other.tobytes() != hashes[0].tobytes():
                step = self.passes + 1
                raise RankError(f"rank {rank} has another state than rank 0 before step {step}")

    def _exchange(self, numbers: Numbers) -> Numbers:
        begin = perf_counter()
        gathered = self.group.exchange(numbers)
        self.counters.exchange_seconds += perf_counter() - begin
        self.counters.collectives += 1
        self.counters.sent_bytes += numbers.nbytes
        return gathered
