"""The engine runs many requests on one backend. A step: schedule, propose, launch, learn, collect, verify, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter

from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.drafting import Drafting
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import Backend, StepInput
from lookahead.backends.exact import check_exact
from lookahead.backends.failures import DeviceMemoryError
from lookahead.engine.inputs import input_of, needs_most
from lookahead.engine.request import Event, Request, StepResult
from lookahead.engine.scheduler import Part, Pass, Scheduler
from lookahead.engine.step import NO_STEP, FinishedStep, LaunchedPass, RunningStep, verdicts_of

MAX_SEQUENCES = 256
MOST_BESIDE = 512
"""The most rows of a pass in which prompts run beside decoding requests, which wait for all of it. On an H200 a pass of
a 7B model takes 13 ms then, and twice as long with 1,024 rows: larger passes read no more of a prompt per second."""


class Engine:
    """Continuous batching: requests join and leave between steps, and each accepts its own number of tokens per step.

    An engine lives as long as its backend, and is used by one thread at a time (`EngineClient` serves many). Every
    request has its own config, sampling, stop rules and optional verifier. Requests wait in a queue until they are
    admitted, at most `max_sequences` at once (see `scheduler`). The output of a request depends on nothing else: not on
    other requests, nor on whether its K/V were shared with one, nor on whether it was preempted.

    `budget` decides how many draft tokens a step takes; the engine reports to it how long passes really take.
    `most_beside`: see `scheduler`. `watch`, if set, is called after every pass with its rows and its seconds.
    """

    def __init__(
        self,
        backend: Backend,
        budget: DraftBudget | None = None,
        max_sequences: int = MAX_SEQUENCES,
        most_beside: int = MOST_BESIDE,
    ) -> None:
        self.backend = backend
        self.watch: Callable[[int, float], None] | None = None
        self._scheduler = Scheduler(backend, max_sequences, most_beside)
        self._requests: dict[int, Request] = {}
        self._submitted = 0
        self._drafting = Drafting(budget, pads=backend.capabilities.pads)
        self._failed: list[tuple[Request, Exception]] = []  # during this step
        self._running_step = NO_STEP
        self._spent: Sequence[StepResult] = ()  # the last step's objects, freed while the next one runs

    # Requests.

    def check_request(self, request: Request) -> None:
        """Raise ValueError if the request could not be run to its end, even alone."""
        for token, _ in request.sequence.sampling.bias[-1:]:
            if token >= self.backend.vocab_size:
                raise ValueError(f"logit_bias names token {token}; the model has 0 to {self.backend.vocab_size - 1}")
        check_exact(request.sequence.config, self.backend)
        if request.mask is not None and (request.verifier is not None or request.noise is not None):
            raise ValueError("a request with a mask cannot have a verifier or noise; leave one of them out")
        capabilities = self.backend.capabilities
        if request.noise is not None and not capabilities.draws_noise:
            raise ValueError(f"the {capabilities.name} backend does not draw with given noise; give the request none")
        sequence, holds = request.sequence, self.backend.holds()
        longest = sequence.prompt_tokens + sequence.room + sequence.config.budget
        if holds is not None and longest > holds:
            raise ValueError(
                f"a prompt of {sequence.prompt_tokens} tokens, {sequence.room} more and a step of "
                f"{sequence.config.budget} need room for {longest} tokens, and the backend holds {holds}; lower "
                "max_tokens or shorten the prompt"
            )

    def submit(self, request: Request) -> int:
        """Put a request into the queue. Returns its id."""
        self.check_request(request)
        self._submitted += 1
        request.id = self._submitted
        self._scheduler.add(request)
        self._requests[request.id] = request
        return request.id

    def cancel(self, id: int) -> None:
        """Remove a request. An id that is not running is ignored."""
        request = self._requests.pop(id, None)
        if request is not None:
            self._scheduler.remove(request)

    def limit(self, max_sequences: int) -> None:
        """Let at most so many requests run at once from now on."""
        self._scheduler.max_sequences = min(max_sequences, self.backend.most_rows)

    def abort(self, *, wait: bool = True) -> None:
        """Remove all requests, after an error of the backend. Nothing of them is remembered.

        `wait=False`: the device is lost, and a step that runs there never ends.
        """
        step, self._running_step = self._running_step, NO_STEP
        if step.first is not None and wait:  # the device may still read what the host wrote for it
            with suppress(Exception):
                self.backend.collect(step.first.running)
        for request in self._scheduler.running.values():
            with suppress(Exception):
                self.backend.close(request.slot)
        for requests in (self._requests, self._scheduler.running, self._scheduler.waiting, self._failed):
            requests.clear()

    @property
    def budget(self) -> DraftBudget:
        """What decides how many draft tokens a step takes."""
        return self._drafting.budget

    @property
    def running(self) -> list[int]:
        """The ids of the requests that have not finished, in the order in which they came."""
        return list(self._requests)

    @property
    def waiting(self) -> int:
        """How many requests are in the queue."""
        return len(self._scheduler.waiting)

    @property
    def preemptions(self) -> int:
        """How often a request had to make room for an older one."""
        return self._scheduler.preemptions

    # A step.

    def step(self) -> list[Event]:
        """Run one step of every decoding request, and as much of the prompts as there is room for.

        Finished requests are removed. A request whose own part of the step raised an exception has failed, and is
        removed, too. The others go on.
        """
        self.begin()
        return self.finish().events()

    def begin(self) -> None:
        """Start a step. Where the device runs beside the host, it may still be running on return."""
        begin, captures = perf_counter(), self.backend.captures
        # 1. Schedule: who takes part, and with how many tokens of a text that is not cached yet.
        passes = self._scheduler.schedule()
        # 2. Propose: a tree for each request whose text is cached by then; and room for all of it.
        for one in passes:
            self._propose(one)
            self._scheduler.fill(one)
        self._scheduler.make_room(passes)
        passes = [one for one in passes if one.parts]
        # 3. Launch. Most backends put everything into one pass; if there are more, `finish` runs the others.
        first = self._launch(passes[0], len(passes) == 1) if passes else None
        self._running_step = RunningStep(passes, begin, captures, first)

    def finish(self) -> FinishedStep:
        """Learn, collect, verify and commit the running step. The next step can begin before the events of this one are
        sent."""
        step, self._running_step = self._running_step, NO_STEP
        results = list[StepResult]()
        for place, one in enumerate(step.passes):
            launched = self._launch(one, only_pass=False) if place else step.first
            if launched is not None:
                results += self._collect(launched)
        finished = self.verify_and_commit(results)
        seconds = finished.time - step.time
        if self.backend.captures != step.captures:
            return finished  # the time of a capture says nothing about the next step
        if self.budget.cost is not None and len(step.passes) == 1:
            self.budget.cost.note(step.passes[0].rows_run(pads=self.backend.capabilities.pads), seconds)
        if self.budget.guarded and finished and not any(part.chunk for one in step.passes for part in one.parts):
            drafted = any(result.input.tree.size > 1 for result in results)
            self.budget.note_step(len(results), drafted, finished.mean_tokens, seconds)
        return finished

    def _propose(self, one: Pass) -> None:
        """Choose the trees of a pass. A request for which that fails is left out."""
        if not one.parts or not one.parts[0].whole:  # a pass may be one prompt chunk, which has no tree
            return
        begin = perf_counter()
        sequences = [part.request.sequence for part in one.parts]
        try:
            trees = self._drafting.propose(sequences, one.limit, sum([len(part.chunk) for part in one.parts]))
        except Exception:
            failed = self._culprits(one.parts)
            if not failed:
                raise
            self._failed += failed
            one.parts = [part for part in one.parts if all(part.request is not request for request, _ in failed)]
            trees = [part.request.sequence.bare_root() for part in one.parts]
        for part, tree in zip(one.parts, trees, strict=True):
            part.tree = tree
        one.propose_seconds = (perf_counter() - begin) / len(sequences)

    def _culprits(self, parts: Sequence[Part]) -> list[tuple[Request, Exception]]:
        """The requests that cannot propose a tree, each with its exception."""
        failed = []
        for part in parts:
            try:
                self._drafting.propose([part.request.sequence])
            except Exception as error:
                failed.append((part.request, error))
        return failed

    def _launch(self, one: Pass, only_pass: bool) -> LaunchedPass | None:
        """Start a pass, unless nothing is left of it. If the device has too little memory for it, one request fails,
        and the pass is tried without it."""
        inputs = self._inputs(one, only_pass)
        begin = perf_counter()
        while inputs:
            try:
                return LaunchedPass(one, inputs, begin, self.backend.launch(inputs))
            except DeviceMemoryError as error:
                index = needs_most(inputs, error.slot)
                self._failed.append((one.parts.pop(index).request, error))
                del inputs[index]
        return None

    def _learn(self, parts: Sequence[Part]) -> None:
        """Do while the device runs what need not delay it: free memory, learn, draw noise, get ready to verify."""
        self._spent = ()
        requests = [part.request for part in parts]
        failed = self._drafting.learn(
            [request.sequence for request in requests],
            [part.tree for part in parts],
            [request.verifier is not None for request in requests],
        )
        for index, request in enumerate(requests):
            if request.noise is not None and index not in failed:
                try:
                    request.noise.draw_ahead()
                except Exception as error:
                    failed[index] = error
        self._failed += [(requests[index], error) for index, error in failed.items()]

    def _collect(self, launched: LaunchedPass) -> list[StepResult]:
        """Learn from the step before while the device runs; then wait for the whole pass, and verify."""
        # 4. Learn from the step before.
        one = launched.one
        self._learn(one.parts)
        # 5. Collect.
        outputs = self.backend.collect(launched.running)
        done = perf_counter()
        # 6. Verify: what the targets confirm.
        accepted = self._drafting.verify(outputs)
        seconds, after = done - launched.time, (perf_counter() - done) / len(accepted)
        if self.watch is not None:
            self.watch(one.tokens, seconds)
        results, before = list[StepResult](), one.propose_seconds
        for part, item, output, verdict in zip(one.parts, launched.inputs, outputs, accepted, strict=True):
            if part.request.id not in self._requests:
                continue  # it was cancelled while it ran
            if part.whole:
                results.append(StepResult(part.request, item, output, verdict, before, seconds, after))
            else:
                part.request.sequence.stats.forward_seconds += seconds
        return results

    def _inputs(self, one: Pass, only_pass: bool) -> list[StepInput]:
        """The inputs of a pass. A request whose mask fails is left out."""
        inputs, parts = list[StepInput](), list[Part]()
        for part in one.parts:
            try:
                inputs.append(input_of(part, only_pass, self.backend))
                parts.append(part)
            except Exception as error:
                if part.request.mask is None:
                    raise
                self._failed.append((part.request, error))
        one.parts = parts
        return inputs

    def verify_and_commit(self, results: Sequence[StepResult], *, commit: bool = True) -> FinishedStep:
        """Verify and commit a step that has run. Requests that have finished or failed are removed.

        `commit=False` is for a step that ran outside of the backend and whose K/V were given to `Backend.adopt`
        (a prompt given as embeddings, in `transformers_hook.run`).
        """
        # 7. Accept: each sequence takes its tokens, up to the one that ends it.
        begin = perf_counter()
        accepted = list[tuple[StepResult, Verdict]]()
        if self._failed:
            out = {request.id for request, _ in self._failed}
            results = [result for result in results if result.request.id not in out]
        for result, given in zip(results, verdicts_of(results), strict=True):
            request = result.request
            try:
                if isinstance(given, Exception):
                    raise given
                if given is not None and request.verifier is None:
                    given = request.sequence.cut(given)
                verdict = request.sequence.absorb(result.input.tree, result.output, given)
                accepted.append((result, verdict))
                if request.mask is not None:
                    request.mask.accept(verdict.tokens)
            except Exception as error:
                self._failed.append((request, error))
        absorbed = perf_counter()
        # 8. Commit: the accepted tokens' K/V move next to the prefix.
        if commit and accepted:
            self.backend.commit([(result.input.slot, verdict.path) for result, verdict in accepted])
        done = perf_counter()
        # 9. Finished and failed requests leave.
        for result, verdict in accepted:
            if verdict.finish_reason is not None:
                if result.request.finished is not None:
                    result.request.finished(result.request)
                self.cancel(result.request.id)
            elif result.input.chunk:
                self._scheduler.remember(result.request)
        failed, self._failed, self._spent = self._failed, [], results
        for request, _ in failed:
            request.sequence.finish_reason = "error"
            self.cancel(request.id)
        return FinishedStep(accepted, failed, (absorbed - begin) / max(1, len(results)), done - absorbed, done)
