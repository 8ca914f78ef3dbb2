"""What runs in a forward pass: `Scheduler` makes a batch, and `Engine` gives its requests their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lookahead.algorithm.choice import SequenceBatch
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import NO_TREE, StepInput
from lookahead.engine.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """A request in a pass: its prompt chunk, whose tokens are not cached yet, then its tree.

    Only the last chunk of a prompt has a tree. A decoding request has an empty chunk, which counts as the last one, or
    the accepted tokens of its last pass: where a draft token was refused, a chain backend `runs_again` what it had run.
    `next_input` is the input of its next pass without a tree, if that is already known (see `inputs.prepare_input`).
    """

    request: Request
    chunk: Sequence[int] = ()
    is_last_chunk: bool = True
    tree: TokenTree = field(default_factory=lambda: NO_TREE)
    runs_again: bool = False
    next_input: StepInput | None = None


@dataclass(slots=True)
class ScheduledBatch:
    """The requests of a forward pass. Their trees have at most `max_tree_tokens` tokens in all; None: any number.

    A batch that is `steady` runs in several passes, in which all its requests decode, without any chunks. The prompts
    in `prefilling` get the rows of the pass that the trees leave (see `Scheduler.fill_with_chunks`).
    `propose_seconds` is the time per tree that proposing took. `ran_ahead`: the backend may already run it, because it
    follows a step whose `next_is_plain` (see `plain_run`).
    """

    requests: list[ScheduledRequest]
    max_tree_tokens: int | None = None
    prefilling: list[Request] = field(default_factory=list)
    rows: int = 0
    propose_seconds: float = 0.0
    ran_ahead: bool = False
    next_is_plain: bool = False
    steady: bool = False
    _sequences: SequenceBatch | None = None
    _plain: bool | None = None

    @property
    def sequences(self) -> SequenceBatch:
        """The requests' sequences: the same object for the same requests."""
        if self._sequences is None:
            self._sequences = SequenceBatch([scheduled.request.sequence for scheduled in self.requests])
        return self._sequences

    @property
    def plain(self) -> bool:
        """Whether all requests are `plain`, and none has a chunk."""
        if self._plain is None:
            self._plain = all(scheduled.request.plain and not scheduled.chunk for scheduled in self.requests)
        return self._plain

    @property
    def ids(self) -> list[int]:
        return [scheduled.request.id for scheduled in self.requests]

    @property
    def chunk_tokens(self) -> int:
        """The tokens of all chunks."""
        return 0 if self.steady else sum([len(scheduled.chunk) for scheduled in self.requests])

    def keep(self, requests: list[ScheduledRequest]) -> None:
        """Continue with these requests alone."""
        self.requests, self._sequences, self._plain = requests, None, None

    @property
    def tokens(self) -> int:
        """The tokens of all chunks and trees."""
        return sum([len(scheduled.chunk) + scheduled.tree.size for scheduled in self.requests])

    def rows_run(self, *, pads: bool) -> int:
        """The rows that the backend runs. If it `pads`, every request has as many as the longest one."""
        if not pads:
            return self.tokens
        return len(self.requests) * max([len(scheduled.chunk) + scheduled.tree.size for scheduled in self.requests])
