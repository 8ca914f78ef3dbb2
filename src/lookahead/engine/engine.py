"""The engine steps one or many sequences through one backend: propose, one forward pass, verify, commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import Backend, StepInput, padded
from lookahead.config import SamplingParams
from lookahead.engine.request import Event, Request, StepResult, Verifier

GREEDY = SamplingParams()
"""Where a verifier chooses the tokens, the backend's targets are only hints for the window and the sources."""


class Engine:
    """Continuous batching with ragged acceptance: requests join and leave between steps.

    It lives as long as its backend. Every request has its own config, sampling, stop rules and, if need be, verifier.
    A newcomer's first step carries its prompt and runs by itself, because padding the others to a prompt's length would
    cost more; from then on it shares the batch's forward pass.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._requests: dict[int, Request] = {}
        self._submitted = 0
        self._spent: Sequence[StepResult] = ()  # the last step: its many objects are freed while the next one runs

    def submit(self, request: Request) -> int:
        """Let a request take part from the next step on. Returns its id."""
        if request.slot < 0:
            request.slot = self.backend.open()
        self._submitted += 1
        request.id = self._submitted
        self._requests[request.id] = request
        return request.id

    def cancel(self, id: int) -> None:
        """Let a request leave before it has finished. It is no mistake to name one that has left already."""
        request = self._requests.pop(id, None)
        if request is not None:
            self.backend.close(request.slot)

    @property
    def running(self) -> list[int]:
        """The ids of the requests that have not finished."""
        return list(self._requests)

    def step(self, ids: Collection[int] | None = None) -> list[Event]:
        """One decoding step of every running request, or of these alone. Finished ones leave."""
        # 1. Propose, and one forward pass: over each newcomer by itself, over those that go on together.
        asked = [request for id, request in self._requests.items() if ids is None or id in ids]
        cached, others, results = self.backend.length, list[Request](), list[StepResult]()
        for request in asked:
            if cached(request.slot) < len(request.sequence.tokens) - 1:
                results += self._forward([request], alone=len(asked) == 1)
            else:
                others.append(request)
        if others:
            results += self._forward(others, alone=len(others) == len(asked))
        # 2. Verify, learn, commit.
        return self.settle(results)

    def settle(self, results: Sequence[StepResult], *, commit: bool = True) -> list[Event]:
        """The rest of a step that ran. Without `commit` it had no guesses, and its root's K/V is in place already."""
        # 1. Verify and absorb: each sequence accepts what it can, and learns.
        begin = perf_counter()
        verdicts = [
            result.request.sequence.absorb(result.input.tree, result.output, verdict)
            for result, verdict in zip(results, verify(results), strict=True)
        ]
        absorbed = perf_counter()
        # 2. Commit: the accepted tokens' K/V move next to the prefix. Finished requests leave.
        if commit:
            slots = [result.input.slot for result in results]
            self.backend.commit([(slot, verdict.path) for slot, verdict in zip(slots, verdicts, strict=True)])
        done = perf_counter()
        events = []
        for result, verdict in zip(results, verdicts, strict=True):
            request, stats = result.request, result.request.sequence.stats
            stats.absorb_seconds += (absorbed - begin) / len(results)
            stats.forward_seconds += done - absorbed
            stats.seconds = done - request.begin
            stats.first_token_seconds = stats.first_token_seconds or stats.seconds
            if verdict.finish_reason is not None:
                if request.finished is not None:
                    request.finished(request)
                self.cancel(request.id)
            events.append(Event(request, verdict.tokens, verdict.finish_reason))
        self._spent = results
        return events

    def _forward(self, requests: Sequence[Request], alone: bool) -> list[StepResult]:
        """Propose each request's tree and run all of them in one pass. `alone`: nobody else takes part in this step."""
        begin = perf_counter()
        inputs = []
        for request in requests:
            sequence, slot = request.sequence, request.slot
            tree = sequence.propose(padded(len(requests)))
            trail = sequence.tokens[self.backend.length(slot) : -1]
            top = KEPT_TOKENS if sequence.wants_top else 0
            if request.verifier is None:
                item = StepInput(slot, trail, tree, sequence.sampling, sequence.uniforms(tree), top)
                item.continues_alone = alone and sequence.continues_alone
            else:
                item = StepInput(slot, trail, tree, GREEDY, (), top, logits=True)
            inputs.append(item)
        proposed = perf_counter()
        running = self.backend.launch(inputs)
        self._learn_while_running(requests, inputs)
        outputs = self.backend.collect(running)
        ran = perf_counter()
        for request in requests:
            request.sequence.stats.propose_seconds += (proposed - begin) / len(requests)
            request.sequence.stats.forward_seconds += ran - proposed
        return [StepResult(*parts) for parts in zip(requests, inputs, outputs, strict=True)]

    def _learn_while_running(self, requests: Sequence[Request], inputs: Sequence[StepInput]) -> None:
        """Do what may wait until the device runs: learning, the trees as verification reads them, freeing memory."""
        self._spent = ()
        for request in requests:
            request.sequence.learn_while_running()
        for item in inputs:
            item.tree.guesses_below(0)


def verify(results: Sequence[StepResult]) -> list[Verdict | None]:
    """The verdicts of the requests that have a verifier; None for those whose sequence verifies by itself."""
    verdicts: list[Verdict | None] = [None] * len(results)
    groups: dict[Verifier, list[int]] = {}
    for place, result in enumerate(results):
        if result.request.verifier is not None:
            groups.setdefault(result.request.verifier, []).append(place)
    for verifier, places in groups.items():
        for place, verdict in zip(places, verifier([results[place] for place in places]), strict=True):
            verdicts[place] = verdict
    return verdicts
