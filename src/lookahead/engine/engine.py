"""The engine runs many requests on one backend. A step is: propose, one forward pass, verify, commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import Backend, StepInput, padded
from lookahead.config import SamplingParams
from lookahead.engine.pace import Pace
from lookahead.engine.request import Event, Request, StepResult, Verifier

GREEDY = SamplingParams()
"""The sampling of a request with a verifier. The verifier chooses its tokens; the backend's targets only feed the
window and the sources, for which greedy targets are enough."""


class Engine:
    """Continuous batching: requests join and leave between steps, and each accepts its own number of tokens per step.

    An engine lives as long as its backend, and is used by one thread at a time. A server calls `submit`, `cancel` and
    `step` from one loop. Every request has its own config, sampling, stop rules and optional
    verifier. The first step of a request carries its prompt and runs in a pass of its own, because padding the other
    requests to the prompt's length would cost more. After that the request shares the batch's forward pass.

    With a `pace`, steps carry no guesses while those do not pay.
    """

    def __init__(self, backend: Backend, pace: Pace | None = None) -> None:
        self.backend, self.pace = backend, pace
        self._requests: dict[int, Request] = {}
        self._submitted = 0
        self._spent: Sequence[StepResult] = ()  # the last step's objects, freed while the next one runs

    def submit(self, request: Request) -> int:
        """Add a request, which takes part from the next step on. Returns its id."""
        if request.slot < 0:
            request.slot = self.backend.open()
        self._submitted += 1
        request.id = self._submitted
        self._requests[request.id] = request
        return request.id

    def cancel(self, id: int) -> None:
        """Remove a request. An id that is not running is ignored."""
        request = self._requests.pop(id, None)
        if request is not None:
            self.backend.close(request.slot)

    @property
    def running(self) -> list[int]:
        """The ids of the requests that have not finished."""
        return list(self._requests)

    def step(self, ids: Collection[int] | None = None) -> list[Event]:
        """Run one step of every running request, or of these alone. Finished requests are removed."""
        # 1. Propose and run: a pass for each new request, and one pass for all the others.
        begin = perf_counter()
        stepped = [request for id, request in self._requests.items() if ids is None or id in ids]
        others, results = list[Request](), list[StepResult]()
        for request in stepped:
            if self.backend.length(request.slot) < len(request.sequence.tokens) - 1:
                results += self._forward([request], only_pass=len(stepped) == 1)
            else:
                others.append(request)
        if others:
            results += self._forward(others, only_pass=len(others) == len(stepped))
        # 2. Verify, learn, commit.
        events = self.settle(results)
        if self.pace is not None and events and len(others) == len(stepped):
            tokens = sum(len(event.tokens) for event in events) / len(events)
            self.pace.record(any(len(r.input.tree) > 1 for r in results), tokens, perf_counter() - begin)
        return events

    def settle(self, results: Sequence[StepResult], *, commit: bool = True) -> list[Event]:
        """Verify and commit a step that has run.

        `commit=False` is for a step that ran outside of the backend and whose K/V were given to `Backend.adopt`
        (a prompt given as embeddings, in `transformers_hook.run`).
        """
        # 1. Verify and absorb: each sequence accepts tokens and learns.
        begin = perf_counter()
        verdicts = [
            result.request.sequence.absorb(result.input.tree, result.output, verdict)
            for result, verdict in zip(results, verify(results), strict=True)
        ]
        absorbed = perf_counter()
        # 2. Commit: the accepted tokens' K/V move next to the prefix. Finished requests are removed.
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
            events.append(Event(request, verdict.tokens, verdict.finish_reason, verdict.path))
        self._spent = results
        return events

    def _forward(self, requests: Sequence[Request], only_pass: bool) -> list[StepResult]:
        """Propose a tree for each request and run all in one pass. `only_pass`: this step has no other
        pass. Requests wait for the whole pass, and share the time that the host spends on them."""
        begin = perf_counter()
        inputs = []
        for request in requests:
            sequence, slot = request.sequence, request.slot
            guess = self.pace is None or self.pace.guesses
            tree = sequence.propose(padded(len(requests))) if guess else sequence.bare_root()
            trail = sequence.tokens[self.backend.length(slot) : -1]
            top = KEPT_TOKENS if sequence.wants_top else 0
            if request.verifier is None:
                item = StepInput(slot, trail, tree, sequence.sampling, sequence.uniforms(tree), top)
                item.continues_alone = only_pass and sequence.continues_alone
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
        """Do while the device runs what need not delay it: free memory, learn, index the trees for verification."""
        self._spent = ()
        for request in requests:
            request.sequence.learn_while_running()
        for item in inputs:
            item.tree.guesses_below(0)


def verify(results: Sequence[StepResult]) -> list[Verdict | None]:
    """The verdicts of requests that have a verifier, and None for those whose sequence verifies by itself."""
    verdicts: list[Verdict | None] = [None] * len(results)
    groups: dict[Verifier, list[int]] = {}
    for place, result in enumerate(results):
        if result.request.verifier is not None:
            groups.setdefault(result.request.verifier, []).append(place)
    for verifier, places in groups.items():
        for place, verdict in zip(places, verifier([results[place] for place in places]), strict=True):
            verdicts[place] = verdict
    return verdicts
