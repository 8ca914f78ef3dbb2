"""The engine runs many requests on one backend. A step: schedule, propose, launch, learn, collect, verify, accept,
commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter

from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.drafting import Drafting
from lookahead.algorithm.output import NO_OUTPUT
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import Backend
from lookahead.backends.failures import DeviceMemoryError
from lookahead.engine.batch import ScheduledBatch, ScheduledRequest
from lookahead.engine.check import check_request
from lookahead.engine.inputs import largest_input, make_inputs, prepare_input
from lookahead.engine.plain_run import PlainRun
from lookahead.engine.request import Event, PassTimes, Request, StepResult
from lookahead.engine.scheduler import Scheduler, most_sequences
from lookahead.engine.step import NO_STEP, FinishedStep, LaunchedPass, RunningStep, verdicts_of

MAX_SEQUENCES = 256
MAX_MIXED_ROWS = 512
"""Maximum rows of a pass that mixes prompt chunks with decoding requests, which wait for the whole pass. On an H200 a
7B model takes 13 ms for such a pass, and twice as long with 1,024 rows, which prefills no more tokens per second."""


class Engine:
    """Continuous batching: requests join and leave between steps, and each accepts its own number of tokens per step.

    An engine lives as long as its backend, and is used by one thread at a time (`EngineClient` serves many). Every
    request has its own config, sampling, stop rules and optional verifier. Requests wait in a queue until they are
    admitted, at most `max_sequences` at once (see `scheduler`). The output of a request depends on nothing else: not on
    other requests, nor on whether its K/V were shared, nor on whether it was preempted.

    `budget` decides how many draft tokens a step takes; the engine reports to it how long passes really take.
    `max_mixed_rows`: see `scheduler`. `on_pass`, if set, is called after every pass with its rows and its seconds.
    """

    def __init__(
        self,
        backend: Backend,
        budget: DraftBudget | None = None,
        max_sequences: int = MAX_SEQUENCES,
        max_mixed_rows: int = MAX_MIXED_ROWS,
    ) -> None:
        self.backend = backend
        self.on_pass: Callable[[int, float], None] | None = None
        self._scheduler = Scheduler(backend, max_sequences, max_mixed_rows)
        self._requests: dict[int, Request] = {}
        self._submitted = 0
        self._drafting = Drafting(budget, pads=backend.capabilities.pads, chains=not backend.capabilities.branches)
        self._plain_run = PlainRun(self._drafting.budget, runs_ahead=backend.capabilities.runs_ahead)
        self._failed: list[tuple[Request, Exception]] = []  # during this step
        self._running_step = NO_STEP
        self._last_end = 0.0  # when the last step finished
        self._last_results: Sequence[StepResult] = ()  # the last step's objects, freed while the next one runs

    # Requests.

    def check_request(self, request: Request) -> None:
        """Raise ValueError if the request could not run to its end, even alone."""
        check_request(request, self.backend)

    def submit(self, request: Request) -> int:
        """Queue a request. Returns its id."""
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

    def set_max_sequences(self, max_sequences: int) -> None:
        """Run at most `max_sequences` requests at once from now on."""
        self._scheduler.max_sequences = most_sequences(self.backend, max_sequences)

    def reload_weights(self) -> None:
        """Let later requests use the model's current weights, which were changed. Raises RuntimeError while there are
        requests."""
        if self._requests:
            raise RuntimeError(f"{len(self._requests)} requests run; change the weights when they have ended")
        self.backend.reload_weights()

    def abort(self, *, wait: bool = True) -> None:
        """Remove all requests after an error of the backend. Their K/V are not cached.

        `wait=False`: the device is lost, and a step that runs there never ends.
        """
        step, self._running_step = self._running_step, NO_STEP
        if step.first is not None and wait:  # the device may still read what the host wrote for it
            with suppress(Exception):
                self.backend.collect(step.first.running)
        for request in self._scheduler.running.values():
            with suppress(Exception):
                self.backend.close(request.slot)
        self._scheduler.clear()
        for requests in (self._requests, self._failed):
            requests.clear()

    @property
    def budget(self) -> DraftBudget:
        """Decides how many draft tokens a step takes."""
        return self._drafting.budget

    @property
    def running(self) -> list[int]:
        """The ids of the unfinished requests, in the order in which they were submitted."""
        return list(self._requests)

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._scheduler.waiting)

    @property
    def preemptions(self) -> int:
        """How often a request was preempted for an older one."""
        return self._scheduler.preemptions

    # A step.

    def step(self) -> list[Event]:
        """Run one step of every decoding request, and prompt chunks in the rows that are left.

        Finished requests are removed. So is a request whose own code (drafting, mask, verifier) raised an exception;
        the others continue.
        """
        self.begin()
        return self.finish().events()

    def begin(self) -> None:
        """Start a step. On a device that runs asynchronously, it may still be running on return."""
        begin, captures = perf_counter(), self.backend.captures
        # 1. Schedule: which requests run, and with how many tokens that are not cached yet.
        batches = self._scheduler.schedule()
        # 2. Propose: a tree for each request whose prompt ends in this step. Reserve K/V room for all of it.
        for batch in batches:
            self._propose(batch, only_batch=len(batches) == 1)
            self._scheduler.fill_with_chunks(batch)
        self._scheduler.reserve_room(batches)
        batches = [batch for batch in batches if batch.requests]
        # 3. Launch. Most backends have one batch per step; if there are more, `finish` runs the others.
        first = self._launch(batches[0]) if batches else None
        self._running_step = RunningStep(batches, begin, captures, first)

    def finish(self) -> FinishedStep:
        """Learn, collect, verify, accept and commit: the rest of the running step. The next step can begin before the
        events of this one are sent."""
        step, self._running_step = self._running_step, NO_STEP
        reads = self.backend.expert_reads
        results: list[StepResult] = []
        for index, batch in enumerate(step.batches):
            launched = self._launch(batch) if index else step.first
            if launched is not None:
                results += self._collect(launched)
        finished = self.accept_and_commit(results)
        ran_ahead = any(batch.ran_ahead for batch in step.batches)  # then it began before the host asked for it
        seconds = finished.time - (self._last_end if ran_ahead else step.time)
        self._last_end = finished.time
        if step.first is None or self.backend.captures != step.captures:
            return finished  # nothing has run, or the time of a capture, which says nothing about the next step
        if self.budget.cost is not None and step.is_one_pass(chains=not self.backend.capabilities.branches):
            rows = step.batches[0].rows_run(pads=self.backend.capabilities.pads)
            if ran_ahead:
                self.budget.cost.record_plain_step(rows, seconds)
            else:
                self.budget.cost.record_pass(rows, seconds, self.backend.expert_reads - reads)
        if self.budget.guarded and finished and not step.has_chunks:
            drafted = any(result.input.tree.size > 1 or result.input.chunk for result in results)
            self.budget.record_step(len(results), drafted, finished.mean_tokens, seconds)
        return finished

    def _propose(self, batch: ScheduledBatch, *, only_batch: bool) -> None:
        """Set the trees of a batch. A request that cannot propose one is left out."""
        if not batch.requests or not batch.requests[0].is_last_chunk:  # a batch may be one prompt chunk without a tree
            return
        begin, plain_run = perf_counter(), self._plain_run
        sequences = batch.sequences
        runs_ahead = plain_run.is_possible(batch, only_batch=only_batch)
        try:
            again: list[int] = []
            if not self.backend.capabilities.branches:
                again = [len(scheduled.chunk) if scheduled.runs_again else 0 for scheduled in batch.requests]
            trees = self._drafting.propose(
                sequences, batch.max_tree_tokens, batch.chunk_tokens, again, runs_ahead=runs_ahead
            )
        except Exception:
            failed = self._failing_requests(batch.requests)
            if not failed:
                raise
            self._failed += failed
            failed_requests = [request for request, _ in failed]
            batch.keep([scheduled for scheduled in batch.requests if scheduled.request not in failed_requests])
            trees = [scheduled.request.sequence.bare_root() for scheduled in batch.requests]
        trees = plain_run.choose_trees(batch, trees, possible=runs_ahead)
        for scheduled, tree in zip(batch.requests, trees, strict=True):
            scheduled.tree = tree
        batch.propose_seconds = (perf_counter() - begin) / len(sequences)

    def _failing_requests(self, requests: Sequence[ScheduledRequest]) -> list[tuple[Request, Exception]]:
        """The requests that cannot propose a tree, each with its exception."""
        failed = []
        for scheduled in requests:
            try:
                self._drafting.propose([scheduled.request.sequence])
            except Exception as error:
                failed.append((scheduled.request, error))
        return failed

    def _launch(self, batch: ScheduledBatch) -> LaunchedPass | None:
        """Launch a batch, unless it is empty. If the device has too little memory for it, its largest request fails,
        and the batch is launched without it. With several ranks the error is raised: the others run the whole batch."""
        inputs, failed = make_inputs(batch, self.backend)
        self._failed += failed
        begin = perf_counter()
        while inputs:
            try:
                return LaunchedPass(batch, inputs, begin, self.backend.launch(inputs))
            except DeviceMemoryError as error:
                if self.backend.capabilities.ranks > 1:
                    raise
                index = largest_input(inputs, error.slot)
                self._failed.append((batch.requests[index].request, error))
                batch.keep(batch.requests[:index] + batch.requests[index + 1 :])
                del inputs[index]
        return None

    def _learn(self, batch: ScheduledBatch) -> None:
        """Overlap with the device: free memory, learn from the last step, draw noise, prepare verification and the next
        inputs."""
        self._last_results = ()
        requests = [scheduled.request for scheduled in batch.requests]
        failed = self._drafting.learn(
            [request.sequence for request in requests],
            [scheduled.tree for scheduled in batch.requests],
            [request.verifier is not None for request in requests],
        )
        for index, request in enumerate(requests):
            if request.noise is not None and index not in failed:
                try:
                    request.noise.draw_ahead()
                except Exception as error:
                    failed[index] = error
        self._failed += [(requests[index], error) for index, error in failed.items()]
        for scheduled in batch.requests:
            if scheduled.is_last_chunk and not scheduled.chunk:
                scheduled.next_input = prepare_input(scheduled)

    def _collect(self, launched: LaunchedPass) -> list[StepResult]:
        """Learn from the last step while the device runs; then wait for the pass, and verify."""
        # 4. Learn from the last step.
        batch, times, tokens = launched.batch, PassTimes(launched.batch.propose_seconds), launched.batch.tokens
        self._learn(batch)
        results = [
            StepResult(scheduled.request, step_input, NO_OUTPUT, None, times)
            for scheduled, step_input in zip(batch.requests, launched.inputs, strict=True)
        ]
        # 5. Collect.
        outputs = self.backend.collect(launched.running)
        done = perf_counter()
        # 6. Verify: what the targets confirm.
        accepted = self._drafting.verify(outputs)
        times.forward, times.accept = done - launched.time, (perf_counter() - done) / len(accepted)
        if self.on_pass is not None:
            self.on_pass(tokens, times.forward)
        running = self._requests
        finished: list[StepResult] = []
        for scheduled, result, output, verdict in zip(batch.requests, results, outputs, accepted, strict=True):
            if result.request.id not in running:
                continue  # it was cancelled while it ran
            if scheduled.is_last_chunk:
                result.output, result.accepted = output, verdict
                finished.append(result)
            else:
                result.request.sequence.stats.forward_seconds += times.forward
        return finished

    def accept_and_commit(self, results: Sequence[StepResult], *, commit: bool = True) -> FinishedStep:
        """Accept and commit the results of a step. The targets have already verified them, unless their request has a
        verifier, which is called here. Requests that have finished or failed are removed.

        `commit=False` is for a step that ran outside the backend, which got its K/V by `Backend.adopt`
        (a prompt given as embeddings, in `transformers_hook.run`).
        """
        # 7. Accept: each sequence takes its tokens, up to the one that ends it.
        begin = perf_counter()
        accepted: list[tuple[StepResult, Verdict]] = []
        kept: list[tuple[int, list[int]]] = []
        changed: list[tuple[StepResult, Verdict]] = []  # those that ended, or whose prompt did
        if self._failed:
            failed_ids = {request.id for request, _ in self._failed}
            results = [result for result in results if result.request.id not in failed_ids]
        for result, verified in zip(results, verdicts_of(results), strict=True):
            request, step_input = result.request, result.input
            sequence = request.sequence
            try:
                if isinstance(verified, Exception):
                    raise verified
                if verified is not None and request.verifier is None:
                    verified = sequence.apply_stop_rules(verified)
                verdict = sequence.accept_step(step_input.tree, result.output, verified)
                accepted.append((result, verdict))
                kept.append((step_input.slot, verdict.path))
                if verdict.finish_reason is not None or step_input.chunk:
                    changed.append((result, verdict))
                if request.mask is not None:
                    request.mask.accept(verdict.tokens)
            except Exception as error:
                self._failed.append((request, error))
        absorbed = perf_counter()
        # 8. Commit: the accepted tokens' K/V move next to the prefix.
        if commit and accepted:
            self.backend.commit(kept)
        done = perf_counter()
        # 9. Finished and failed requests leave.
        for result, verdict in changed:
            if verdict.finish_reason is not None:
                if result.request.finished is not None:
                    result.request.finished(result.request)
                self.cancel(result.request.id)
            elif result.input.chunk:
                self._scheduler.remember(result.request)
        failed, self._failed, self._last_results = self._failed, [], results
        for request, _ in failed:
            request.sequence.finish_reason = "error"
            self.cancel(request.id)
        return FinishedStep(accepted, failed, (absorbed - begin) / max(1, len(results)), done - absorbed, done)
