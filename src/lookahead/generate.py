"""The library's interface: `load()` a model, then `generate()` or `stream()` text. All methods use the same engine."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, overload

import torch

from lookahead.algorithm.budget import for_bigrams
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.choose import make_backend
from lookahead.backends.exact import default_within, exact_config
from lookahead.backends.failures import (
    CompilerError,
    DeviceError,
    DeviceMemoryError,
    brief,
    clear_errors,
    out_of_memory,
)
from lookahead.cache import cache_dir
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.answer import Answer, Completion, Piece, Stream
from lookahead.engine.client import EngineClient
from lookahead.engine.engine import Engine
from lookahead.engine.processors import PathVerifier, Rule, uniform_draw, with_adjustment
from lookahead.engine.prompt import Prompt, as_plain, check_batch, encode_prompt
from lookahead.engine.request import Request, raise_errors
from lookahead.engine.request_stream import RequestStream
from lookahead.engine.settings import RequestSettings
from lookahead.engine.text import StopStrings, TextStream
from lookahead.loading.bigrams import bigrams, prefix_of
from lookahead.loading.default import fit_budget, fitted_default, tuned_config
from lookahead.loading.load import greedy_settings, logits_processors, open_model, stop_ids
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.quantised import activations_name, weights_name
from lookahead.stats import Stats

KNOWN_CONFIGS = 64
"""The size of the cache of fitted configs. What was changed about a config is logged once while it is cached."""

LONGEST = 1 << 20
"""The longest prompt to prepare for, in tokens, if the model has no limit."""

logger = logging.getLogger("lookahead")

PROMPT_OF_RANK_0: Any = None
"""The default prompt: none. Only the ranks of a `parallel.ParallelModel` accept it; they take rank 0's request."""


class LookaheadModel:
    """A causal LM with its tokenizer, its backend, and an engine that lives as long as the model.

    It is thread-safe: requests from all threads run in one batch, in the model's own thread. `default_config` is the
    config of calls without one.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        config: LookaheadConfig | None = None,
        backend: str = "auto",
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.backend = make_backend(model, backend, log)
        self.device, self.dtype = self.backend.device, self.backend.dtype
        self.engine = Engine(self.backend)
        self.client = EngineClient(self.engine)
        self.remember_fits(log or logger.warning)
        self.default_config = default_within(self.backend) if config is None else self.exact_config(config)
        self.memory = SharedMemory()
        self.stop_ids = stop_ids(model, tokenizer)

    @property
    def weights(self) -> str:
        """The number format of the weights, as `load` takes it for `dtype`: 'bfloat16', say, or 'fp8'."""
        return weights_name(self.model, self.dtype)

    @property
    def rounding(self) -> str | None:
        """The number format whose rounding may make a text differ from that of token-by-token decoding; None on a
        backend that rounds every row alike, and in fp32."""
        if self.backend.capabilities.exact_nodes is not None:
            return None
        half = self.dtype in (torch.float16, torch.bfloat16)
        return activations_name(self.model) or (str(self.dtype).removeprefix("torch.") if half else None)

    @property
    def front(self) -> EngineClient:
        """Deprecated: `client`."""
        warnings.warn("LookaheadModel.front is deprecated; use client", DeprecationWarning, stacklevel=2)
        return self.client

    def prepare(self, sequences: int = 1, log: Callable[[str], None] | None = None) -> float:
        """Compile and capture in advance all that up to `sequences` concurrent sequences may need, so that no request
        waits for it: prompts and steps of every size, greedy or sampled, with penalties, masks and log-probabilities.

        Returns the seconds that it took. Steps that were captured before, and backends that capture none, take no time.
        """
        begin, before, backend = perf_counter(), self.backend.captures, self.backend
        budget = max(self.default_config.budget, default_within(backend).budget)
        times: Mapping[str, float] = {}
        try:
            times = self.client.call(lambda: backend.prepare(backend.max_length or LONGEST, budget, sequences))
        except RuntimeError as error:  # torch's own error for it, or CUDA's while it captures
            if not out_of_memory(error):
                raise
            warn = log or logger.warning
            warn(f"note: not all steps are captured in advance, and some requests will wait: {brief(error)}")
        seconds = perf_counter() - begin
        if log is not None and backend.captures > before:
            spent = ", ".join(f"{what} {taken:.1f} s" for what, taken in times.items())
            log(f"captured {backend.captures - before} parts of steps in {seconds:.1f} s (so far: {spent})")
        return seconds

    def learn_bigrams(self, log: Callable[[str], None] | None = None) -> None:
        """Give the memory the model's bigrams, unless they would take too long or too much memory (see
        `loading.bigrams`)."""
        nodes = self.default_config.budget
        try:
            prefix = prefix_of(self.tokenizer)
            top = self.client.call(lambda: bigrams(self.backend, prefix, nodes, cache_dir(), log))
        except (MemoryError, DeviceMemoryError) as error:
            (log or logger.warning)(f"note: the model has no bigrams: {brief(error)}")
            return
        self.memory.set_bigrams(top)

    def reload_weights(self) -> None:
        """Call this after changing the weights of `model`, before the next request. Its text is then that of a model
        which was loaded with these weights.

        Change weights in place, as an optimizer does: on the graph backend captured steps read them where they are.
        The CPU backend copies them again, which takes a second or two for 135M parameters. What was learned for
        drafting is kept, because it cannot change a text. Raises RuntimeError while requests run.
        """
        self.client.call(self.engine.reload_weights)

    def remember_fits(self, log: Callable[[str], None]) -> None:
        """Cache the results of `exact_config`, so that what it changes about a config is logged once."""
        fit = partial(exact_config, backend=self.backend, log=log)
        self._exact: Callable[[LookaheadConfig], LookaheadConfig] = lru_cache(KNOWN_CONFIGS)(fit)

    def exact_config(self, config: LookaheadConfig) -> LookaheadConfig:
        """The config as this model's backend runs it exactly; see `backends.exact.exact_config`."""
        return self._exact(config)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, prompt: Prompt = PROMPT_OF_RANK_0, *,
        max_tokens: int = 256, min_tokens: int = 0, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int | None = None, repetition_penalty: float | None = None,
        presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None, stop: str | Sequence[str] | None = (), raw: bool = False,
        method: str = "lookahead", config: LookaheadConfig | None = None,
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *,
        max_tokens: int = 256, min_tokens: int = 0, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int | None = None, repetition_penalty: float | None = None,
        presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None, stop: str | Sequence[str] | None = (), raw: bool = False,
        method: str = "lookahead", config: LookaheadConfig | None = None,
    ) -> list[Completion]: ...  # fmt: skip

    def generate(
        self, prompt: Prompt | Sequence[Prompt] = PROMPT_OF_RANK_0, *,
        max_tokens: int = 256, min_tokens: int = 0, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int | None = None, repetition_penalty: float | None = None,
        presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None, stop: str | Sequence[str] | None = (), raw: bool = False,
        method: str = "lookahead", config: LookaheadConfig | None = None,
        **unknown: Any,
    ) -> Completion | list[Completion]:  # fmt: skip
        """Answer one prompt with a `Completion`, or a list of prompts with a list of them, decoded as one batch.

        A prompt is text, chat messages or token ids. Text becomes a user message of the chat template, unless `raw`.

        - `max_tokens`, `min_tokens`: the maximum and minimum number of tokens of the answer.
        - `temperature`: 0 is greedy. `top_k` (0: all), `top_p` and `min_p` narrow the tokens that are drawn from.
        - `seed`: the same seed gives the same text. None: a random one, which is in the `Completion`.
        - `repetition_penalty`: None takes it from the model's generation config, or is 1.
        - `presence_penalty`, `frequency_penalty` are subtracted from tokens' logits, and `logit_bias` is added.
        - `logprobs`: 0 returns the log-probability of every chosen token, n also those of the n likeliest.
        - `stop`: one or several stop strings. The text ends before the first.
        - `method`: 'lookahead', 'autoregressive', 'jacobi' or 'prompt-lookup'.
        - `config`: for the method 'lookahead' only. None is the model's `default_config`.
        """
        many, answers = self._answers(prompt, locals())
        completions = self.run(answers)
        return completions if many else completions[0]

    def run(self, answers: Sequence[Answer]) -> list[Completion]:
        """Run these answers together until all have ended."""
        streams: list[RequestStream] = []
        try:
            for answer in answers:
                streams.append(self.client.submit(answer.request))
            for stream in streams:
                stream.wait()
        finally:
            for stream in streams:
                self.client.cancel(stream)
            for stream in streams:
                stream.join()
        for answer, stream in zip(answers, streams, strict=True):
            answer.read(answer.sequence.output, answer.sequence.finish_reason)
            for event in stream if answer.logprobs is not None else ():
                answer.read_logprobs(event)
        return [answer.completion() for answer in answers]

    def stream(
        self, prompt: Prompt = PROMPT_OF_RANK_0, *,
        max_tokens: int = 256, min_tokens: int = 0, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int | None = None, repetition_penalty: float | None = None,
        presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None, stop: str | Sequence[str] | None = (), raw: bool = False,
        method: str = "lookahead", config: LookaheadConfig | None = None,
        **unknown: NoReturn,
    ) -> Stream:  # fmt: skip
        """Answer one prompt piece by piece, as steps accept tokens. The settings are those of `generate`."""
        _, (answer,) = self._answers(prompt, locals(), single=True)
        return Stream(self.client, answer)

    def steps(self, prompt: Prompt, settings: RequestSettings) -> Iterator[Stats]:
        """Generate one answer, and yield its statistics after every step: the same object each time, updated.

        No other request shares its steps, and each begins when the caller asks for it, so that they can be timed.
        """
        engine, request = Engine(self.backend), self._answer(as_plain(prompt), settings).request
        try:
            self.client.call(lambda: engine.submit(request))
            while request.sequence.finish_reason is None:
                for _ in raise_errors(self.client.call(engine.step)):
                    yield request.sequence.stats
        finally:
            self.client.release(lambda: engine.cancel(request.id))

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A prompt's token ids. Text becomes one user message of the chat template, unless `raw`. `tools` are the
        functions that the template describes to the model, and `template_variables` its other variables, such as
        `enable_thinking`. With `continue_final_message` among them the last message is left open, to be continued."""
        variables = template_variables
        return encode_prompt(self.tokenizer, self.name, self.backend.vocab_size, prompt, raw, tools, variables)

    def verifier(self, sequence: DecodingSequence) -> PathVerifier | None:
        """The verifier for the logits processors of the model's generation config, or None if there are none.

        A repetition penalty needs no verifier: the backend applies it (`SamplingParams`).
        """
        made = logits_processors(self.model, sequence.prompt_tokens, sequence.rules.max_tokens, self.stop_ids)
        if made is None:
            return None
        sampling = sequence.sampling
        rule = Rule(
            processors=with_adjustment(made, sequence),
            draw=None if sampling.greedy else uniform_draw(sampling.seed, sampling, sequence.generated),
        )
        return PathVerifier([sequence], torch.tensor([sequence.tokens], device=self.device), rule)

    def _answers(self, prompt: Any, parameters: Mapping[str, Any], single: bool = False) -> tuple[bool, list[Answer]]:
        """Whether this is a batch of prompts, and an answer for each, from the parameters of `generate` or `stream`."""
        settings, prompt = RequestSettings.of(parameters), as_plain(prompt)
        many = check_batch(prompt, single)
        return many, [self._answer(single_prompt, settings) for single_prompt in (prompt if many else [prompt])]

    def _answer(self, prompt: Prompt, settings: RequestSettings) -> Answer:
        begin = perf_counter()
        method, config = settings.method, settings.config
        if config is None:
            config = self.default_config if method == "lookahead" else LookaheadConfig.for_method(method)
        elif not isinstance(config, LookaheadConfig):
            raise ValueError(f"config={config!r:.60} must be a LookaheadConfig, such as LookaheadConfig(window=3)")
        elif method != "lookahead":
            raise ValueError(f"config belongs to method 'lookahead', not {method!r}; leave it out")
        config = self.exact_config(config)
        # The engine searches its own text for stop strings; the other text belongs to the caller's thread.
        stops = StopStrings(settings.stop_strings)
        ends = TextStream(self.tokenizer, stops, settings.min_tokens).push_token if stops.stops else None
        sequence = DecodingSequence(
            self.encode(prompt, raw=settings.raw),
            config,
            settings.sampling(greedy_settings(self.model).get("repetition_penalty", 1.0)),
            StopRules(settings.max_tokens, self.stop_ids, self.backend.max_length, min_tokens=settings.min_tokens),
            ends=ends,
            memory=self.memory,
        )
        request = Request(sequence, self.verifier(sequence), begin=begin)
        return Answer(request, TextStream(self.tokenizer, stops, settings.min_tokens), method)


def load(
    name: str | Path | tuple[Any, Any] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    config: LookaheadConfig | None = None,
    log: Callable[[str], None] | None = None,
) -> LookaheadModel:
    """Load a model that is ready to generate.

    `name` is a hub id, a folder, a `.gguf` file or a (model, tokenizer) pair; without it the embedded
    SmolLM2-135M-Instruct is loaded. `backend` is 'graph' (models with a reader on CUDA, by far the faster), 'cpu' (the
    same models on a CPU), 'eager' (any model), or 'auto' for the best that runs the model. `dtype` is 'float32',
    'bfloat16', 'float16' or 'auto'; with 'fp8', 'fp8_dynamic', 'int8', 'int4' or 'mxfp4' the model is quantised while
    it is loaded, and has a text of its own (see `loading.formats`). Without a `config` the default config is the
    profile that `lookahead tune --save` wrote for this model and machine. Where there is no profile, the default is
    fitted to the cost of a step, which is measured once per model and machine. Raises DeviceError if the device is
    lost.
    """
    with clear_errors(torch.device("cuda")):
        model, tokenizer, label = open_model(name, dtype=dtype, device=device, log=log, fused=backend != "eager")
        loaded = prepared(model, tokenizer, label, config, backend, log)
    if log is not None and (asked := greedy_settings(model)):
        named = ", ".join(f"{name}={value!r:.40}" for name, value in asked.items())
        log(f"note: the model's generation config asks for {named}, which is applied")
    if log is not None and (rounding := loaded.rounding) is not None:
        log(
            f"note: in {rounding} on this backend, rounding may make a text differ from that of token-by-token decoding"
        )
    fit_to_machine(loaded, config, log)
    return loaded


def fit_to_machine(loaded: LookaheadModel, config: LookaheadConfig | None, log: Callable[[str], None] | None) -> None:
    """Set what is measured or computed once per model and machine: the default config, if none was given, the cost of a
    pass, and the model's bigrams."""
    with clear_errors(loaded.device):
        tuned = tuned_config(loaded.name, loaded.backend, log) if config is None else config
        if config is None:
            loaded.default_config = tuned or fitted_default(loaded.backend, log)
            fit_budget(loaded.engine.budget, loaded.backend, loaded.default_config, log)
        if "recycle" in loaded.default_config.active_sources:
            loaded.learn_bigrams(log)
        if tuned is None and loaded.memory.bigrams is not None:
            loaded.default_config = for_bigrams(loaded.default_config)


def prepared(
    model: Any,
    tokenizer: Any,
    name: str,
    config: LookaheadConfig | None,
    backend: str,
    log: Callable[[str], None] | None,
) -> LookaheadModel:
    """A `LookaheadModel` whose steps are captured. If a kernel does not compile, 'auto' is the eager backend."""
    loaded = LookaheadModel(model, tokenizer, name, config, backend, log)
    try:
        loaded.prepare(log=log)
        return loaded
    except CompilerError as error:
        if backend != "auto":
            raise
        (log or logger.warning)(f"note: {error}; the eager backend runs it")
    del loaded  # its weights and pages make room
    return LookaheadModel(model, tokenizer, name, config, "eager", log)


__all__ = ["Completion", "DeviceError", "LookaheadModel", "Piece", "Stream", "UnsupportedModelError", "load"]
