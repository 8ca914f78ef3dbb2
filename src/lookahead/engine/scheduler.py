"""Who takes part in a step: admission, first come first served; prompts in pieces beside decoding requests; and room.

A request is *decoding* when all its tokens but the last are cached. Otherwise its *rest* has to run first: its prompt,
what a shared prefix left of it, or all its text if it had been put back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import NO_TREE, Backend
from lookahead.backends.exact import exact_limits
from lookahead.backends.prompts import prompt_chunk
from lookahead.engine.request import Request, Verifier

RETRY_STEPS = 64
"""Steps after which a request that found no room is tried again although none has left: sequences give pages behind a
sliding window back while they go on, about one for every 64 tokens."""


@dataclass(slots=True)
class Part:
    """One request's part of a pass: its prompt chunk, whose tokens are not cached yet, then its tree.

    A part that is not `whole` ends before the text does, and has no tree.
    """

    request: Request
    chunk: Sequence[int] = ()
    whole: bool = True
    tree: TokenTree = field(default_factory=lambda: NO_TREE)


@dataclass(slots=True)
class Pass:
    """The parts of one forward pass. Their trees may have `limit` tokens together; None: any number.

    The requests in `waiting` take what the trees leave of the pass's `rows` (see `Scheduler.fill`). `propose_seconds`
    is how long each of its trees took to propose.
    """

    parts: list[Part]
    limit: int | None = None
    waiting: list[Request] = field(default_factory=list)
    rows: int = 0
    propose_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens the parts have together."""
        return sum([len(part.chunk) + part.tree.size for part in self.parts])

    def rows_run(self, *, pads: bool) -> int:
        """How many rows the backend runs for these tokens: where it `pads`, each part has as many as the longest."""
        if not pads:
            return self.tokens
        return len(self.parts) * max([len(part.chunk) + part.tree.size for part in self.parts])


class Scheduler:
    """The requests of an engine, waiting or running, and their slots in the backend.

    `most_beside`: a pass in which prompts run beside decoding requests has at most so many rows.
    """

    def __init__(self, backend: Backend, max_sequences: int, most_beside: int) -> None:
        for name, value in (("max_sequences", max_sequences), ("most_beside", most_beside)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.backend, self._most_beside = backend, most_beside
        self.max_sequences = min(max_sequences, backend.most_rows)
        self.running: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self._full = 0  # the next request found no room: for how many steps it is not tried again

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. One that comes with a slot runs at once."""
        request.queued = perf_counter()
        if self._is_inexact(request):  # exact requests must not share its K/V
            request.salt += " inexact"
        if request.slot < 0:
            self.waiting.append(request)
            return
        most = self.backend.most_rows
        if len(self.running) >= most:
            raise ValueError(
                f"{len(self.running) + 1} sequences at once, and a pass has {most} rows; use a smaller batch"
            )
        request.keeps_slot = True
        self.running[request.id] = request

    def remove(self, request: Request) -> None:
        """Forget a request, and free its K/V."""
        self._full = 0
        if self.running.pop(request.id, None) is None:
            self.waiting.remove(request)
            return
        self.remember(request)
        self.backend.close(request.slot)

    def put_back(self, request: Request) -> None:
        """Free a running request's K/V. It is the next to be admitted; then its text runs again, and it continues."""
        self.remove(request)
        self.preemptions += 1
        request.slot, request.queued = -1, perf_counter()
        self.waiting.appendleft(request)

    def remember(self, request: Request) -> None:
        """Let later requests share the K/V that this one has cached."""
        if not request.keeps_slot:
            self._full = 0  # a request that shares these needs less room
            self.backend.remember(request.slot, request.sequence.tokens[: self.backend.length(request.slot)])

    # A step.

    def schedule(self) -> list[Pass]:
        """The passes of the next step, in which every decoding request takes part."""
        self._full = max(0, self._full - 1)
        self._admit()
        decoding, unread, cached = list[Request](), list[Request](), self.backend.length
        for request in self.running.values():
            if len(request.sequence.tokens) - 1 == cached(request.slot):
                decoding.append(request)
            else:
                unread.append(request)
                if cached(request.slot) > request.cached:  # before its pages behind a window are given back
                    self.remember(request)
        if self.backend.capabilities.pads:  # each prompt runs alone
            passes = [Pass([part]) for request in unread for part in self._prompt_parts(request)]
            return [*passes, Pass([Part(request) for request in decoding])] if decoding else passes
        if not self.running:
            return []
        most = self.backend.most_rows
        apart = {request.id for request in self.running.values() if self._is_inexact(request)}
        if not apart or len(apart) == len(self.running):
            return [self._shared_pass(decoding, unread, most)]
        return [
            self._shared_pass(
                [request for request in decoding if (request.id in apart) is inexact],
                [request for request in unread if (request.id in apart) is inexact],
                most,
            )
            for inexact in (False, True)
        ]

    def _is_inexact(self, request: Request) -> bool:
        """Whether its trees may be too large or too deep to be exact. Such a tree takes the exactness of its whole pass
        and leaves inexact K/V, so these requests run in passes of their own and share no K/V with others."""
        config = request.sequence.config
        return not config.exact and not config.is_within(*exact_limits(self.backend))

    def _admit(self) -> None:
        """Open slots for waiting requests, in their order, while there is room for the next one's text and a step."""
        while self.waiting and len(self.running) < self.max_sequences and not (self._full and self.running):
            request = self.waiting[0]
            tokens = request.sequence.tokens
            request.slot = self.backend.open(tokens, request.salt)
            if not self.backend.reserve(request.slot, len(tokens) + request.sequence.config.budget) and self.running:
                self.backend.close(request.slot)
                request.slot, self._full = -1, RETRY_STEPS
                return
            self.running[request.id] = self.waiting.popleft()
            request.cached = self.backend.length(request.slot)
            request.sequence.stats.queue_seconds += perf_counter() - request.queued

    def _shared_pass(self, decoding: list[Request], unread: list[Request], rows: int) -> Pass:
        """One pass of at most `rows` tokens: the decoding requests' trees, and prompts beside them.

        Prompts get all rows if nothing decodes, and else what the roots leave, but at least half of the rows are theirs
        before there are guesses.
        """
        held, most_nodes = self._held(unread) if unread else set(), self.backend.most_nodes
        parts = [Part(request, (), True, NO_TREE) for request in decoding if not held or request.verifier not in held]
        if parts and unread:
            rows = min(rows, max(self._most_beside, 2 * len(parts)))
        share = rows - max(len(parts), rows // 2) if parts else rows
        waiting = deque(unread)
        while waiting and waiting[0].verifier not in held and self._rest(waiting[0]) < share:
            parts.append(self._part(waiting.popleft()))
            share -= len(parts[-1].chunk) + 1
        share = min(share, sum([self._rest(request) + 1 for request in waiting]))
        limit = rows - share - sum([len(part.chunk) for part in parts])
        if most_nodes is not None:  # every prompt may come to its root
            limit = min(limit, max(len(parts), most_nodes - len(waiting)))
        return Pass(parts, limit, list(waiting), rows)

    def fill(self, one: Pass) -> None:
        """Give the rows that the trees have left to the prompts that wait, as pieces; a last piece has a bare root."""
        if not one.waiting:
            return
        held = self._held(one.waiting)
        rows = one.rows - sum(len(part.chunk) + len(part.tree) for part in one.parts)
        for request in one.waiting:
            if rows < 1:
                return
            part = self._part(request, rows)
            part.whole = self._rest(request) < rows and request.verifier not in held
            if part.whole:
                part.tree = request.sequence.bare_root()
            rows -= len(part.chunk) + len(part.tree)
            one.parts.append(part)

    def _held(self, unread: Iterable[Request]) -> set[Verifier | None]:
        """The verifiers of several requests, one of which is still unread: these requests must move together."""
        if all(request.verifier is None for request in unread):
            return set()
        users = Counter(request.verifier for request in self.running.values())
        del users[None]
        return {request.verifier for request in unread if users[request.verifier] > 1}

    def _rest(self, request: Request) -> int:
        return len(request.sequence.tokens) - 1 - self.backend.length(request.slot)

    def _prompt_parts(self, request: Request) -> list[Part]:
        """A request's whole prompt as prompt chunks, the last one with a tree."""
        prompt, chunk = self._part(request).chunk, prompt_chunk(self.backend)
        chunks = [prompt[start : start + chunk] for start in range(0, len(prompt), chunk)]
        return [Part(request, tokens, whole=number == len(chunks)) for number, tokens in enumerate(chunks, start=1)]

    def _part(self, request: Request, most: int | None = None) -> Part:
        start, end = self.backend.length(request.slot), len(request.sequence.tokens) - 1
        if most is not None:
            end = min(end, start + most)
        return Part(request, request.sequence.tokens[start:end])

    # Room.

    def make_room(self, passes: Sequence[Pass]) -> None:
        """Reserve room for every part. Where there is too little, the trees become bare roots; if that is not enough,
        the youngest requests are put back."""
        while not all(self._reserve(part) for one in passes for part in one.parts):
            grown = [part for one in passes for part in one.parts if len(part.tree) > 1]
            for part in grown:
                part.tree = part.request.sequence.bare_root()
            if not grown:
                youngest = self._youngest()
                for one in passes:
                    one.parts = [part for part in one.parts if part.request is not youngest]
                self.put_back(youngest)

    def _reserve(self, part: Part) -> bool:
        """Room for the whole text and its tree. It is asked for from the first piece on, so that no prompt gets stuck
        half-way."""
        before_root = len(part.request.sequence.tokens) - 1
        return self.backend.reserve(part.request.slot, before_root + (part.tree.size or 1))

    def _youngest(self) -> Request:
        movable = [request for request in self.running.values() if not request.keeps_slot]
        if not movable or len(self.running) == 1:
            raise MemoryError(
                f"the backend has no room for the K/V of {len(self.running)} sequences, and they cannot wait for each "
                "other; use a smaller batch or fewer tokens"
            )
        return movable[-1]
