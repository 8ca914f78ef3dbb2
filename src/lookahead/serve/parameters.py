"""A request body's fields as engine parameters: sampling, stop rules and the lookahead config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lookahead.config import LookaheadConfig, SamplingParams, StopRules, new_seed
from lookahead.engine.text import StopStrings
from lookahead.generate import LookaheadModel
from lookahead.loading.load import greedy_settings
from lookahead.serve.errors import bad_request
from lookahead.serve.protocol import MOST_BUDGET, Generation, LookaheadOptions

SEEDS = 1 << 64


def config_of(wanted: bool | LookaheadOptions | None, model: LookaheadModel) -> LookaheadConfig:
    """The config of a request: false means plain decoding, and options override the model's default."""
    if wanted is None or wanted is True:
        return model.default_config
    if wanted is False:
        return LookaheadConfig.autoregressive()
    given = wanted.model_dump(exclude_none=True, exclude={"steps", "trace"})
    if "sources" in given:
        given["sources"] = tuple(given["sources"])
    try:
        config = model.default_config.adapted(**given) if given else model.default_config
    except ValueError as error:
        raise bad_request(f"lookahead: {error}", "lookahead") from error
    most = max(MOST_BUDGET, model.default_config.budget)
    if config.budget > most:
        raise bad_request(
            f"lookahead: window, ngram and guesses make a step of {config.budget} tokens, and the server takes {most}; "
            "lower them, or give a budget",
            "lookahead",
        )
    try:
        return model.exact_config(config)
    except ValueError as error:
        raise bad_request(f"lookahead: {error}", "lookahead") from error


def sampling_of(body: Generation, model: LookaheadModel, logprobs: int | None) -> list[SamplingParams]:
    """Sampling parameters of each of the `n` choices. Choice i uses seed + i. The repetition penalty defaults to the
    model's generation config. `top_p` 0 leaves only the most likely token, so it is greedy."""
    bias = biases(body.logit_bias or {}, model.backend.vocab_size)
    seed = new_seed() if body.seed is None else body.seed
    top_p = 1.0 if body.top_p is None else body.top_p
    temperature = 1.0 if body.temperature is None else body.temperature
    if top_p == 0:
        temperature, top_p = 0.0, 1.0
    repetition = body.repetition_penalty
    if repetition is None:
        repetition = greedy_settings(model.model).get("repetition_penalty", 1.0)
    return [
        SamplingParams(
            temperature=temperature,
            top_k=max(0, body.top_k or 0),
            top_p=top_p,
            min_p=body.min_p or 0.0,
            seed=(seed + choice) % SEEDS,
            repetition_penalty=repetition,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=bias,
            logprobs=logprobs,
        )
        for choice in range(body.n or 1)
    ]


def biases(given: Mapping[str, float], vocabulary: int) -> dict[int, float]:
    """OpenAI's `logit_bias`, whose keys are token ids as strings."""
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and int(key) < vocabulary):
            raise bad_request(f"logit_bias: {key!r:.40} is not a token id of 0 to {vocabulary - 1}", "logit_bias")
        if not -100 <= value <= 100:
            raise bad_request(f"logit_bias: {value} of token {key} must be between -100 and 100", "logit_bias")
        found[int(key)] = value
    return found


def stops_of(body: Generation) -> StopStrings:
    return StopStrings([body.stop] if isinstance(body.stop, str) else body.stop or ())


def rules_of_body(
    body: Generation,
    prompt: list[int],
    most: int | None,
    model: LookaheadModel,
    config: LookaheadConfig,
    grammar: str | None,
) -> tuple[StopRules, int]:
    """The stop rules of a body, and how many tokens a reply that follows a grammar has at least: its mask keeps the end
    away for as long as the grammar can continue."""
    ignore_eos, least = bool(body.ignore_eos), body.min_tokens or 0
    stop_ids = body.stop_token_ids or ()
    rules = rules_of(prompt, most, model, config, ignore_eos and grammar is None, least, stop_ids)
    if grammar is None:
        return rules, least
    return replace(rules, min_tokens=0), rules.max_tokens if ignore_eos else least


def rules_of(
    prompt: list[int],
    most: int | None,
    model: LookaheadModel,
    config: LookaheadConfig,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
) -> StopRules:
    """The stop rules. `most` defaults to the rest of the context, and `stop_ids` end the text besides the model's own.
    Raises a 400 if the prompt leaves no room."""
    for token in stop_ids:
        if token >= model.backend.vocab_size:
            last = model.backend.vocab_size - 1
            raise bad_request(f"stop_token_ids: {token} is not one of the model's 0 to {last}", "stop_token_ids")
    limit, holds = model.backend.max_length, model.backend.holds()
    if holds is not None:
        limit = holds - config.budget if limit is None else min(limit, holds - config.budget)
    if not prompt:
        raise bad_request("the prompt has no tokens; give at least one", "prompt")
    if limit is not None and len(prompt) >= limit:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, and the model's context holds {limit}; shorten it",
            code="context_length_exceeded",
        )
    room = None if limit is None else limit - len(prompt)
    if most is None:
        most = room if room is not None else 4096
    elif room is not None:
        most = min(most, room)
    if min_tokens > most:
        raise bad_request(
            f"min_tokens={min_tokens} is more than the {most} tokens that there is room for", "min_tokens"
        )
    return StopRules(
        max_tokens=most,
        eos_ids=frozenset(stop_ids) | (frozenset[int]() if ignore_eos else model.stop_ids),
        max_length=model.backend.max_length,
        min_tokens=min_tokens,
    )
