"""`lookahead.parallel.load()`: a model on every rank, with the interface of a single loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

from lookahead.algorithm.sources import SharedMemory
from lookahead.cache import cache_dir
from lookahead.config import LookaheadConfig, SamplingParams, new_seed
from lookahead.engine.answer import Answer
from lookahead.engine.client import EngineClient
from lookahead.engine.engine import Engine
from lookahead.engine.prompt import as_plain, check_batch
from lookahead.engine.request import Request
from lookahead.engine.settings import RequestSettings
from lookahead.generate import LookaheadModel
from lookahead.loading.fitting import fitted
from lookahead.loading.load import greedy_settings, open_model
from lookahead.parallel.backend import ParallelBackend
from lookahead.parallel.group import START, TIMEOUT, Group, join
from lookahead.parallel.handshake import compare, facts_of
from lookahead.parallel.leader import Leader, run_follower
from lookahead.parallel.rank_info import RankInfo


class ParallelModel(LookaheadModel):
    """One rank's handle of a model that a group of ranks runs. All ranks make the same calls and get the same answers.

    The seed and config default to those of rank 0. The other ranks may omit `prompt`; if given, it must be the same.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        group: Group,
        config: LookaheadConfig | None = None,
        backend: str = "auto",
        log: Callable[[str], None] | None = None,
    ) -> None:
        with group.guarded():
            if processors := [name for name in greedy_settings(model) if name != "repetition_penalty"]:
                raise ValueError(
                    f"the model's generation config has {processors[0]}, which needs logits, and ranks "
                    "exchange only tokens; run it on one rank"
                )
            super().__init__(model, tokenizer, name, config, backend, log)
            facts = facts_of(model, tokenizer, self.backend, group)
        compare(group, facts)
        with group.guarded():
            if config is None and group.rank == 0:
                self.default_config = fitted(self.default_config, self.backend, cache_dir(), log, group.shares)
        self.group = group
        configs = group.agree("the measured config", json.dumps(asdict(self.default_config)).encode(), START)
        self.default_config = LookaheadConfig.from_json(json.loads(configs[0]))
        self.local_backend = self.backend
        self.backend = self._shared = ParallelBackend(self.local_backend, group)
        self.engine = Engine(self.backend)
        self.client = EngineClient(self.engine, thread=False)

    @property
    def rank(self) -> int:
        return self.group.rank

    def lead(self) -> None:
        """Make rank 0 the leader: its `client` accepts requests from many threads, and the other ranks `follow`."""
        self.client = EngineClient(self.engine, core=Leader(self.engine, self._shared, self.group))

    def follow(self, make: Callable[[Any], Request]) -> None:
        """Run the leader's requests until it leaves. `make` builds a request from a recipe's data."""
        run_follower(self.engine, self._shared, self.group, make)

    def alone(self) -> LookaheadModel:
        """This rank's model without the group, on the same weights and backend, for comparisons."""
        model = LookaheadModel.__new__(LookaheadModel)
        engine = Engine(self.local_backend)
        own = {"backend": engine.backend, "engine": engine, "client": EngineClient(engine), "memory": SharedMemory()}
        model.__dict__.update(self.__dict__ | own)
        return model

    def close(self) -> None:
        self.group.close()

    def _answers(self, prompt: Any, parameters: Mapping[str, Any], single: bool = False) -> tuple[bool, list[Answer]]:
        """The answers to start, the same on all ranks. Every rank raises ValueError if the requests differ."""
        error: Exception | None = None
        try:
            own = self._request_data(prompt, parameters, single)
        except (ValueError, TypeError) as mistake:
            error, own = mistake, {"error": str(mistake)}
        texts = self.group.agree("the same request", json.dumps(own, default=_number).encode())
        requests = [json.loads(text) for text in texts]
        first = requests[0]
        if "error" in first:
            raise error or ValueError(first["error"])
        for rank, other in enumerate(requests):
            if difference := _differs(first, other):
                raise ValueError(
                    f"rank {rank} was called with other arguments than rank 0: {difference}; use the same "
                    "arguments on every rank"
                )
        answers = []
        for ids, seed in zip(first["prompts"], first["seeds"], strict=True):
            wants = {**first["settings"], "seed": seed}
            if wants["config"] is not None:
                wants["config"] = LookaheadConfig.from_json(wants["config"])
            answers.append(self._answer(ids, RequestSettings(**wants)))
        return first["many"], answers

    def _request_data(self, prompt: Any, parameters: Mapping[str, Any], single: bool) -> dict[str, Any]:
        """This rank's request as plain data."""
        settings = RequestSettings.of(parameters)
        if prompt is None and self.group.rank:
            return {"follows": True}
        prompt = as_plain(prompt)
        many = check_batch(prompt, single)
        wants: dict[str, Any] = {**vars(settings), "stop": list(settings.stop_strings)}
        raw, seed = wants.pop("raw"), wants.pop("seed")
        if wants["logprobs"] is not None:
            given = f"logprobs={wants['logprobs']!r}"
            raise ValueError(f"{given}: ranks exchange tokens, not log-probabilities; request them on one rank")
        wants["logit_bias"] = SamplingParams(logit_bias=wants["logit_bias"] or ()).bias  # JSON has no integer keys
        if wants["method"] == "lookahead" and wants["config"] is None:
            wants["config"] = self.default_config
        if wants["config"] is not None:
            wants["config"] = asdict(wants["config"])
        prompts = [self.encode(one, raw=raw) for one in (prompt if many else [prompt])]
        seeds = None if seed is None and self.group.rank else [new_seed() if seed is None else seed for _ in prompts]
        return {"many": many, "prompts": prompts, "seeds": seeds, "settings": wants}


def load(
    name: str | Path | tuple[Any, Any] | None = None,
    *,
    group: Group | None = None,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    config: LookaheadConfig | None = None,
    log: Callable[[str], None] | None = None,
    rank_info: RankInfo | None = None,
    ranks: int | None = None,
    timeout: float = TIMEOUT,
    meeting_timeout: float | None = None,
    tensor_parallel: int = 1,
    check: bool = False,
) -> ParallelModel:
    """As `lookahead.load`, called by every rank that torchrun started. Models that differ are refused.

    `rank_info`, `ranks`, `timeout`, `meeting_timeout`, `tensor_parallel` and `check` are those of `join`. Give a
    `group` instead if the ranks have joined already, as with a tensor-parallel model.
    """
    joining: dict[str, Any] = {"rank_info": rank_info, "ranks": ranks, "timeout": timeout}
    joining |= {"meeting_timeout": meeting_timeout, "tensor_parallel": tensor_parallel, "check": check}
    if group is None:
        group = join(device=device, **joining)
    elif given := [name for name, value in joining.items() if value != signature(join).parameters[name].default]:
        raise ValueError(f"{given[0]} belongs to join(), and a group is given already; leave it out")
    if device in ("auto", "cuda") and not isinstance(name, tuple):
        device = group.device
    with group.guarded():
        model, tokenizer, label = open_model(name, dtype=dtype, device=device, log=log, fused=backend != "eager")
    loaded = ParallelModel(model, tokenizer, label, group, config, backend, log)
    with group.guarded():
        loaded.prepare(log=log)
    return loaded


def _differs(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    """A description of how a rank's request differs from rank 0's; None if it does not."""
    if "follows" in other:
        return None
    if "error" in other:
        return str(other["error"])
    if other["seeds"] is not None and other["seeds"] != first["seeds"]:
        return f"seed {other['seeds'][0]} and {first['seeds'][0]}"
    if (other["many"], other["prompts"]) != (first["many"], first["prompts"]):
        return "another prompt"
    for name, value in first["settings"].items():
        if other["settings"][name] != value:
            return f"{name} {other['settings'][name]!r:.60} and {value!r:.60}"
    return None


def _number(value: Any) -> Any:
    """Turn numpy's and torch's scalars into Python's, for JSON."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a setting cannot be {value!r:.60}")
