"""Runs jobs one after another and makes a record of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any

from lookahead.algorithm.sources import SharedMemory
from lookahead.bench.run.methods import Method, plain
from lookahead.bench.run.models import Models
from lookahead.bench.run.pace import WARM_UP_ANSWERS, Pace
from lookahead.bench.run.prompts import Prompt, messages
from lookahead.bench.run.results import Record, Results, compact, key_of
from lookahead.stats import Stats

WARM_UP = 4
"""Tokens of the run before the first that is timed, on a CPU. Compiling, capturing and caches are not compared."""
WARM_UP_STOCK = 32
"""The same on a GPU, for what captures nothing."""


@dataclass(frozen=True)
class Job:
    """One conversation of a set, answered once by one method.

    `number` is the prompt's index in its set, `repeat` counts the times that the same answer is timed.
    """

    data: str
    number: int
    prompt: Prompt = field(repr=False)
    method: Method
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    repeat: int = 0
    warm: bool = False

    @property
    def key(self) -> str:
        """The name of everything that decides the answer and its time."""
        prompt = self.prompt
        facts: Record = {
            "kind": "answer",
            "set": self.data,
            "prompt": prompt.id,
            "text": key_of({"turns": prompt.turns, "system": prompt.system, "raw": prompt.raw}),
            "method": self.method.facts(),
            "warm": [self.warm, self.number] if self.warm else False,
        }
        return key_of(facts | self.settings)

    @property
    def settings(self) -> Record:
        return {name: getattr(self, name) for name in ("max_tokens", "temperature", "seed", "repeat")}

    @property
    def group(self) -> tuple[str, Method, float, int]:
        """Jobs that a warm method runs as one: what it learned from one prompt helps with the next."""
        return self.data, self.method, self.temperature, self.repeat


class Runner:
    """`results` None is a rank that follows: it runs the same jobs and writes nothing. `brief` records have hashes of
    the tokens instead of tokens, and texts of prompts with a reference only."""

    def __init__(self, models: Models, results: Results | None, *, warm: bool = False, brief: bool = False) -> None:
        self.models, self.results, self.warm, self.brief = models, results, warm, brief
        self.pace = Pace()
        self._ready: set[Method] = set()
        self._longest: Prompt | None = None
        self._memory: dict[Any, SharedMemory] = {}

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """What has yet to be run. A warm group that was cut short is run from its beginning: it has forgotten."""
        assert self.results is not None
        lacking = [job for job in jobs if job.key not in self.results]
        if self.warm:
            groups = {job.group for job in lacking}
            lacking = [job for job in jobs if job.group in groups]
        return lacking

    def agreed(self, jobs: Sequence[Job]) -> list[Job]:
        """What is missing. On several ranks it is what rank 0 lacks, which alone has the results."""
        todo = [] if self.results is None else self.missing(jobs)
        if self.results is not None:
            self.pace = Pace(jobs, self.results.records)
        by_key = {job.key: job for job in jobs}
        return [by_key[key] for key in self._as_rank_0("the jobs to run", [job.key for job in todo])]

    def _as_rank_0(self, topic: str, own: Any) -> Any:
        """What rank 0 says; without ranks, `own`."""
        group = getattr(self.models.own, "group", None)
        return own if group is None else json.loads(group.agree(topic, json.dumps(own).encode())[0])

    def run(self, jobs: Sequence[Job], until: float | None = None) -> Iterator[tuple[Job, Record]]:
        """Run the jobs; none begins that would probably not end before `until`, a time of `monotonic`."""
        first = {job.prompt: job for job in reversed(jobs)}
        longest = max(map(self._most_tokens, first.values()), default=0)
        self._longest = max(first, key=lambda p: len(p.turns[0]) + len(p.system or ""), default=None)
        for job in jobs:
            if until is not None and not self._as_rank_0("whether there is time", self._in_time(job, until)):
                return
            record = self.record(job, longest)
            if self.results is not None:
                self.results.add(compact(record, job.prompt.reference is not None) if self.brief else record)
            yield job, record

    def _in_time(self, job: Job, until: float) -> bool:
        answers = 1 if job.method in self._ready else WARM_UP_ANSWERS
        return monotonic() + answers * (self.pace.seconds(job) or 0.0) < until

    def _most_tokens(self, job: Job) -> int:
        """The most tokens that this conversation may take, about: earlier answers count as if they were full."""
        lm = self.models.of(job.method)
        encoded = [lm.encode(text, raw=True) for text in (job.prompt.system, *job.prompt.turns) if text]
        return sum(map(len, encoded)) + (job.max_tokens + 64) * len(job.prompt.turns) + 512

    def record(self, job: Job, longest: int = 0) -> Record:
        """Run the job. A mistake in the prompt or the model becomes a record with its error, and the run continues."""
        record: Record = {
            "kind": "answer",
            "key": job.key,
            "set": job.data,
            "prompt": job.prompt.id,
            "method": job.method.label,
            "how": job.method.how,
            "config": plain(job.method.config),
            **job.settings,
        }
        try:
            answered, counters = self._timed(job, longest)
        except (ValueError, NotImplementedError) as error:
            return {**record, "error": " ".join(str(error).split())[:300]}
        if job.method.how == "lookahead" and job.method.config is None:
            record["config"] = plain(self.models.of(job.method).default_config)
        record |= answered
        if counters is not None:
            record["ranks"] = counters
        return record

    def _timed(self, job: Job, longest: int) -> tuple[Record, Record | None]:
        """The answer, after a warm-up if the method is new; and the ranks' counters, if there are any."""
        lm, method = self.models.of(job.method), job.method
        if method not in self._ready:
            self._ready.add(method)
            lm.memory = lm.memory.new()
            if lm.device.type == "cuda" and not method.stock:
                budget = (method.config or lm.default_config).budget
                lm.backend.prepare(min(longest, lm.backend.max_length or longest), budget)
            answer(self.models, self._warm_up(job), longest)
        # No method may learn from another, nor, unless the run is warm, from its own earlier answers.
        lm.memory = self._memory.setdefault(job.group, lm.memory.new()) if self.warm else lm.memory.new()
        counted = method.ranks > 1 and not method.stock
        if counted:
            lm.backend.reset()
        begin = monotonic()
        done = answer(self.models, job, longest)
        self.pace.count(job, monotonic() - begin)
        return done, asdict(lm.backend.counters) if counted else None

    def _warm_up(self, job: Job) -> Job:
        """What to run before a method is timed.

        On a GPU it is the longest prompt and a whole answer, because a step is captured or compiled when its shape
        first comes. transformers with a cache that grows captures nothing: there the beginning of an answer will do.
        """
        prompt, tokens = job.prompt, min(WARM_UP, job.max_tokens)
        if self.models.of(job.method).device.type == "cuda":
            captures = not job.method.stock or job.method.how == "hf-static"
            prompt, tokens = self._longest or prompt, job.max_tokens if captures else min(WARM_UP_STOCK, job.max_tokens)
        return replace(job, prompt=replace(prompt, turns=prompt.turns[:1]), max_tokens=tokens)


def answer(models: Models, job: Job, longest: int = 0) -> Record:
    """All turns of a conversation; a later turn's prompt holds the method's own earlier answers.

    Returns the counters of all turns together, and tokens and text of each.
    """
    lm, method = models.of(job.method), job.method
    tokens: list[list[int]] = []
    texts: list[str] = []
    parts: list[Stats] = []
    for _ in job.prompt.turns:
        ids = prompt_ids(lm, job.prompt, texts)
        limit = lm.backend.max_length
        if limit is not None and len(ids) + job.max_tokens > limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and {job.max_tokens} new ones do not fit the context of {limit}"
            )
        if method.stock:
            if job.temperature:
                raise ValueError("transformers draws other numbers than we do; sampling is compared among our methods")
            stock = models.stock(method)
            with attention(lm.model, method.attention):
                output, stats = stock.run(method.how, ids, job.max_tokens, max(longest, len(ids) + job.max_tokens))
        else:
            config = method.config if method.how == "lookahead" else None
            settings = {"max_tokens": job.max_tokens, "temperature": job.temperature, "seed": job.seed}
            done = lm.generate(ids, method=method.how, config=config, **settings)
            output, stats = done.token_ids, done.stats
        tokens.append([int(token) for token in output])
        texts.append(text_of(lm, output))
        parts.append(stats)
    total = Stats.total(parts)
    return {**asdict(total), "compression": total.compression, "tokens": tokens, "texts": texts}


def prompt_ids(lm: Any, prompt: Prompt, answers: Sequence[str] = ()) -> list[int]:
    """The ids of the turn after these answers. A model without a chat template gets plain text."""
    if prompt.raw or not getattr(lm.tokenizer, "chat_template", None):
        said = [part for pair in zip(prompt.turns, answers, strict=False) for part in pair]
        parts = [*([prompt.system] if prompt.system else []), *said, prompt.turns[len(answers)]]
        return list(lm.encode("\n\n".join(parts), raw=True))
    return list(lm.encode(messages(prompt, answers)))


def text_of(lm: Any, tokens: Sequence[int]) -> str:
    """The same for every method: a second turn must not differ because the first was decoded differently."""
    kept = [token for token in tokens if token not in lm.stop_ids]
    return str(lm.tokenizer.decode(kept, skip_special_tokens=True))


@contextmanager
def attention(model: Any, name: str | None) -> Iterator[None]:
    """transformers' attention of this name while the block runs; None leaves it alone."""
    before = model.config._attn_implementation
    if name is not None:
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        if name is not None:
            model.set_attn_implementation(before)
