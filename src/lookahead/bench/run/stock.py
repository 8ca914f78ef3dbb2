"""transformers' own decoding, counted as ours is: `Stats` from the prompt's ids to the last token."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from lookahead.loading.load import static_generation
from lookahead.stats import Stats

PROMPT_LOOKUP = 10
"""The paper's prompt_lookup_num_tokens."""
SOURCES = {"hf-prompt-lookup": "prompt-lookup", "hf-assisted": "draft"}


class Streamer:
    """What `generate` calls with the prompt and then with every step's tokens: a step counter and a clock."""

    def __init__(self, stats: Stats, begin: float, source: str) -> None:
        self._stats, self._begin, self._source = stats, begin, source
        self._prompt = True

    def put(self, tokens: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        count = tokens.numel()
        fed = 0 if self._source else count  # `generate` does not say how many candidates a step was given
        self._stats.count_step(fed, count, [self._source] * (count - 1))
        self._stats.first_token_seconds = self._stats.first_token_seconds or perf_counter() - self._begin

    def end(self) -> None: ...


class Stock:
    """One model's `generate`, in the ways that are compared. `draft` is the small model of assisted generation."""

    def __init__(self, model: Any, draft: Any = None) -> None:
        self.lm, self.draft = model, draft
        # A streamer makes `generate` wait for every token. Where each step gives one token it is not needed, and on a
        # GPU the baseline would be the slower for it: there the first token is timed by itself.
        self.streams = model.device.type == "cpu"
        self._static: tuple[int, dict[str, Any]] | None = None

    def run(self, how: str, ids: list[int], max_tokens: int, longest: int) -> tuple[list[int], Stats]:
        """Greedy tokens and their counters. `longest` is the most tokens that any prompt and answer have."""
        options = self._options(how, longest)
        streamed = how in SOURCES or self.streams
        stats = Stats(prompt_tokens=len(ids))
        if not streamed:
            begin = perf_counter()
            self._generate(ids, 1, options)
            stats.first_token_seconds = perf_counter() - begin
        begin = perf_counter()
        more = {"streamer": Streamer(stats, begin, SOURCES.get(how, ""))} if streamed else {}
        output = self._generate(ids, max_tokens, {**options, **more})
        stats.seconds = perf_counter() - begin
        if not streamed:
            for _ in output:
                stats.count_step(1, 1, [])
        stats.generated_tokens = len(output)
        return output, stats

    def _options(self, how: str, longest: int) -> dict[str, Any]:
        if how == "hf-prompt-lookup":
            return {"prompt_lookup_num_tokens": PROMPT_LOOKUP}
        if how == "hf-assisted":
            if self.draft is None:
                raise ValueError("method 'hf-assisted' needs --draft-model, a smaller model with the same tokenizer")
            return {"assistant_model": self.draft}
        if how != "hf-static":
            return {}
        if self._static is None or self._static[0] < longest:
            self._static = longest, static_generation(self.lm.model, longest)
        options = self._static[1]
        options["past_key_values"].reset()
        return options

    def _generate(self, ids: list[int], count: int, options: dict[str, Any]) -> list[int]:
        prompt = torch.tensor([ids], device=self.lm.device)
        if "past_key_values" in options:
            options["past_key_values"].reset()
        output = self.lm.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=sorted(self.lm.stop_ids) or None,
            pad_token_id=0,
            **options,
        )
        return list(output[0, len(ids) :].tolist())
