"""Schedules the requests of a step: first-come, first-served admission, chunked prefill, and preemption.

A request is *decoding* when all its tokens but the last are cached. Otherwise it is *prefilling*: its prompt has to run
first, or what a shared prefix left of it, or its prompt and output again if it was preempted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from time import perf_counter

from lookahead.backends.base import NO_TREE, Backend
from lookahead.backends.exact import exact_limits
from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.prompts import prompt_chunk
from lookahead.engine.batch import ScheduledBatch, ScheduledRequest
from lookahead.engine.request import Request, Verifier
from lookahead.kv.slots import NoSlotError

LEAST_SHARED = 256
"""A prompt chunk is made shorter, so that others can share what is before its end, only if it still has this many
tokens: the rest of the prompt then takes a pass of its own."""
RETRY_STEPS = 64
"""Steps after which a request that did not fit is tried again even if no other has finished: running sequences free the
pages behind a sliding window, about one per 64 tokens."""


def most_sequences(backend: Backend, wanted: int) -> int:
    """How many of the wanted sequences may run at once: each needs a row of every pass, and a slot."""
    slots = backend.capabilities.most_sequences
    return min(wanted, backend.most_rows if slots is None else min(slots, backend.most_rows))


def is_plain(request: Request) -> bool:
    """Whether the backend alone can choose this request's tokens, from logits as they are."""
    sequence = request.sequence
    if request.verifier is not None or request.noise is not None or request.mask is not None:
        return False
    return not sequence.adjusts and sequence.sampling.logprobs is None


class Scheduler:
    """The requests of an engine, waiting or running, and their slots in the backend.

    `max_mixed_rows` is the maximum number of rows of a pass that mixes prompt chunks with decoding requests.
    """

    def __init__(self, backend: Backend, max_sequences: int, max_mixed_rows: int) -> None:
        for name, value in (("max_sequences", max_sequences), ("max_mixed_rows", max_mixed_rows)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.backend, self._max_mixed_rows = backend, max_mixed_rows
        self.max_sequences = most_sequences(backend, max_sequences)
        self.running: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self._retry_in = 0  # steps until the next request, which did not fit, is tried again
        self._steady: ScheduledBatch | None = None  # all running requests if they all decode, until that changes

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. One that already has a slot runs at once."""
        request.queued_at, request.inexact = perf_counter(), self._is_inexact(request)
        request.plain = is_plain(request)
        if request.inexact:  # exact requests must not share its K/V
            request.salt += " inexact"
        if request.slot < 0:
            self.waiting.append(request)
            return
        most = self.backend.most_rows
        if len(self.running) >= most:
            raise ValueError(
                f"{len(self.running) + 1} sequences at once need one row each, and a pass has {most}; use a "
                "smaller batch"
            )
        request.keeps_slot = True
        self._run(request)

    def _run(self, request: Request) -> None:
        """Let a request that has a slot run from the next step on."""
        self.running[request.id], self._steady = request, None

    def remove(self, request: Request) -> None:
        """Remove a request, and free its K/V."""
        self._retry_in, self._steady = 0, None
        if self.running.pop(request.id, None) is None:
            self.waiting.remove(request)
            return
        self.remember(request)
        self.backend.close(request.slot)

    def clear(self) -> None:
        """Forget all requests. Their K/V are freed elsewhere."""
        self.running.clear()
        self.waiting.clear()
        self._steady = None

    def preempt(self, request: Request) -> None:
        """Free a running request's K/V, and put it at the front of the queue. When it is admitted again,
        all its tokens are prefilled, and it continues."""
        self.remove(request)
        self.preemptions += 1
        request.slot, request.queued_at = -1, perf_counter()
        self.waiting.appendleft(request)

    def remember(self, request: Request) -> None:
        """Let later requests share the cached K/V of this one."""
        if not request.keeps_slot:
            self._retry_in = 0  # a request that shares them needs fewer pages
            self.backend.remember(request.slot, request.sequence.tokens[: self.backend.length(request.slot)])

    # A step.

    def schedule(self) -> list[ScheduledBatch]:
        """The batches of the next step, which include every decoding request."""
        self._retry_in = max(0, self._retry_in - 1)
        self._admit()
        if self._steady is not None:
            return [self._steady]
        decoding, prefilling, cached = list[Request](), list[Request](), self.backend.length
        for request in self.running.values():
            if len(request.sequence.tokens) - 1 == cached(request.slot) or self._runs_again(request):
                decoding.append(request)
            else:
                prefilling.append(request)
                if cached(request.slot) > request.cached:  # before its pages behind a window are freed
                    self.remember(request)
        if self.backend.capabilities.pads:  # each prompt runs alone
            batches = [ScheduledBatch([chunk]) for request in prefilling for chunk in self._prompt_chunks(request)]
            if decoding:
                batches.append(ScheduledBatch([self._decoding(request) for request in decoding]))
            return batches
        if not self.running:
            return []
        most = self.backend.most_rows
        if len({request.inexact for request in self.running.values()}) == 1:
            if not prefilling and self.backend.capabilities.branches:  # then a request that decodes continues to do so
                self._steady = self._decoding_batch([self._decoding(request) for request in decoding])
                self._steady.steady = True
                return [self._steady]
            return [self._mixed_batch(decoding, prefilling, most)]
        return [
            self._mixed_batch(
                [request for request in decoding if request.inexact is inexact],
                [request for request in prefilling if request.inexact is inexact],
                most,
            )
            for inexact in (False, True)
        ]

    def _runs_again(self, request: Request) -> bool:
        """Whether only accepted tokens of its last pass are not cached: a backend whose trees cannot branch keeps all
        of a pass or nothing."""
        sequence, cached = request.sequence, self.backend.length(request.slot)
        return (
            not self.backend.capabilities.branches
            and cached >= sequence.prompt_tokens - 1
            and len(sequence.tokens) - 1 - cached <= sequence.config.budget
        )

    def _decoding(self, request: Request) -> ScheduledRequest:
        if self.backend.capabilities.branches or not self._uncached(request):
            return ScheduledRequest(request, (), True, NO_TREE)
        chunk = self._next_chunk(request)
        chunk.runs_again = True
        return chunk

    def _is_inexact(self, request: Request) -> bool:
        """Whether its trees may be too large or too deep to be exact. Such a tree makes its whole pass inexact and
        leaves inexact K/V, so these requests run in batches of their own and share no K/V with others."""
        config = request.sequence.config
        return not config.exact and not config.is_within(*exact_limits(self.backend))

    def _admit(self) -> None:
        """Admit waiting requests in order, while the backend has room for the next one's tokens and one step."""
        while self.waiting and len(self.running) < self.max_sequences and not (self._retry_in and self.running):
            request = self.waiting[0]
            tokens = request.sequence.tokens
            try:
                request.slot = self.backend.open(tokens, request.salt)
            except (DeviceMemoryError, NoSlotError):  # others may use the backend, too
                if not self.running or self.backend.capabilities.ranks > 1:
                    raise
                self._retry_in = RETRY_STEPS
                return
            if not self.backend.reserve(request.slot, len(tokens) + request.sequence.config.budget) and self.running:
                self.backend.close(request.slot)
                request.slot, self._retry_in = -1, RETRY_STEPS
                return
            self._run(self.waiting.popleft())
            request.cached = self.backend.length(request.slot)
            request.sequence.stats.queue_seconds += perf_counter() - request.queued_at

    def _mixed_batch(self, decoding: list[Request], prefilling: list[Request], rows: int) -> ScheduledBatch:
        """One pass of at most `rows` tokens: the trees of decoding requests, and prompt chunks beside them.

        If nothing is decoding, prompts get all rows. Otherwise they get half of the rows, or what the roots leave if
        that is less; draft tokens get the rest.
        """
        most_nodes = self.backend.most_nodes
        if not prefilling:
            return self._decoding_batch([self._decoding(request) for request in decoding])
        blocked = self._blocked_verifiers(prefilling)
        requests = [self._decoding(request) for request in decoding if request.verifier not in blocked]
        if requests:
            rows = min(rows, max(self._max_mixed_rows, 2 * len(requests)))
        prompt_rows = rows - max(len(requests), rows // 2) if requests else rows
        waiting = deque(prefilling)
        while waiting and waiting[0].verifier not in blocked and self._fits(waiting[0], prompt_rows):
            requests.append(self._next_chunk(waiting.popleft()))
            prompt_rows -= len(requests[-1].chunk) + 1
        prompt_rows = min(prompt_rows, sum([self._uncached(request) + 1 for request in waiting]))
        tree_tokens = rows - prompt_rows - sum([len(scheduled.chunk) for scheduled in requests])
        if most_nodes is not None:  # every prompt may reach its root
            tree_tokens = min(tree_tokens, max(len(requests), most_nodes - len(waiting)))
        return ScheduledBatch(requests, tree_tokens, list(waiting), rows)

    def _decoding_batch(self, requests: list[ScheduledRequest]) -> ScheduledBatch:
        """One pass of requests that all decode."""
        rows, nodes = self.backend.most_rows, self.backend.most_nodes
        return ScheduledBatch(requests, rows if nodes is None else min(rows, max(len(requests), nodes)), [], rows)

    def fill_with_chunks(self, batch: ScheduledBatch) -> None:
        """Fill the rows that the trees leave with prompt chunks. A prompt's last chunk has a bare root as its tree."""
        if not batch.prefilling:
            return
        blocked = self._blocked_verifiers(batch.prefilling)
        rows = batch.rows - sum(len(scheduled.chunk) + len(scheduled.tree) for scheduled in batch.requests)
        for request in batch.prefilling:
            if rows < 1:
                return
            scheduled = self._next_chunk(request, rows)
            whole = len(scheduled.chunk) == self._uncached(request) < rows
            scheduled.is_last_chunk = whole and request.verifier not in blocked
            if scheduled.is_last_chunk:
                scheduled.tree = request.sequence.bare_root()
            rows -= len(scheduled.chunk) + len(scheduled.tree)
            batch.keep([*batch.requests, scheduled])

    def _blocked_verifiers(self, prefilling: Iterable[Request]) -> set[Verifier | None]:
        """Verifiers shared by several requests, one of which is still prefilling: these requests must step together."""
        if all(request.verifier is None for request in prefilling):
            return set()
        users = Counter(request.verifier for request in self.running.values())
        del users[None]
        return {request.verifier for request in prefilling if users[request.verifier] > 1}

    def _uncached(self, request: Request) -> int:
        return len(request.sequence.tokens) - 1 - self.backend.length(request.slot)

    def _prompt_chunks(self, request: Request) -> list[ScheduledRequest]:
        """The whole prompt of a request in chunks, of which the last has a tree."""
        prompt, size = self._next_chunk(request).chunk, prompt_chunk(self.backend)
        starts = range(0, len(prompt), size)
        return [
            ScheduledRequest(request, prompt[start : start + size], is_last_chunk=start + size >= len(prompt))
            for start in starts
        ]

    def _next_chunk(self, request: Request, most: int | None = None) -> ScheduledRequest:
        start, end = self.backend.length(request.slot), len(request.sequence.tokens) - 1
        if most is not None:
            end = min(end, start + most)
            end = self._shared_end(start, end) or end
        return ScheduledRequest(request, request.sequence.tokens[start:end])

    def _fits(self, request: Request, rows: int) -> bool:
        """Whether the rest of a prompt runs at once in fewer than these rows."""
        start, end = self.backend.length(request.slot), len(request.sequence.tokens) - 1
        return end - start < rows and self._shared_end(start, end) in (None, end)

    def _shared_end(self, start: int, end: int) -> int | None:
        """Where the chunk from `start` to `end` of a prompt should end, so that later requests can begin there; None if
        that makes no difference, or would not save them much."""
        page = self.backend.capabilities.shares_at
        if page is None or end // page * page - start < LEAST_SHARED:
            return None
        return end // page * page

    # K/V room.

    def reserve_room(self, batches: Sequence[ScheduledBatch]) -> None:
        """Reserve K/V room for every scheduled request. If there is too little, the trees become bare roots; if that is
        not enough, the youngest requests are preempted."""
        while not all(map(self._reserve, batches)):
            with_drafts = [scheduled for batch in batches for scheduled in batch.requests if len(scheduled.tree) > 1]
            for scheduled in with_drafts:
                scheduled.tree = scheduled.request.sequence.bare_root()
            if not with_drafts:
                youngest = self._youngest()
                for batch in batches:
                    batch.keep([scheduled for scheduled in batch.requests if scheduled.request is not youngest])
                self.preempt(youngest)

    def _reserve(self, batch: ScheduledBatch) -> bool:
        """Reserve room for all tokens and trees, from the first chunk on, so that no prompt gets stuck half-way."""
        reserve = self.backend.reserve
        for scheduled in batch.requests:
            request = scheduled.request
            if not reserve(request.slot, len(request.sequence.tokens) - 1 + (scheduled.tree.size or 1)):
                return False
        return True

    def _youngest(self) -> Request:
        preemptible = [request for request in self.running.values() if not request.keeps_slot]
        if not preemptible or len(self.running) == 1:
            raise MemoryError(
                f"the backend has no room for the K/V of {len(self.running)} sequences, and none of them can be "
                "preempted; use a smaller batch or fewer tokens"
            )
        return preemptible[-1]
