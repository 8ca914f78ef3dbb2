"""Runs tasks token by token and with lookahead, in turn, and counts both by `Stats`.

A *way* is how a task is answered: token by token (`plain`), with an empty memory for each task (`cold`), with what
earlier tasks of the workload have left in it (`warm`), or by transformers (`hf-greedy`). All ways answer a task before
the next task is begun, so that a machine that slows down slows all of them. Each way has a salt of its own for each
task: no way finds keys and values that another has left, and within a task they are shared, as a server does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.bench.run.results import Record
from lookahead.bench.run.stock import Stock
from lookahead.bench.workloads.drift import Drift
from lookahead.bench.workloads.overlap import Overlap
from lookahead.bench.workloads.tasks import Message, Task, Workload
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.request import Request, TokenMask
from lookahead.engine.settings import RequestSettings
from lookahead.generate import LookaheadModel
from lookahead.loading.load import greedy_settings
from lookahead.stats import Stats

PLAIN, COLD, WARM, STOCK = "plain", "cold", "warm", "hf-greedy"
CHANGED_LINES = 3
Bind = Callable[[dict[str, Any]], TokenMask]
"""A new mask that lets an answer be nothing but JSON of this schema."""


@dataclass
class Tally:
    """What one way gave on one row: its counters, its time, and its outputs by task, turn and sample."""

    parts: list[Stats] = field(default_factory=list)
    wall: float = 0.0
    outputs: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)

    def record(self) -> Record:
        """The counters of all answers. `prompt_seconds`, `verify_seconds` and `host_seconds` are parts of the seconds
        of all answers together: the time to the first token, the passes after it, and the rest."""
        total = Stats.total(self.parts)
        prompt = sum(one.first_token_seconds - one.queue_seconds for one in self.parts)
        verify = max(0.0, total.forward_seconds - prompt)
        kept = {name: value for name, value in asdict(total).items() if not name.startswith("expected")}
        return {
            **kept,
            "wall": self.wall,
            "compression": total.compression,
            "tokens_per_second": total.generated_tokens / self.wall if self.wall else 0.0,
            "prompt_seconds": prompt,
            "verify_seconds": verify,
            "host_seconds": max(0.0, total.seconds - total.queue_seconds - prompt - verify),
        }


class Measurement:
    """One repeat of one workload on a loaded model. `rows` are its figures by row, `errors` the tasks left out."""

    def __init__(
        self,
        lm: LookaheadModel,
        workload: Workload,
        tokens: int,
        seed: int = 0,
        stock: Stock | None = None,
        bind: Bind | None = None,
        repeat: int = 0,
    ) -> None:
        self.lm, self.workload, self.tokens, self.seed = lm, workload, tokens, seed
        self.stock, self.bind, self.repeat = stock, bind, repeat
        self.ways = [PLAIN, COLD, WARM]
        self.warm = lm.memory.new()
        self.overlap = Overlap()
        self.rows: dict[str, dict[str, Tally]] = {}
        self.shares: dict[str, Any] = {}
        self.errors: list[str] = []

    def run(self, tasks: Sequence[Task]) -> Record:
        bound = self.bind is not None and any(task.schema for task in tasks)
        if self.stock is not None and self.workload.samples == 1 and not bound:  # the rest is not comparable
            self.ways.append(STOCK)
        drift = self.workload.drift
        with Drift(self.lm, drift, self.seed) if drift else nullcontext() as weights:
            for epoch in range(self.workload.epochs):
                if weights is not None and epoch:
                    weights.step()
                self._run_epoch(tasks, epoch)
        return {
            "rows": {row: {way: tally.record() for way, tally in found.items()} for row, found in self.rows.items()},
            "answers": {row: sum(map(len, found[PLAIN].outputs.values())) for row, found in self.rows.items()},
            "equal": {row: {way: equal(found[PLAIN], found[way]) for way in found} for row, found in self.rows.items()},
            "overlap": self.shares,
            "errors": self.errors,
        }

    def _run_epoch(self, tasks: Sequence[Task], epoch: int) -> None:
        row = self.workload.name if self.workload.epochs == 1 else f"{self.workload.name}, epoch {epoch + 1}"
        tallies = self.rows[row] = {way: Tally() for way in self.ways}
        for number, task in enumerate(tasks):
            try:
                self._run_task(tallies, number, task, epoch)
            except ValueError as error:  # a prompt that does not fit into the context
                self.errors.append(f"{task.id}: {' '.join(str(error).split())[:200]}")
        self.shares[row], self.overlap = self.overlap.shares(), self.overlap.next()

    def _run_task(self, tallies: dict[str, Tally], number: int, task: Task, epoch: int) -> None:
        """All ways, token by token first: its answer is what a prediction is made of."""
        rest = self.ways[1:]
        turned = rest[number % len(rest) :] + rest[: number % len(rest)]
        done, prompts = dict[str, Tally](), list[list[int]]()
        for way in (PLAIN, *turned):
            memory = self.warm if way == WARM else self.lm.memory.new()
            done[way] = Tally()
            transcript: list[Message] = []
            for turn, messages in enumerate(task.turns):
                transcript += messages
                prompt = encode(self.lm, transcript)
                expected = done[PLAIN].outputs.get((number, turn)) if self.workload.predicted and way != PLAIN else None
                prediction = [] if expected is None else changed(self.lm, expected[0])
                outputs = self._answer(done[way], way, prompt, task, memory, epoch, number, prediction)
                done[way].outputs[number, turn] = outputs
                transcript.append({"role": "assistant", "content": text_of(self.lm, outputs[0])})
                if way == PLAIN:
                    prompts.append(prompt)
        for turn, prompt in enumerate(prompts):
            self.overlap.add(prompt, done[PLAIN].outputs[number, turn])
        for way, tally in done.items():  # only now: a task that failed in one way counts in none
            tallies[way].parts += tally.parts
            tallies[way].wall += tally.wall
            tallies[way].outputs.update(tally.outputs)

    def _answer(
        self, tally: Tally, way: str, prompt: list[int], task: Task, memory: SharedMemory, epoch: int, number: int,
        prediction: Sequence[int],
    ) -> list[list[int]]:  # fmt: skip
        """All samples of one prompt, at once."""
        if way == STOCK and self.stock is not None:
            output, stats = self.stock.run(STOCK, prompt, self.tokens, len(prompt) + self.tokens)
            tally.parts.append(stats)
            tally.wall += stats.seconds
            return [[int(token) for token in output]]
        count, lm = self.workload.samples, self.lm
        config = LookaheadConfig.autoregressive() if way == PLAIN else lm.default_config
        salt = f"{self.workload.name} {self.repeat} {way}"
        if count == 1:  # samples find their prompt in the cache, also in later epochs
            salt += f" {number}"
        begin = perf_counter()
        streams = []
        for sample in range(count):
            seed = self.seed + (epoch * 1000 + number) * count + sample
            settings = RequestSettings(self.tokens, temperature=float(count > 1), seed=seed)
            sequence = DecodingSequence(
                prompt,
                lm.exact_config(config),
                settings.sampling(greedy_settings(lm.model).get("repetition_penalty", 1.0)),
                StopRules(self.tokens, lm.stop_ids, lm.backend.max_length),
                memory=memory,
                prediction=prediction,
            )
            mask = self.bind(task.schema) if task.schema is not None and self.bind is not None else None
            streams.append(lm.client.submit(Request(sequence, lm.verifier(sequence), mask=mask, salt=salt)))
        for stream in streams:
            stream.wait()
        tally.wall += perf_counter() - begin
        sequences = [stream.request.sequence for stream in streams]
        tally.parts += [sequence.stats for sequence in sequences]
        return [sequence.output for sequence in sequences]


def equal(expected: Tally, found: Tally) -> int:
    """How many answers are equal, token for token."""
    return sum(
        one == other
        for key, outputs in expected.outputs.items()
        for one, other in zip(outputs, found.outputs.get(key, []), strict=False)
    )


def encode(lm: LookaheadModel, transcript: Sequence[Message]) -> list[int]:
    """A model without a chat template gets plain text."""
    if getattr(lm.tokenizer, "chat_template", None):
        return list(lm.encode(list(transcript)))
    return list(lm.encode("\n\n".join(message["content"] for message in transcript), raw=True))


def text_of(lm: LookaheadModel, tokens: Sequence[int]) -> str:
    kept = [token for token in tokens if token not in lm.stop_ids]
    return str(lm.tokenizer.decode(kept, skip_special_tokens=True))


def changed(lm: LookaheadModel, answer: Sequence[int]) -> list[int]:
    """The answer with three of its lines replaced, at most every third, as token ids."""
    lines = text_of(lm, answer).split("\n")
    filled = [index for index, line in enumerate(lines) if line.strip()]
    count = min(CHANGED_LINES, len(filled) // 3)
    for i in range(count):
        index = filled[(2 * i + 1) * len(filled) // (2 * count)]
        indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        lines[index] = f"{indent}replaced_{i} = {i}"
    return list(lm.tokenizer("\n".join(lines), add_special_tokens=False)["input_ids"])
