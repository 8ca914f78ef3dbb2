"""Runs jobs, one after another, each a row of the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from lookahead.algorithm.sources import SharedMemory
from lookahead.bench.costs import behind
from lookahead.bench.jobs import Job
from lookahead.bench.methods import Method, plain
from lookahead.bench.prompts import Prompt, messages
from lookahead.bench.results import Results, Row
from lookahead.bench.stock import Stock
from lookahead.stats import Stats

WARM_UP = 4
"""Tokens of the run before the first that is timed, on a CPU. Compiling, capturing and caches are not compared."""
WARM_UP_STOCK = 32
"""The same on a GPU, for what captures nothing."""

Load = Callable[..., Any]
"""(dtype=, backend=) -> a loaded model; None for the run's own."""


class Models:
    """Every model that the methods ask for, made when first needed. The weights of a dtype are loaded once: its
    backends share them."""

    def __init__(
        self,
        own: Any,
        load: Load | None = None,
        draft: Callable[[], Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.own, self._load, self._draft, self._say = own, load, draft, say
        self._made: dict[tuple[str, str | None], Any] = {}
        self._stock: dict[int, Stock] = {}
        self._alone: Any = None

    def of(self, method: Method) -> Any:
        if hasattr(self.own, "alone") and method.ranks == 1:
            self._alone = self._alone or self.own.alone()
            return self._alone
        if method.dtype is None and method.backend is None:
            return self.own
        own = _place(self.own)
        self._made.setdefault(own, self.own)
        place = method.dtype or own[0], method.backend
        if place not in self._made:
            self._made[place] = self._make(method, *place)
        return self._made[place]

    def _make(self, method: Method, dtype: str, backend: str | None) -> Any:
        """A model of this dtype; a backend that no method names is whatever `load` has chosen."""
        loaded = [lm for (its, _), lm in self._made.items() if its == dtype]
        for lm in loaded:
            if backend is None or backend == _place(lm)[1]:
                return lm
        if loaded and backend is not None:
            return behind(loaded[0], backend, self._say)
        if self._load is None:
            raise ValueError(f"method {method.label!r} needs another model than the one that was given")
        return self._load(dtype=dtype, backend=backend)

    def stock(self, method: Method) -> Stock:
        """transformers' own decoding; the backend is nothing to it."""
        lm = self.of(method)
        if id(lm.model) not in self._stock:
            self._stock[id(lm.model)] = Stock(lm)
        stock = self._stock[id(lm.model)]
        if method.how == "hf-assisted" and stock.draft is None and self._draft is not None:
            stock.draft = self._draft()
        return stock


def _place(lm: Any) -> tuple[str, str]:
    """A loaded model's dtype and backend, by the names that a method asks for them."""
    backend = type(getattr(lm.backend, "inner", lm.backend)).__name__
    return str(lm.dtype).removeprefix("torch."), backend.removesuffix("Backend").lower()


@dataclass
class Answered:
    """A conversation's outcome: per turn the tokens, their text and why they ended."""

    tokens: list[list[int]]
    texts: list[str]
    stats: Stats


class Runner:
    """Runs jobs and writes rows. `results` None is a rank that follows: it runs the same and writes nothing."""

    def __init__(self, models: Models, results: Results | None, *, warm: bool = False) -> None:
        self.models, self.results, self.warm = models, results, warm
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
        """What is missing; on several ranks what rank 0 lacks, which alone has the results."""
        todo = [] if self.results is None else self.missing(jobs)
        group = getattr(self.models.own, "group", None)
        if group is None:
            return todo
        said = group.agree("the jobs to run", json.dumps([job.key for job in todo]).encode())
        by_key = {job.key: job for job in jobs}
        return [by_key[key] for key in json.loads(said[0])]

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Row]]:
        """Each job, with its row."""
        first = {job.prompt: job for job in reversed(jobs)}
        longest = max(map(self.tokens_of, first.values()), default=0)
        prompts = {job.prompt for job in jobs}
        self._longest = max(prompts, key=lambda p: len(p.turns[0]) + len(p.system or ""), default=None)
        for job in jobs:
            row = self.row(job, longest)
            if self.results is not None:
                self.results.add(row)
            yield job, row

    def tokens_of(self, job: Job) -> int:
        """The most tokens that this conversation may take, about: earlier answers count as if they were full."""
        lm = self.models.of(job.method)
        turns = len(job.prompt.turns)
        encoded = [lm.encode(text, raw=True) for text in (job.prompt.system, *job.prompt.turns) if text]
        return sum(map(len, encoded)) + (job.max_tokens + 64) * turns + 512

    def row(self, job: Job, longest: int = 0) -> Row:
        """The job's row; an error that the prompt or the model causes is a row, too, and the next job has its turn."""
        row: Row = {
            "kind": "answer",
            "key": job.key,
            "set": job.data,
            "prompt": job.prompt.id,
            "method": job.method.label,
            "how": job.method.how,
            "config": plain(job.method.config),
            "temperature": job.temperature,
            "max_tokens": job.max_tokens,
            "seed": job.seed,
            "repeat": job.repeat,
        }
        try:
            done, counters = self._timed(job, longest)
        except (ValueError, NotImplementedError) as error:
            return {**row, "error": " ".join(str(error).split())[:300]}
        if job.method.how == "lookahead" and job.method.config is None:
            row["config"] = plain(self.models.of(job.method).default_config)
        row |= asdict(done.stats) | {"compression": done.stats.compression}
        row |= {"tokens": done.tokens, "texts": done.texts}
        if counters is not None:
            row["ranks"] = counters
        return row

    def _timed(self, job: Job, longest: int) -> tuple[Answered, Row | None]:
        lm, method = self.models.of(job.method), job.method
        if method not in self._ready:
            self._ready.add(method)
            lm.memory = SharedMemory()
            prepare = getattr(lm.backend, "prepare", None)
            if prepare is not None and lm.device.type == "cuda" and not method.stock:
                prepare(min(longest, lm.backend.max_length or longest), (method.config or lm.default_config).budget)
            answer(self.models, self._warm_up(job), longest)
        self._fresh(lm, job)
        reset = getattr(lm.backend, "reset", None)
        if reset is not None and hasattr(lm.backend, "counters"):
            reset()
        done = answer(self.models, job, longest)
        counters = getattr(lm.backend, "counters", None)
        return done, None if counters is None or method.stock else asdict(counters)

    def _warm_up(self, job: Job) -> Job:
        """What to run before a method is timed. On a GPU the longest prompt and a whole answer, because what is
        captured or compiled is so when its shape first comes. transformers with a cache that grows captures nothing:
        the beginning of an answer will do, and a whole one may take half a minute."""
        prompt, tokens = job.prompt, min(WARM_UP, job.max_tokens)
        if self.models.of(job.method).device.type == "cuda":
            captures = not job.method.stock or job.method.how == "hf-static"
            prompt, tokens = self._longest or prompt, job.max_tokens if captures else min(WARM_UP_STOCK, job.max_tokens)
        return replace(job, prompt=replace(prompt, turns=prompt.turns[:1]), max_tokens=tokens)

    def _fresh(self, lm: Any, job: Job) -> None:
        """No method may learn from another, nor from its own earlier repeat of the same answer."""
        if not self.warm:
            lm.memory = SharedMemory()
            return
        lm.memory = self._memory.setdefault(job.group, SharedMemory())


def answer(models: Models, job: Job, longest: int = 0) -> Answered:
    """All turns of a conversation; a later turn's prompt holds the method's own earlier answers."""
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
            done = lm.generate(
                ids,
                method=method.how,
                config=config,
                max_tokens=job.max_tokens,
                temperature=job.temperature,
                seed=job.seed,
            )
            output, stats = done.token_ids, done.stats
        tokens.append([int(token) for token in output])
        texts.append(text_of(lm, output))
        parts.append(stats)
    return Answered(tokens, texts, Stats.total(parts))


def prompt_ids(lm: Any, prompt: Prompt, answers: Sequence[str]) -> list[int]:
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
    if name is None:
        yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
